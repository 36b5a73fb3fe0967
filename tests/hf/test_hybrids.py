"""Models with recurrent layers: on two nodes of two ranks, under random plans, plain and
checkpointed, each one's loss and gradients are those of transformers on every document alone.
Ranks are threads. `scripts/benchmarks/families.py --hybrids` takes all of them, every strategy,
and two, three and four ranks, too; what is refused is in `test_recurrent.py`."""

import random
from itertools import cycle

import pytest

from hf_flexseq.plan import Group, MicroBatch, Plan
from tests.budget import examples
from tests.hf.by_hand import TWO_NODES, attach, run_plan
from tests.hf.hybrids import LENGTHS, make_hybrid
from tests.hf.test_reach import (
    stays_in_float64,  # noqa: F401  (a fixture)
)
from tests.hf.tiny import documents, reference_gradients, relative_errors
from tests.plans import random_plan
from tests.ranks import join, run_threads

# One of each kind: the others differ from these in sizes and in what stands between the mixers.
TRIED = ("Qwen3Next", "KimiLinear", "Bamba without attention", "Zamba2", "Lfm2")
CHECKPOINTING = (False, True)


def plans_of(family, topology):
    """Plans of this family's own, each with a sequence that several ranks share; one for each of
    CHECKPOINTING."""
    rng = random.Random(f"{family} {topology}")
    plans = []
    while len(plans) < len(CHECKPOINTING):
        plan = random_plan(LENGTHS, topology.world_size, rng, nodes=topology.nodes)
        groups = [group for batch in plan.micro_batches for group in batch.groups]
        if any(group.degree > 1 for group in groups):
            plans.append(plan)
    return plans


def plan_of_strategy(strategy, topology):
    """All ranks share all sequences; with `local`, each has its own."""
    ranks = tuple(range(topology.world_size))
    everything = tuple(range(len(LENGTHS)))
    if strategy == "local":
        parts = [everything[rank :: len(ranks)] for rank in ranks]
        groups = [
            Group(ranks=(rank,), sequences=part, strategy=strategy)
            for rank, part in zip(ranks, parts, strict=True)
        ]
    else:
        groups = [Group(ranks=ranks, sequences=everything, strategy=strategy)]
    return Plan(
        lengths=tuple(LENGTHS),
        micro_batches=(MicroBatch(groups=tuple(groups)),),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="test",
        planning_s=0.0,
    )


def errors_of(rank, world_size, family, topology, plans, wanted):
    """The largest relative error of loss and gradients under each plan, of which a whole number of
    CHECKPOINTING take turns."""
    communicator = join(topology)
    model = make_hybrid(family)
    recurrent = attach(model)
    wanted_loss, wanted_gradients = wanted
    worst = []
    for plan, checkpointing in zip(plans, cycle(CHECKPOINTING), strict=False):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        loss, gradients, _ = run_plan(model, plan, documents(LENGTHS), communicator)
        errors = relative_errors(gradients, wanted_gradients)
        worst.append(max(abs(loss / wanted_loss - 1), *errors.values()))
    recurrent.detach()
    return worst


@pytest.mark.parametrize("family", TRIED[: examples(len(TRIED))])
def test_a_hybrid_is_exact(family, stays_in_float64):  # noqa: F811
    wanted = reference_gradients(make_hybrid(family), documents(LENGTHS), attention="eager")
    plans = plans_of(family, TWO_NODES)
    ranks = TWO_NODES.world_size
    for errors in run_threads(errors_of, ranks, family, TWO_NODES, plans, wanted):
        assert max(errors) < 1e-10
