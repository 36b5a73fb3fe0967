"""Experts that transformers spreads over ranks, under planned groups: loss and gradients of
steps, or trained weights, are those of one process; in all layouts with `-m nightly`.

Steps have groups of 1, 2 and 4 ranks and a rank without tokens, and gather and reduce in each
micro-batch or once. float64 tests run `experts_implementation="eager"`. The plain trainer runs in
one process with the step as one batch; on as many ranks where these draw completions, or the loss
depends on a rank's own batch. PEFT cannot put adapters on the attention of a model in replicas."""

import re
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from hf_flexseq import FlexSeqArguments, FlexSeqCallback, FlexSeqEngine
from hf_flexseq.base import versions
from hf_flexseq.cost.analytic_model import PARAMETER_BYTES
from hf_flexseq.distributed.reduction import local
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.experts import right_gradients
from hf_flexseq.hf.model.facts import adapters_beside_shards
from hf_flexseq.hf.model.small import small_model
from tests.differential.runs import begin_anew
from tests.hf.experts import (
    EXPERTS,
    LAYOUTS,
    ROUTED,
    Training,
    errors_of_steps,
    in_float64,
    make,
    matrices_of_experts,
    one_process,
    one_process_of,
    save,
    spread,
    train,
    with_adapter,
)
from tests.hf.hybrids import HYBRIDS
from tests.hf.model_families import SETTING, TAKEN, families, options_of, rows_of
from tests.hf.objectives import BOUNDS, OPTIONS, Case, assert_alike, make_trainer, save_inputs
from tests.hf.tiny import documents, own_batches, refused, whole
from tests.hf.trainers import difference, trained
from tests.ranks import run_cases, run_ranks
from tests.versions import pinned_transformers, reads_log_probabilities

pytestmark = pytest.mark.processes

TWO = {"fsdp_size": 2, "ep_size": 2}


NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(1000)]
SECONDS = 900  # for the ranks of a nightly test


def marked(*rows):
    return [pytest.param(*row, marks=NIGHTLY) for row in rows]


# ---- exactness


def of_steps(rank, world_size, *case):
    *given, options = case
    return errors_of_steps(rank, world_size, *given, **options)


def assert_exact(cases, ranks):
    """cases: (what one process has made, the layout, options of `errors_of_steps`)."""
    by_case = run_cases(of_steps, ranks, cases, seconds=SECONDS)
    for case, by_rank in zip(cases, by_case, strict=True):
        for found in by_rank:
            assert max(found.values()) < 1e-10, case[2]


CHECKPOINTED = {"checkpointing": True}
ROUTER_LOSS = {"router_loss": True}
ON_EXPERTS = {"adapted": ()}
# By number of ranks: layout, family, options of `one_process_of` and of `errors_of_steps`.
RUNS = {
    2: [
        ("2 ranks", "GptOss", ROUTER_LOSS, CHECKPOINTED),
        ("2 ranks", "Mixtral", {}, {"choices": True}),
        ("2 ranks", "GptOss", ON_EXPERTS, {**CHECKPOINTED, "steps": 1}),
    ],
    4: [
        ("4 ranks in 2 groups", "Qwen3Moe", ROUTER_LOSS, CHECKPOINTED),
        ("2 replicas", "DeepseekV3", {}, {"steps": 1}),
    ],
}


def every_run(family, layout):
    """Of a family in a layout; adapters of some families in all layouts, of all on two ranks."""
    kinds = [({}, {}), ({}, CHECKPOINTED), ({}, {"choices": True})]
    if family in ROUTED:
        kinds.append((ROUTER_LOSS, CHECKPOINTED))
    if layout == "2 ranks" or family in ("Qwen3Moe", "GptOss", "Mixtral"):
        kinds += [(ON_EXPERTS, {}), (ON_EXPERTS, CHECKPOINTED)]
    return LAYOUTS[layout][0], [(layout, family, *kind) for kind in kinds]


EVERY_RUN = [every_run(family, layout) for family in EXPERTS for layout in LAYOUTS]


@pytest.mark.parametrize(("world_size", "runs"), [*RUNS.items(), *marked(*EVERY_RUN)])
def test_float64_gradients_equal_one_process(tmp_path, world_size, runs):
    cases = []
    for layout, family, kind, options in runs:
        wanted = one_process_of(family, tmp_path, **kind)
        cases.append((wanted, LAYOUTS[layout][1], options))
    assert_exact(cases, world_size)


# Taken, and with a plan that spreads experts alone. The plan of Gemma 4 cuts dense layers, too,
# which transformers refuses beside FSDP; rows of Kimi's convolutions are mixed up in a checkpoint
# of Bailing's.
SPREAD = [
    row[0].strip("`")
    for row in rows_of("families.csv")
    if row[1].startswith((TAKEN, SETTING)) and row[3] == "yes" and row[0] != "`bailing_hybrid`"
]


@pinned_transformers
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("name", marked(*([name] for name in SPREAD)))
def test_gradients_of_every_family_with_a_plan_for_experts(tmp_path, name, is_adapted):
    """In evaluation mode, where routers draw no noise; adapted: of LoRA on experts."""
    family = families()[name]
    torch.manual_seed(0)
    model = small_model(family.kind, options_of(family, None)).double().eval()
    assert not is_adapted or matrices_of_experts(model)
    model.set_experts_implementation("eager")
    ranks, config = LAYOUTS["2 ranks"]
    with in_float64():
        wanted = one_process(model, tmp_path / name, adapted=() if is_adapted else None)
    assert_exact([(wanted, config, {})], ranks)


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


BOTH = "attention and experts"
EVERY_TRAINING = [Training(kind=kind) for kind in ("plain", "sft", *BOUNDS)]
EVERY_TRAINING += [
    Training(kind="sft", adapter=adapter) for adapter in ("attention", "experts", BOTH)
]
EVERY_TRAINING += [Training(kind=kind, adapter=BOTH) for kind in ("dpo", "grpo")]
EVERY_ROW = [
    (training, layout)
    for training in EVERY_TRAINING
    for layout in LAYOUTS
    if "attention" not in (training.adapter or "") or "replicas" not in layout
]
EVERY_ROW += [(Training(kind="plain", family=family), "2 ranks") for family in EXPERTS]


@pytest.mark.parametrize(
    ("training", "layout"), marked(*EVERY_ROW), ids=lambda one: getattr(one, "kind", one)
)
def test_ten_steps_of_trainers(tmp_path, training, layout):
    ranks, config = LAYOUTS[layout]
    save(training, tmp_path)
    alone = ranks if training.is_of_ranks else 1
    wanted = run_ranks(train, alone, tmp_path, training, None, seconds=SECONDS)[0]
    found = run_ranks(train, ranks, tmp_path, training, config, seconds=SECONDS)[0]
    # Recurrent layers round more, whether or not experts are spread. So does distillation, where
    # the plain trainer is 4e-6 from itself with halved batches.
    rounds_more = training.family in HYBRIDS or training.kind == "distillation"
    bound = 1e-5 if rounds_more else 2e-6
    apart = difference(wanted, found)
    assert apart.weights < bound
    # KTO's KL comes of sums of log-probabilities of about 40 in float32, whose last bit is 4e-6
    assert apart.metrics < (1e-5 if training.kind == "kto" else bound), apart.metric
    assert not apart.missing


# ---- a reference under ZeRO-3


def of_experts(rank, world_size, folder):
    """The plain trainer's difference from ours, and what is said of a reference that DeepSpeed
    has prepared before the callback comes, under ZeRO-3, with experts that run one by one."""
    case = Case(kind="dpo", steps=2, sharding="zero3")

    def made(is_ours):
        begin_anew(5)
        models = {name: tiny_experts(seed) for seed, name in enumerate(("model", "ref_model"))}
        return make_trainer(case, is_ours, folder, **models)

    apart = difference(trained(made(False)), trained(made(True)))
    with refused("ref_model .*DeepseekV3.*Experts.*put FlexSeqMixin in front of the trainer"):
        FlexSeqCallback(made(False), FlexSeqArguments(**OPTIONS))
    return apart


def tiny_experts(seed):
    model = make("DeepseekV3")
    model.set_experts_implementation("eager")
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model


@reads_log_probabilities
def test_zero3_gathers_the_experts_of_a_reference_at_once(tmp_path):
    save_inputs(tmp_path)
    for apart in run_ranks(of_experts, 2, tmp_path, seconds=120):
        assert_alike(apart, weights=BOUNDS["dpo"])


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
