"""Models with recurrent layers: on two nodes of two ranks, under random plans, plain and
checkpointed, each one's loss and gradients are those of transformers on every document alone; so
are those of LoRA's adapters. Ranks are threads. One family of each kind runs with the other tests,
all with `-m nightly`, then under every strategy and on two, three and four ranks, too. What is
refused is in `test_recurrent.py`."""

import random

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan import Group
from tests.budget import examples, others_nightly
from tests.hf.by_hand import TWO_NODES, worst_error
from tests.hf.hybrids import HYBRIDS, LENGTHS, make_hybrid
from tests.hf.test_reach import stays_in_float64  # noqa: F401  (a fixture)
from tests.hf.tiny import documents, reference_gradients
from tests.plans import plan_of, random_plan

# One of each kind: the others differ from these in sizes and in what stands between the mixers.
TRIED = ("Qwen3Next", "KimiLinear", "Bamba without attention", "Zamba2", "Lfm2")
TOPOLOGIES = (*(Topology(nodes=1, ranks_per_node=ranks) for ranks in (2, 3, 4)), TWO_NODES)


def plans_of(family, topology):
    """Two plans of this family's own, each with a sequence that several ranks share."""
    rng = random.Random(f"{family} {topology}")
    plans = []
    while len(plans) < 2:
        plan = random_plan(LENGTHS, topology.world_size, rng, nodes=topology.nodes)
        groups = [group for batch in plan.micro_batches for group in batch.groups]
        if any(group.degree > 1 for group in groups):
            plans.append(plan)
    return plans


def plan_of_strategy(strategy, topology):
    """All ranks share all sequences; with `local`, each has its own."""
    ranks = tuple(range(topology.world_size))
    everything = tuple(range(len(LENGTHS)))
    if strategy != "local":
        return plan_of(LENGTHS, [Group(ranks=ranks, sequences=everything, strategy=strategy)])
    groups = []
    for rank in ranks:
        own = everything[rank :: len(ranks)]
        groups.append(Group(ranks=(rank,), sequences=own, strategy=strategy))
    return plan_of(LENGTHS, groups)


# Projections around a convolution and a scan, and those of attention, MLPs and experts.
ADAPTED = ["in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj", "down_proj"]


def with_lora(model):
    """A hybrid of which adapters alone are trained."""
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=ADAPTED, init_lora_weights=False)
    return get_peft_model(model, config).double()


def check_hybrid(family, topology, plans, adapt=lambda model: model):
    """Compare with one process under each plan, of which every other one is checkpointed. adapt:
    what makes the model that is trained."""

    def make():
        return adapt(make_hybrid(family))

    wanted = reference_gradients(make(), documents(LENGTHS), attention="eager")
    cases = [(plan, None, index % 2 == 1) for index, plan in enumerate(plans)]
    assert worst_error(make, topology, cases, documents(LENGTHS), wanted) < 1e-10, topology
    return wanted[1]


@pytest.mark.parametrize("family", others_nightly(HYBRIDS, tried=TRIED[: examples(len(TRIED))]))
def test_a_hybrid_is_exact(family, stays_in_float64):  # noqa: F811
    check_hybrid(family, TWO_NODES, plans_of(family, TWO_NODES))


@pytest.mark.nightly
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_is_exact_under_every_strategy(family, stays_in_float64):  # noqa: F811
    for topology in TOPOLOGIES:
        plans = []
        for strategy in STRATEGIES:
            if strategy != "hybrid" or topology.nodes > 1:  # which needs two nodes
                plans += [plan_of_strategy(strategy, topology)] * 2
        check_hybrid(family, topology, plans)


@pytest.mark.parametrize("family", ["Qwen3Next", "Lfm2"])
def test_adapters_of_a_hybrid_are_exact(family, stays_in_float64):  # noqa: F811
    adapted = with_lora(make_hybrid(family))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert [name for name in trained if "linear_attn" in name or "conv.in_proj" in name]
    wanted = check_hybrid(family, TWO_NODES, plans_of(family, TWO_NODES), with_lora)
    assert all(wanted[name].norm() > 0 for name in trained)
