"""Planning: lengths of one optimizer step in, a checked `Plan` out.

    make_plan(lengths, topology, cost)                                 the default planner
    make_plan(lengths, topology, cost, planner="static", sp_degree=8)  one degree for everything
    make_plan(lengths, topology, cost, planner="flexsp")               FlexSP's, needs pulp and
                                                                       highspy
    make_plan(lengths, topology, cost, planner="zeppelin")             Zeppelin's
    ... planner="batch-ada", "megatron", "batch-rebalance"             baselines to compare with

The same arguments give the same plan, but for `planning_s`, on any machine: planners decide by
integers and are bounded by counted work. `worker.py` and `client.py` run this function beside the
training process.
"""

import operator
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hf_flexseq.config import require_solver
from hf_flexseq.cost import CostModel
from hf_flexseq.plan import STRATEGIES, MicroBatch, Plan, PlanInfeasible, check
from hf_flexseq.planner.bound import lower_bound_ns
from hf_flexseq.planner.order import best_order
from hf_flexseq.planner.published.batch_ada import batch_ada_micro_batches
from hf_flexseq.planner.published.batch_rebalance import batch_rebalance_micro_batches
from hf_flexseq.planner.published.megatron import megatron_micro_batches
from hf_flexseq.planner.published.zeppelin import zeppelin_micro_batches
from hf_flexseq.planner.remap import REMAPPING, with_remap
from hf_flexseq.planner.search.auto import auto_micro_batches
from hf_flexseq.planner.static import check_degree, static_micro_batches
from hf_flexseq.topology import Topology

__all__ = ["make_plan"]

# decide for ranks that run every micro-batch together, whatever they are scored by
LOCKSTEP_PLANNERS = {
    "zeppelin": zeppelin_micro_batches,
    "megatron": megatron_micro_batches,
    "batch-rebalance": batch_rebalance_micro_batches,
}
CHOICES = {
    "planner": ("auto", "static", "flexsp", "batch-ada", *LOCKSTEP_PLANNERS),
    "strategy": ("auto", *STRATEGIES),
    "sync": ("lockstep", "free"),
    "remap": ("auto", "off"),
}


def make_plan(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    *,
    planner: str = "auto",
    strategy: str = "auto",
    sp_degree: int | None = None,
    max_tokens_per_rank: int | None = None,
    sync: str = "lockstep",
    remap: str = "auto",
) -> Plan:
    """The plan of one optimizer step on `lengths` tokens.

    strategy: what groups of two ranks and more may use. sp_degree: with planner="static" only.
    max_tokens_per_rank: None takes the cost model's. sync: "lockstep" when all ranks run every
    micro-batch together, "free" when they meet only in groups. remap: "auto" lets the planners
    `auto` and `zeppelin` spread tokens evenly outside of attention where that is faster, in
    lockstep; "off" never does. Raises ValueError for arguments without meaning, and PlanInfeasible
    when a sequence fits nowhere.
    """
    began = time.perf_counter()
    _check_choices(planner=planner, strategy=strategy, sync=sync, remap=remap)
    if planner == "flexsp":
        require_solver()
    tokens = _checked_lengths(lengths)
    widest = _widest_degree(topology, planner=planner, strategy=strategy, sp_degree=sp_degree)
    cost.strategies(strategy)  # raises when it needs a ring and the cost model knows none
    cap = (
        cost.max_tokens_per_rank(topology.world_size)
        if max_tokens_per_rank is None
        else max_tokens_per_rank
    )
    if cap < 1:
        raise ValueError(f"max_tokens_per_rank={cap}: give at least 1")
    _check_fits(tokens, widest, cap, world=topology.world_size)
    micro_batches: tuple[MicroBatch, ...] = ()
    if tokens:
        make = _maker(planner, sp_degree=sp_degree, sync=sync)
        micro_batches = make(tokens, topology, cost, strategy=strategy, cap=cap)
        if remap == "auto" and planner in REMAPPING and sync == "lockstep":
            micro_batches = with_remap(micro_batches, tokens, topology, cost)
    objective, micro_batches = best_order(micro_batches, tokens, topology, cost, sync=sync)
    bound = lower_bound_ns(
        np.array(tokens, dtype=np.int64), topology, cost, strategy=strategy, cap=cap, sync=sync
    )
    plan = Plan(
        lengths=tokens,
        micro_batches=micro_batches,
        objective_s=objective / 1e9,
        lower_bound_s=bound / 1e9,
        planner=planner,
        planning_s=time.perf_counter() - began,
    )
    check(plan, topology, cap)
    return plan


def _maker(
    planner: str, *, sp_degree: int | None, sync: str
) -> Callable[..., tuple[MicroBatch, ...]]:
    """What makes the micro-batches of `planner` from lengths, topology, cost model, strategy and
    cap."""
    if sp_degree is not None:
        return partial(static_micro_batches, degree=sp_degree)
    if planner == "auto":
        return partial(auto_micro_batches, sync=sync)
    if planner == "batch-ada":
        return partial(batch_ada_micro_batches, sync=sync)
    if planner == "flexsp":
        # its solver is an optional dependency
        from hf_flexseq.planner.published.flexsp import flexsp_micro_batches

        return flexsp_micro_batches
    return LOCKSTEP_PLANNERS[planner]


def _check_choices(**chosen: str) -> None:
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name}={value!r} is none of {', '.join(CHOICES[name])}")


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    tokens = tuple(operator.index(length) for length in lengths)
    for index, length in enumerate(tokens):
        if length < 1:
            raise ValueError(
                f"sequence {index} has length {length}: every sequence needs at least one token"
            )
    return tokens


def _widest_degree(
    topology: Topology, *, planner: str, strategy: str, sp_degree: int | None
) -> int:
    """The most ranks that may share a sequence."""
    if planner == "static":
        if sp_degree is None or sp_degree < 1:
            raise ValueError(
                f"planner='static' needs sp_degree, the ranks per sequence, got {sp_degree}"
            )
        check_degree(sp_degree, topology)
        if strategy == "local" and sp_degree > 1:
            raise ValueError(
                f"strategy='local' never splits a sequence, so sp_degree={sp_degree} "
                f"has no meaning"
            )
        return sp_degree
    if sp_degree is not None:
        raise ValueError(
            f"sp_degree={sp_degree} is for planner='static'; planner={planner!r} "
            f"chooses degrees itself"
        )
    return 1 if strategy == "local" or planner == "batch-rebalance" else topology.world_size


def _check_fits(lengths: tuple[int, ...], widest: int, cap: int, *, world: int) -> None:
    longest = max(range(len(lengths)), key=lambda i: lengths[i], default=None)
    if longest is None or -(-lengths[longest] // widest) <= cap:
        return
    need = -(-lengths[longest] // widest)
    wider = (
        ""
        if widest == world
        else f", let up to {world} ranks share a sequence (they may be {widest} now)"
    )
    raise PlanInfeasible(
        f"sequence {longest} has {lengths[longest]} tokens: {need} on each of {widest} ranks, "
        f"above "
        f"max_tokens_per_rank={cap}. Raise max_tokens_per_rank to {need}{wider}, use more ranks, "
        f"or shorten or split "
        "the sequence"
    )
