"""Experts that transformers spreads over ranks, under plans of groups of any degree: loss and
gradients are those of one process. The wide matrix is `test_every_expert.py`."""

import re
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from hf_flexseq import FlexSeqArguments, FlexSeqEngine
from hf_flexseq.base import versions
from hf_flexseq.cost.analytic_model import PARAMETER_BYTES
from hf_flexseq.distributed.reduction import local
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.experts import right_gradients
from hf_flexseq.hf.model.facts import adapters_beside_shards
from tests.hf.experts import (
    LAYOUTS,
    Training,
    errors_of_steps,
    make,
    one_process_of,
    save,
    spread,
    train,
    with_adapter,
)
from tests.hf.objectives import assert_alike
from tests.hf.tiny import documents, own_batches, whole
from tests.hf.trainers import difference
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes

TWO = {"fsdp_size": 2, "ep_size": 2}


# ---- exactness


def errors(rank, world_size, wanted, layout, options):
    return errors_of_steps(rank, world_size, wanted, LAYOUTS[layout][1], **options)


ROUTER_LOSS = {"router_loss": True}
ON_EXPERTS = {"adapted": ()}
# By number of ranks: layout, family, options of `one_process_of` and of `errors_of_steps`.
RUNS = {
    2: [
        ("2 ranks", "GptOss", ROUTER_LOSS, {"checkpointing": True}),
        ("2 ranks", "Mixtral", {}, {"choices": True}),
        ("2 ranks", "GptOss", ON_EXPERTS, {"checkpointing": True, "steps": 1}),
    ],
    4: [
        ("4 ranks in 2 groups", "Qwen3Moe", ROUTER_LOSS, {"checkpointing": True}),
        ("2 replicas", "DeepseekV3", {}, {"steps": 1}),
    ],
}


@pytest.mark.parametrize(("world_size", "runs"), RUNS.items())
def test_float64_gradients_equal_one_process(tmp_path, world_size, runs):
    cases = []
    for layout, family, kind, options in runs:
        wanted = one_process_of(family, tmp_path, **kind)
        cases.append((wanted, layout, options))
    for (_, *case), by_rank in zip(cases, run_cases(errors, world_size, cases), strict=True):
        for found in by_rank:
            assert max(found.values()) < 1e-10, case


# ---- trainers

# SFT has a router loss, and evaluates; GRPO generates.
TRAININGS = (
    Training(kind="sft", steps=2),
    Training(kind="dpo", steps=1, adapter="attention and experts", is_retrained=True),
    Training(kind="grpo", steps=1),
)


def test_trainers_equal_the_plain_ones(tmp_path):
    """In one process where it can be: ranks draw different completions."""
    save(Training(kind="plain"), tmp_path)
    # a run by ranks comes last, as among the plain ones below
    trainings = sorted(TRAININGS, key=lambda one: one.is_of_ranks)
    ours = run_cases(train, 2, [(tmp_path, one, TWO) for one in trainings], seconds=120)
    by_ranks = [one for one in trainings if one.is_of_ranks]
    alone = [one for one in trainings if not one.is_of_ranks]
    plain = run_cases(train, 1, [(tmp_path, one, None) for one in alone])
    plain += run_cases(train, 2, [(tmp_path, one, None) for one in by_ranks])
    for training, wanted, found in zip([*alone, *by_ranks], plain, ours, strict=True):
        for run in found:
            apart = difference(wanted[0], run)
            assert_alike(apart, weights=2e-6)
            assert apart.figures > 15, training


# ---- adapters


def adapted_before(rank, world_size, path):
    """With an optimizer that is made before the adapter is spread: the largest change of each
    matrix of the adapter in two steps, numbers of it on this rank over all, whether memory for
    these is counted, why it is not merged, and `losses_of_a_copy`."""
    model = with_adapter(spread(path, Qwen3MoeForCausalLM, TWO))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    accelerator = Accelerator(cpu=True)
    engine = FlexSeqEngine(accelerator, FlexSeqArguments(cost_model="estimate", lookahead=0))
    for _ in range(2):  # the second one finds the adapter spread
        engine.attach(model)
    optimizer = accelerator.prepare(optimizer)
    weights = [p for p in model.parameters() if p.requires_grad]
    before = [whole(weight).clone() for weight in weights]
    own = own_batches(documents([5, 9, 3, 7]), rank, world_size)
    for step in engine.steps(own, 1):
        step.backward(model)
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(weights, before, strict=True)
    changes = [float((whole(weight) - former).abs().max()) for weight, former in pairs]
    shares = {local(weight).numel() / weight.numel() for weight in weights}
    cost = engine.cost
    engine.detach()
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    here = sum(local(weight).numel() for weight in weights)
    is_counted = cost.sharded_state_bytes == frozen
    is_counted &= adapters_beside_shards(model.get_base_model()) == (here, 2 * here)
    is_counted &= cost.state_bytes >= PARAMETER_BYTES * here
    with pytest.raises(NotImplementedError) as raised:
        model.merge_adapter()
    return changes, shares, is_counted, str(raised.value), losses_of_a_copy(model)


def losses_of_a_copy(model):
    """The loss of a row with the adapter that was there, and with a copy that is added later, as
    TRL adds its reference."""
    ids = torch.arange(2, 40).unsqueeze(0)
    losses = []
    with torch.no_grad():
        losses.append(float(model(input_ids=ids, labels=ids).loss))
        model.add_adapter("copy", model.peft_config["default"])
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            if ".default." in name:
                weights[name.replace(".default.", ".copy.")].data.copy_(weight.data)
        model.set_adapter("copy")
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    return losses


def test_an_optimizer_that_is_there_trains_the_spread_adapter(tmp_path):
    path = save(Training(kind="plain"), tmp_path)
    for changes, shares, is_counted, refusal, losses in run_ranks(adapted_before, 2, path):
        assert len(changes) == 8
        assert min(changes) > 0
        assert shares == {0.5}
        assert is_counted
        assert losses[1] == losses[0]
        assert re.search("proj of experts that DistributedConfig has spread .* in one pr", refusal)
        assert "\n" not in refusal


# ---- torch's division of gradients


def float16_norms(rank, world_size, path):
    """Norms of the gradient of one expert matrix in float16, of stock code and inside
    `right_gradients`, over that in float32."""
    ids = torch.arange(2, 40).unsqueeze(0) + rank
    norms = []
    for dtype, corrected in (
        (torch.float32, False),
        (torch.float16, False),
        (torch.float16, True),
    ):
        model = spread(path, Qwen3MoeForCausalLM, TWO, dtype)
        with right_gradients(model) if corrected else nullcontext():
            model(input_ids=ids, labels=ids).loss.backward()
        gradient = model.model.layers[0].mlp.experts.down_proj.grad.full_tensor()
        norms.append(float(gradient.double().norm()))
    return norms[1] / norms[0], norms[2] / norms[0]


def test_float16_gradients_are_not_half_as_long(tmp_path):
    path = save(Training(kind="plain"), tmp_path)
    for stock, corrected in run_ranks(float16_norms, 2, path):
        assert stock == pytest.approx(0.5, rel=0.02)
        assert corrected == pytest.approx(1.0, rel=0.02)


# ---- what is refused


def refusal(rank, world_size, path, config):
    """The line by which a model is refused when it is loaded or checked. config: of
    `DistributedConfig`, the parameters that are adapted, and the version of PEFT."""
    config = dict(config)
    adapted = config.pop("adapted", None)
    found = {"peft": config.pop("peft", None)}
    real = versions.installed
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(versions, "installed", lambda one: found.get(one) or real(one))
            model = spread(path, AutoModelForCausalLM, config)
            if adapted:
                get_peft_model(model, LoraConfig(r=2, target_parameters=adapted))
            check_model(model)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return None


def test_what_is_not_exact_is_refused_in_one_line(tmp_path):
    paths = {
        name: save(Training(kind="plain", family=name), tmp_path)
        for name in ("Qwen3Moe", "GptOss", "JetMoe")
    }
    make("KimiLinear").save_pretrained(tmp_path / "published")  # in the form of the hub
    another_plan = {"ep_plan": {"model.layers.*.mlp.experts": "grouped_gemm"}}
    cases = {
        "pp_size=2: .*pipeline_parallel_size": (paths["Qwen3Moe"], {"pp_size": 2}),
        "tp_size=2: ": (paths["Qwen3Moe"], {"tp_size": 2, "ep_size": 2}),
        r"ep_size=2: its ep_plan \(.*experts: grouped_gemm.*\) has no ep_dispatch_experts": (
            paths["Qwen3Moe"],
            TWO | another_plan,
        ),
        r"ep_size=2 with an adapter on model.layers.0.mlp.experts.down_proj_bias: an ada.* bias": (
            paths["GptOss"],
            TWO | {"adapted": ["mlp.experts.down_proj_bias"]},
        ),
        "gate_up_proj: to save it, it needs peft 0.21.1, and 0.21.0 is installed; leave it out": (
            paths["Qwen3Moe"],
            TWO | {"adapted": ["mlp.experts.gate_up_proj"], "peft": "0.21.0"},
        ),
        # by transformers, at load
        "AllReduceEP needs .* the same batch": (
            paths["Qwen3Moe"],
            TWO | {"ep_implementation": "all_reduce"},
        ),
        "JetMoeForCausalLM` has no `ep_plan`": (paths["JetMoe"], TWO),
        # whether or not it has experts
        "KimiLinearForCausalLM: transformers has mixed up the rows of .*conv1d.weight": (
            tmp_path / "published",
            {"fsdp_size": 2},
        ),
    }
    for said, by_rank in zip(cases, run_cases(refusal, 2, list(cases.values())), strict=True):
        for line in by_rank:
            assert re.search(said, line), line
            assert "\n" not in line
    assert refusal(0, 1, save(Training(kind="plain", family="KimiLinear"), tmp_path), {}) is None
