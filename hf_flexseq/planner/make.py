"""Planning: lengths of one optimizer step in, a checked `Plan` out.

    make_plan(lengths, topology, cost)                                     the default planner
    make_plan(lengths, topology, cost, PlanOptions(planner="zeppelin"))    one of `PLANNERS`
    ... PlanOptions(planner="static", sp_degree=8)                         one degree for all

    1. check       sequences without tokens, and those that fit nowhere, are refused
    2. decide      the planner makes micro-batches (`search/` for `auto`; see `registry.py`)
    3. order       micro-batches that communicate most come first (`order.py`)
    4. bound       what no plan can beat (`bound.py`)
    5. note        why the widest groups are as wide as they are (`notes.py`)

The same arguments give the same plan, but for `planning_s`, on any machine: planners decide by
integers and are bounded by counted work. `process/worker.py` and `process/client.py` run this
function next to the training process. tests/planner/exact.py is its slow twin.
"""

import operator
import time
from collections.abc import Sequence

import numpy as np

from hf_flexseq.base.registry import PLANNERS, object_of
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.plan import MicroBatch, Plan, PlanInfeasible, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner.bound import bound_ns
from hf_flexseq.planner.notes import degree_note
from hf_flexseq.planner.order import best_order
from hf_flexseq.planner.task import PlanTask

DEFAULTS = PlanOptions()


def make_plan(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    options: PlanOptions = DEFAULTS,
) -> Plan:
    """Return the plan of one optimizer step.

    Args:
        lengths: Tokens of each sequence.
        topology: The ranks.
        cost: Of the model on them.
        options: How to plan.

    Raises ValueError for options that do not go with the ranks or the cost model, and
    PlanInfeasible when a sequence fits nowhere.
    """
    began = time.perf_counter()
    # 1. check
    tokens = _checked_lengths(lengths)
    options.check_on(topology)
    cost.strategies(options.strategy)  # raises if the model cannot price it
    cap = options.max_tokens_per_rank or cost.max_tokens_per_rank(topology.world_size)
    cost.check_countable(tokens, topology.world_size)
    _check_fits(tokens, options.widest_degree(topology), cap, world=topology.world_size)
    task = PlanTask(
        lengths=tokens,
        topology=topology,
        cost=cost,
        cap=cap,
        strategy=cost.allowed(options.strategy, topology),
        sync=options.sync,
        sp_degree=options.sp_degree,
    )
    # 2. decide
    micro_batches: tuple[MicroBatch, ...] = ()
    if tokens:
        micro_batches = object_of(PLANNERS[options.planner].function)(task)
    # 3. order
    objective_ns, micro_batches = best_order(
        micro_batches, tokens, topology, cost, sync=options.sync
    )
    # 4. bound
    lower_bound_ns = bound_ns(
        np.array(tokens, dtype=np.int64),
        topology,
        cost,
        strategy=task.strategy,
        cap=cap,
        sync=options.sync,
    )
    # 5. note
    notes: tuple[str, ...] = ()
    if tokens:
        notes = (degree_note(micro_batches, task),)
    plan = Plan(
        lengths=tokens,
        micro_batches=micro_batches,
        objective_s=objective_ns / 1e9,
        lower_bound_s=lower_bound_ns / 1e9,
        planner=options.planner,
        planning_s=time.perf_counter() - began,
        notes=notes,
    )
    check(plan, topology, cap)
    return plan


# ---- 1. check


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths as Python ints. Raises ValueError for a sequence without tokens."""
    tokens = tuple(operator.index(length) for length in lengths)
    for index, length in enumerate(tokens):
        if length < 1:
            raise ValueError(
                f"sequence {index} has length {length}: every sequence needs at least one token"
            )
    return tokens


def _check_fits(lengths: tuple[int, ...], widest: int, cap: int, *, world: int) -> None:
    """Raise PlanInfeasible if `widest` ranks of `cap` tokens cannot hold the longest sequence."""
    if not lengths:
        return
    longest = lengths.index(max(lengths))
    need = -(-lengths[longest] // widest)
    if need <= cap:
        return
    wider = ""
    if widest != world:
        wider = f", let up to {world} ranks share a sequence (they may be {widest} now)"
    raise PlanInfeasible(
        f"sequence {longest} has {lengths[longest]} tokens: {need} on each of {widest} ranks, "
        f"above max_tokens_per_rank={cap}. Raise max_tokens_per_rank to {need}{wider}, use more "
        "ranks, or shorten or split the sequence"
    )
