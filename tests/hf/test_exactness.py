"""The same batch gives the same loss and gradients under any plan, to rounding: float64, random
legal plans of mixed degrees, strategies, packing and micro-batch counts, against one process that
takes one document at a time. Four ranks are two nodes."""

import itertools
from functools import partial

import pytest
import torch

from hf_flexseq.base.versions import is_older
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import (
    attached,
    documents,
    errors,
    own_batches,
    random_steps,
    reference_gradients,
    sharded,
    tiny_llama,
    worst_of,
)
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes


LENGTHS = [1, 2, 17, 5, 31, 3, 1, 40, 11, 2, 13, 23]


def gradients_under_random_plans(
    rank,
    world_size,
    sharding,
    checkpointing,
    dtype,
    plans,
    make=tiny_llama,
    attention="sdpa",
    patched=lambda model: None,
    examples=None,
    **engine_options,
):
    """The largest relative errors of loss, gradient norm and parameter gradients over `plans`
    random plans. make: returns the model; attention: of the one process; patched: is called with
    the attached model; examples: None for documents of LENGTHS; engine_options: of
    `RandomPlanEngine`."""
    examples = documents(LENGTHS) if examples is None else examples
    wanted = reference_gradients(make().double(), examples, attention)
    wanted_norm = norm(wanted[1])
    model = make().double().to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if sharding == "fsdp2":
        sharded(model)
    engine = attached(model.train(), world_size * 100 + checkpointing, **engine_options)
    patched(model)
    batches = own_batches(examples, rank, world_size)
    ddp = {} if sharding == "ddp" else None
    found = []
    for step, own_loss, gradients in random_steps(engine, model, batches, ddp=ddp, plans=plans):
        loss = step.mean_loss()
        assert own_loss == pytest.approx(loss, rel=1e-6)
        of_norm = float((norm(gradients) / wanted_norm - 1).abs())
        found.append({**errors(loss, gradients, wanted), "norm": of_norm})
    return worst_of(found)


def norm(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()


# By number of ranks: sharding, checkpointing. Every pair is there; all else with `-m nightly`.
SOME = {2: [("ddp", False), ("fsdp2", True)], 4: [("ddp", True), ("fsdp2", False)]}
ALL = {ranks: list(itertools.product(("ddp", "fsdp2"), (False, True))) for ranks in (2, 3, 4)}


@pytest.mark.parametrize(
    ("world_size", "runs"),
    [*SOME.items(), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ALL.items())],
)
def test_float64_gradients_equal_one_process(world_size, runs):
    cases = [(*run, torch.float64, 3 if run[0] == "ddp" else 2) for run in runs]
    options = {"ranks_per_node": 2 if world_size == 4 else None, "seconds": 150}
    for by_rank in run_cases(gradients_under_random_plans, world_size, cases, **options):
        for worst in by_rank:
            assert worst["loss"] < 1e-12
            assert worst["norm"] < 1e-10
            assert worst["gradients"] < 1e-10


def families_under_fsdp2(rank, world_size, families):
    """What `gradients_under_random_plans` does, of families whose layers differ."""
    settings = ("fsdp2", True, torch.float64, 2)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        for family in families:
            make = partial(make_hybrid if family in HYBRIDS else make_model, family)
            found[family] = gradients_under_random_plans(
                rank, world_size, *settings, make=make, attention="eager"
            )
    return found


def test_families_under_fsdp2_equal_one_process():
    """Sinks are parameters of attention itself, and shared keys go from unit to unit; recurrent
    mixers read the weights of their convolution without calling it."""
    families = ("GptOss",)
    if not is_older("transformers", "5.23"):  # older layers are refused by what they ask for
        families += ("Gemma4 with shared keys", "Qwen3_5")
    for by_family in run_ranks(families_under_fsdp2, 2, families, seconds=120):
        for family, worst in by_family.items():
            assert worst["gradients"] < 1e-10, family


def test_float32_gradients_are_close_to_one_process():
    for worst in run_ranks(gradients_under_random_plans, 3, "ddp", False, torch.float32, 6):
        assert worst["loss"] < 1e-6
        assert worst["gradients"] < 1e-5
