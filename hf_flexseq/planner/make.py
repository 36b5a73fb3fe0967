"""Planning: lengths of one optimizer step in, a checked `Plan` out.

    make_plan(lengths, topology, cost)                                 the default planner
    make_plan(lengths, topology, cost, planner="static", sp_degree=8)  one degree for everything
    make_plan(lengths, topology, cost, planner="flexsp")               FlexSP's, needs pulp and
                                                                       highspy
    make_plan(lengths, topology, cost, planner="zeppelin")             Zeppelin's
    ... planner="batch-ada", "megatron", "batch-rebalance"             baselines to compare with

    1. check       arguments that have no meaning, and sequences that fit nowhere, are refused
    2. decide      the planner makes micro-batches (`search/`, `published/`, `static.py`)
    3. order       micro-batches that communicate most come first (`order.py`)
    4. bound       what no plan can beat (`bound.py`)
    5. note        why the widest groups are as wide as they are (`notes.py`)

The same arguments give the same plan, but for `planning_s`, on any machine: planners decide by
integers and are bounded by counted work. `process/worker.py` and `process/client.py` run this
function beside the training process. tests/planner/brute.py and exact.py are its slow twins.
"""

import operator
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np

from hf_flexseq.config import require_solver
from hf_flexseq.cost import CostModel
from hf_flexseq.plan import MicroBatch, Plan, PlanInfeasible, check
from hf_flexseq.planner.bound import bound_ns
from hf_flexseq.planner.notes import degree_note
from hf_flexseq.planner.order import best_order
from hf_flexseq.planner.published.batch_ada import batch_ada_micro_batches
from hf_flexseq.planner.published.batch_rebalance import batch_rebalance_micro_batches
from hf_flexseq.planner.published.megatron import megatron_micro_batches
from hf_flexseq.planner.published.zeppelin import zeppelin_micro_batches
from hf_flexseq.planner.search.auto import auto_micro_batches
from hf_flexseq.planner.static import check_degree, static_micro_batches
from hf_flexseq.registry import STRATEGIES
from hf_flexseq.topology import Topology
from hf_flexseq.values import MAX_TOKENS_PER_RANK


class MicroBatchMaker(Protocol):
    """A planner without its options: what `make_plan` calls in step 2."""

    def __call__(
        self,
        lengths: Sequence[int],
        topology: Topology,
        cost: CostModel,
        *,
        strategy: str,
        cap: int,
    ) -> tuple[MicroBatch, ...]:
        """Return the micro-batches of `lengths`, each rank with at most `cap` tokens."""


# Planners that decide for ranks that run every micro-batch together, whatever they are scored by.
LOCKSTEP_PLANNERS: dict[str, MicroBatchMaker] = {
    "zeppelin": zeppelin_micro_batches,
    "megatron": megatron_micro_batches,
    "batch-rebalance": batch_rebalance_micro_batches,
}

# The values of `make_plan`'s arguments.
CHOICES = {
    "planner": ("auto", "static", "flexsp", "batch-ada", *LOCKSTEP_PLANNERS),
    "strategy": ("auto", *STRATEGIES),
    "sync": ("lockstep", "free"),
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
) -> Plan:
    """Return the plan of one optimizer step.

    Args:
        lengths: Tokens of each sequence.
        topology: The ranks.
        cost: Of the model on them.
        planner: Who decides: `auto`, `static`, `flexsp`, `zeppelin`, or a baseline.
        strategy: What groups of two ranks and more may use.
        sp_degree: Ranks per sequence, with planner="static" only.
        max_tokens_per_rank: Most tokens of a rank in a micro-batch; None takes the cost model's.
        sync: "lockstep" when all ranks run every micro-batch together, "free" when they meet only
            in groups.

    Raises ValueError for arguments without meaning, and PlanInfeasible when a sequence fits
    nowhere.
    """
    began = time.perf_counter()
    # 1. check
    _check_choices(planner=planner, strategy=strategy, sync=sync)
    if planner == "flexsp":
        require_solver()
    tokens = _checked_lengths(lengths)
    widest = _widest_degree(topology, planner=planner, strategy=strategy, sp_degree=sp_degree)
    cost.strategies(strategy)  # raises when it needs a ring and the cost model knows none
    strategy = cost.allowed(strategy, topology)
    cap = _checked_cap(max_tokens_per_rank, cost, topology)
    cost.check_countable(tokens, topology.world_size)
    _check_fits(tokens, widest, cap, world=topology.world_size)
    # 2. decide
    micro_batches: tuple[MicroBatch, ...] = ()
    if tokens:
        make = _maker(planner, sp_degree=sp_degree, sync=sync)
        micro_batches = make(tokens, topology, cost, strategy=strategy, cap=cap)
    # 3. order
    objective_ns, micro_batches = best_order(micro_batches, tokens, topology, cost, sync=sync)
    # 4. bound
    lower_bound_ns = bound_ns(
        np.array(tokens, dtype=np.int64), topology, cost, strategy=strategy, cap=cap, sync=sync
    )
    # 5. note
    notes: tuple[str, ...] = ()
    if tokens:
        note = degree_note(
            micro_batches,
            tokens,
            topology,
            cost,
            strategy=strategy,
            sp_degree=sp_degree,
            cap=cap,
        )
        notes = (note,)
    plan = Plan(
        lengths=tokens,
        micro_batches=micro_batches,
        objective_s=objective_ns / 1e9,
        lower_bound_s=lower_bound_ns / 1e9,
        planner=planner,
        planning_s=time.perf_counter() - began,
        notes=notes,
    )
    check(plan, topology, cap)
    return plan


def _maker(planner: str, *, sp_degree: int | None, sync: str) -> MicroBatchMaker:
    """Return the function that makes the micro-batches of `planner`."""
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


# ---- 1. check


def _checked_cap(max_tokens_per_rank: int | None, cost: CostModel, topology: Topology) -> int:
    """Return the most tokens of a rank in a micro-batch. Raises ValueError where it has no room
    for a token."""
    if max_tokens_per_rank is None:
        return cost.max_tokens_per_rank(topology.world_size)
    if max_tokens_per_rank < 1:
        raise ValueError(f"max_tokens_per_rank={max_tokens_per_rank}: give at least 1")
    return min(max_tokens_per_rank, MAX_TOKENS_PER_RANK)  # more of them would fit no integer


def _check_choices(**chosen: str) -> None:
    """Raise ValueError for a value that is not among the `CHOICES` of its argument."""
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name}={value!r} is none of {', '.join(CHOICES[name])}")


def _checked_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths as Python ints. Raises ValueError for a sequence without tokens."""
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
    """Return the most ranks that may share a sequence.

    Raises ValueError where `sp_degree` does not go with the other arguments.
    """
    if planner == "static":
        if sp_degree is None or sp_degree < 1:
            raise ValueError(
                f"planner='static' needs sp_degree, the ranks per sequence, got {sp_degree}"
            )
        check_degree(sp_degree, topology)
        if strategy == "local" and sp_degree > 1:
            raise ValueError(
                f"strategy='local' never splits a sequence, so sp_degree={sp_degree} "
                "has no meaning"
            )
        return sp_degree
    if sp_degree is not None:
        raise ValueError(
            f"sp_degree={sp_degree} is for planner='static'; planner={planner!r} "
            "chooses degrees itself"
        )
    if strategy == "local" or planner == "batch-rebalance":
        return 1
    return topology.world_size


def _check_fits(lengths: tuple[int, ...], widest: int, cap: int, *, world: int) -> None:
    """Raise PlanInfeasible when `widest` ranks of `cap` tokens cannot hold the longest
    sequence."""
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
