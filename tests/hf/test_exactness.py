"""The same batch gives the same loss and gradients under any plan, to rounding: float64, random
legal plans of mixed degrees, strategies, packing and micro-batch counts, against one process that
takes one document at a time. Four ranks are two nodes. Families with other layers are in
`test_reach.py`, and under FSDP2 in `test_shared_prefixes.py`."""

import itertools

import pytest
import torch

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


def test_float32_gradients_are_close_to_one_process():
    for worst in run_ranks(gradients_under_random_plans, 3, "ddp", False, torch.float32, 6):
        assert worst["loss"] < 1e-6
        assert worst["gradients"] < 1e-5
