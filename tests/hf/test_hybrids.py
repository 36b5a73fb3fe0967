"""Models with recurrent layers: on two nodes of two ranks, under random plans, plain and
checkpointed, each one's loss and gradients are those of transformers on every document alone; so
are those of LoRA's adapters.
Ranks are threads. One family of each kind runs with the other tests, all with `-m nightly`, then
under every strategy and on two, three and four ranks, too. What is refused is in
`test_recurrent.py`."""

import random
from itertools import cycle

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group, MicroBatch, Plan
from tests.budget import examples, others_nightly
from tests.hf.by_hand import TWO_NODES, attach, run_plan
from tests.hf.hybrids import HYBRIDS, LENGTHS, make_hybrid
from tests.hf.test_reach import (
    stays_in_float64,  # noqa: F401  (a fixture)
)
from tests.hf.tiny import documents, reference_gradients, relative_errors
from tests.plans import random_plan
from tests.ranks import join, run_threads

# One of each kind: the others differ from these in sizes and in what stands between the mixers.
TRIED = ("Qwen3Next", "KimiLinear", "Bamba without attention", "Zamba2", "Lfm2")
CHECKPOINTING = (False, True)
TOPOLOGIES = (*(Topology(nodes=1, ranks_per_node=ranks) for ranks in (2, 3, 4)), TWO_NODES)


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


# Projections around a convolution and a scan, and those of attention, MLPs and experts.
ADAPTED = ["in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj", "down_proj"]


def with_lora(model):
    """A hybrid of which adapters alone are trained."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=ADAPTED, init_lora_weights=False)
    return get_peft_model(model, config).double()


def errors_of(rank, world_size, family, topology, plans, wanted, adapt=lambda model: model):
    """The largest relative error of loss and gradients under each plan, of which a whole number of
    CHECKPOINTING take turns. adapt: what makes the model that is trained."""
    communicator = join(topology)
    model = adapt(make_hybrid(family))
    recurrent = attach(getattr(model, "get_base_model", lambda: model)())
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


@pytest.mark.parametrize("family", others_nightly(HYBRIDS, tried=TRIED[: examples(len(TRIED))]))
def test_a_hybrid_is_exact(family, stays_in_float64):  # noqa: F811
    wanted = reference_gradients(make_hybrid(family), documents(LENGTHS), attention="eager")
    plans = plans_of(family, TWO_NODES)
    ranks = TWO_NODES.world_size
    for errors in run_threads(errors_of, ranks, family, TWO_NODES, plans, wanted):
        assert max(errors) < 1e-10


@pytest.mark.nightly
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_exact_under_every_strategy(family, stays_in_float64):  # noqa: F811
    wanted = reference_gradients(make_hybrid(family), documents(LENGTHS), attention="eager")
    for topology in TOPOLOGIES:
        plans = []
        for strategy in STRATEGIES:
            if strategy != "hybrid" or topology.nodes > 1:  # which needs two nodes
                plans += [plan_of_strategy(strategy, topology)] * len(CHECKPOINTING)
        ranks = topology.world_size
        for errors in run_threads(errors_of, ranks, family, topology, plans, wanted):
            assert max(errors) < 1e-10, topology


@pytest.mark.parametrize("family", ["Qwen3Next", "Lfm2"])
def test_adapters_of_a_hybrid_are_exact(family, stays_in_float64):  # noqa: F811
    adapted = with_lora(make_hybrid(family))
    wanted = reference_gradients(adapted, documents(LENGTHS), attention="eager")
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    of_mixer = [name for name in trained if "linear_attn" in name or "conv.in_proj" in name]
    assert of_mixer
    assert all(wanted[1][name].norm() > 0 for name in trained)
    plans = plans_of(family, TWO_NODES)
    ranks = TWO_NODES.world_size
    for errors in run_threads(errors_of, ranks, family, TWO_NODES, plans, wanted, with_lora):
        assert max(errors) < 1e-10
