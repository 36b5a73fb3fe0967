"""MLPs of real families in tiles: which modules they are, that loss and gradients stay those of
one process, also under ZeRO-3, and why some are left alone. Ranks are threads, and processes
under ZeRO-3."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.models.swin.modeling_swin import SwinDropPath

from hf_flexseq.cost.choices import choices_of
from hf_flexseq.hf.model import tiles
from hf_flexseq.hf.model.tiles import MlpTiles, find_mlps, priced_for
from hf_flexseq.plan.memory import MemoryChoice
from tests.budget import others_nightly
from tests.cost.test_choices import llama
from tests.hf import hybrids, test_reach
from tests.hf.by_hand import TWO_NODES, worst_error
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_reach import FAMILIES, make_model, plans_across, stays_in_float64  # noqa: F401
from tests.hf.tiny import (
    VOCAB,
    documents,
    reference_gradients,
    refused,
    relative_errors,
    tiny_llama,
    tiny_model,
)
from tests.operators import Noted
from tests.ranks import run_cases

TOKENS = 11


def model_of(family):
    return make_hybrid(family) if family in HYBRIDS else make_model(family)


# ---- which modules they are

# Families without any, of all that this project tries.
WITHOUT = {
    *("GptOss", "GraniteMoe", "OPT", "Mixtral", "Qwen3Moe", "Olmoe", "Cohere2Moe"),
    *("GraniteMoeSWA", "JetMoe", "Mellum", "Zamba2"),
}


@pytest.mark.nightly
def test_most_families_have_such_modules():
    families = {**FAMILIES, **HYBRIDS}
    assert {family for family in families if not find_mlps(model_of(family)).mlps} == WITHOUT
    assert len(families) - len(WITHOUT) >= 60


# ---- loss and gradients


def in_tiles(plans):
    """The plans with tiles in all micro-batches, as many as are tried, one after the other."""
    tiled = []
    for count, plan in zip((3, 7), plans, strict=True):
        choice = MemoryChoice(mlp_tiles=count)
        batches = tuple(replace(batch, memory=choice) for batch in plan.micro_batches)
        tiled.append(replace(plan, micro_batches=batches))
    return tiled


@pytest.fixture
def counts(monkeypatch):
    """The tiles of each call of an MLP."""
    found = []
    compute = tiles.in_tiles

    def counted(function, hidden, count):
        found.append(count)
        return compute(function, hidden, count)

    monkeypatch.setattr(tiles, "in_tiles", counted)
    return found


def check(make, lengths, name, counts):
    """Compare with one process; every other plan is checkpointed."""
    wanted = reference_gradients(make(), documents(lengths), attention="eager")
    plans = in_tiles(plans_across(lengths, name))
    attach = lambda model: MlpTiles(model).attach()  # noqa: E731
    error = worst_error(make, TWO_NODES, plans, documents(lengths), wanted, attached=attach)
    assert error < 1e-10
    assert set(counts) == {3, 7}
    return wanted[1]


TRIED = ("Gemma2", "Phi3", "GPTNeoX", "DeepseekV3", "Qwen3Next")
TILED = sorted({*FAMILIES, *HYBRIDS} - WITHOUT)


@pytest.mark.slow
@pytest.mark.parametrize("family", others_nightly(TILED, tried=TRIED))
def test_a_family_in_tiles_is_exact(family, stays_in_float64, counts):  # noqa: F811
    lengths = hybrids.LENGTHS if family in HYBRIDS else test_reach.LENGTHS
    check(partial(model_of, family), lengths, family, counts)


def with_lora(**options):
    torch.manual_seed(1)
    names = ["gate_proj", "down_proj", "q_proj"]
    config = LoraConfig(r=2, target_modules=names, init_lora_weights=False, **options)
    return get_peft_model(tiny_llama(), config).double()


def test_adapters_in_an_mlp_in_tiles_are_exact(stays_in_float64, counts):  # noqa: F811
    gradients = check(with_lora, test_reach.LENGTHS, "Llama", counts)
    adapters = [name for name in gradients if "mlp" in name and "lora_" in name]
    assert all(gradients[name].norm() > 0 for name in adapters)
    assert len(adapters) == 2 * 2 * 2


# ---- a model that is attached


def called(model, count=None):
    """The logits of a call whose micro-batch has so many tiles, or no choice."""
    memory = None if count is None else MemoryChoice(mlp_tiles=count)
    tokens = torch.arange(TOKENS)[None] % VOCAB
    context = SimpleNamespace(memory=memory)
    return model(input_ids=tokens, use_cache=False, seq_ctx=context).logits


def test_without_tiles_nothing_is_on_the_path(counts):
    model = tiny_llama()
    attached = MlpTiles(model)
    attached.attach_for(SimpleNamespace(micro_batches=[SimpleNamespace(memory=None)]))
    attached.attach_for(SimpleNamespace(micro_batches=[SimpleNamespace(memory=MemoryChoice())]))
    for layer in model.model.layers:
        assert "forward" not in vars(layer.mlp)
        assert not layer._forward_pre_hooks
    attached.attach()
    wanted = called(model)
    called(model, 1)
    assert not counts
    torch.testing.assert_close(called(model, 4), wanted, rtol=1e-13, atol=1e-13)
    assert counts == [4, 4]
    attached.detach()
    attached.detach()
    called(model, 4)
    assert counts == [4, 4]
    for layer in model.model.layers:
        assert "forward" not in vars(layer.mlp)
        assert not layer._forward_pre_hooks


# ---- why some are left alone


class OwnMlp(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return self.mlp(hidden)


def with_own_projection():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = OwnMlp(layer.mlp.up_proj)
    return model


def with_replaced_forward():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = nn.functional.gelu
    return model


def with_hooks(kind):
    model = tiny_llama()
    for layer in model.model.layers:
        projection = layer.mlp.down_proj
        if kind == "weight":
            projection.weight.register_hook(lambda gradient: None)
        else:
            getattr(projection, f"register_{kind}")(lambda *args: None)
    return model


class FsdpLinear(FSDPModule, nn.Linear):
    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)


def with_units():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = FsdpLinear(32, 48, bias=False)
    return model


starcoder = partial(tiny_model, "Starcoder2", torch.float32)


def with_drop_path():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = SwinDropPath(0.1)
    return model


REASONS = {
    "drop_prob=0.1": with_drop_path,
    "residual_dropout=0.1": lambda: starcoder(residual_dropout=0.1),
    "dropout in .*lora_dropout": lambda: with_lora(lora_dropout=0.1).get_base_model(),
    "a unit of FSDP2's of its own": with_units,
    r"code of yours .*up_proj \(OwnMlp\)": with_own_projection,
    "code of yours .* on down_proj": lambda: with_hooks("forward_hook"),
    "code of yours would see its tiles .*down_proj": lambda: with_hooks("full_backward_hook"),
    "hook on the gradient of down_proj.weight": lambda: with_hooks("weight"),
    "the forward of act_fn was replaced": with_replaced_forward,
    "every token alone, but for experts": lambda: make_model("OPT"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_an_mlp_is_left_alone_for_a_reason(reason):
    with refused(f"^no MLP of .* can be computed in tiles: .*{reason}"):
        MlpTiles(REASONS[reason]()).attach()


def test_planners_choose_no_tiles_for_a_model_without_any():
    cost = llama(checkpointing=True)
    assert priced_for(cost, make_model("Llama")) is cost
    assert any(choice.mlp_tiles > 1 for choice in choices_of(cost, 8))
    without = choices_of(priced_for(cost, make_model("OPT")), 8)
    assert all(choice.mlp_tiles == 1 for choice in without)


# ---- under ZeRO-3 weights are gathered once for all tiles


LAYERS = 2
ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        # nothing is gathered ahead, nor kept between forward and backward
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
    },
}
WEIGHT = 32 * 48  # numbers in a weight of an MLP


def numbers_gathered(operator, args, result):
    return args[0].numel() if operator is torch.ops.c10d._allgather_base_.default else None


def loss_of(model, tokens, count):
    """The loss of so many tokens, in so many tiles."""
    memory = None if count is None else MemoryChoice(mlp_tiles=count)
    row = torch.arange(tokens)[None] % 61
    context = SimpleNamespace(memory=memory)
    return model(input_ids=row, labels=row, use_cache=False, seq_ctx=context).loss


def zero3_steps(rank, world_size, checkpointing, counts):
    """For each micro-batch: how many gathers bring one weight of an MLP, and how many all three;
    and the largest error of a gradient. counts: its tiles; None before any are attached."""
    import deepspeed  # which takes long
    from deepspeed.utils import safe_get_full_grad, z3_leaf_module

    # 1. one process: ranks have different numbers of tokens, fewer than tiles as well
    lengths = (40, 2)
    plain = tiny_llama(torch.float32)
    for tokens in lengths:
        (loss_of(plain, tokens, None) / world_size).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

    # 2. the same under ZeRO-3, again and again
    deepspeed.init_distributed("gloo")
    model = tiny_llama(torch.float32).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ZERO3)
    attached = MlpTiles(model)
    found = []
    for count in counts:
        if count is not None:
            attached.attach()
        with Noted(numbers_gathered) as gathers:
            engine.backward(loss_of(engine, lengths[rank], count))
        gradients = {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
        error = max(relative_errors(gradients, wanted).values())
        found.append((gathers.found.count(WEIGHT), gathers.found.count(3 * WEIGHT), error))
        engine.step()
    mlp = model.model.layers[0].mlp
    assert z3_leaf_module(mlp)
    attached.detach()
    assert not z3_leaf_module(mlp)
    return found


@pytest.mark.processes
def test_zero3_equals_one_process_and_gathers_once_for_all_tiles():
    """Once in the forward and once in the backward, whatever a rank's number of tokens, also where
    DeepSpeed has learned another order of modules before the first tiles come."""
    always, late = (5, 9, 1, 5), (None, None, None, 5, 9, 1, 5)
    cases = [
        (checkpointing, counts) for checkpointing in (False, True) for counts in (always, late)
    ]
    by_case = run_cases(zero3_steps, 2, cases, seconds=300)
    for (checkpointing, counts), by_rank in zip(cases, by_case, strict=True):
        for found in by_rank:
            assert max(error for *_, error in found) < 1e-5
            gathers = [counted for *counted, _ in found]
            if counts == always:
                assert gathers == [[0, 2 * LAYERS]] * 4
            else:
                alone = (
                    3 * 2 + (2 if checkpointing else 0)
                ) * LAYERS  # a replay gathers two again
                assert gathers[:3] == [[alone, 0]] * 3
                # of one MLP a weight is gathered alone, since the others were not freed
                assert all(sum(counted) == 2 * LAYERS for counted in gathers[3:])
