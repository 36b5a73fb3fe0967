"""Planning: lengths of one optimizer step in, a checked `Plan` out.

    make_plan(lengths, topology, cost)                                     the default planner
    make_plan(lengths, topology, cost, PlanOptions(planner="zeppelin"))    one of `PLANNERS`
    ... PlanOptions(planner="static", sp_degree=8)                         one degree for all

    1. check       sequences without tokens, and those that fit nowhere, are refused
    2. decide      which rows share prefixes (`shared_rows.py`), and which micro-batches recompute
                   or offload more than is set for the run (`memory.py`); the planner makes
                   micro-batches (`search/` for `auto`; see `registry.py`)
    3. order       micro-batches that communicate most come first (`order.py`)
    4. bound       seconds that no plan can beat (`lower_bound.py`)
    5. note        why the widest groups are as wide as they are, and how much time experts on
                   several ranks take (`notes.py`)

The same arguments give the same plan, but for `planning_s`, on any machine: planners decide by
integers and are bounded by counted work. `process/worker.py` and `process/client.py` run this
function next to the training process. tests/planner/exact.py is its slow twin.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hf_flexseq.base.registry import PLANNERS, object_of
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.evaluate import check_free
from hf_flexseq.plan import MicroBatch, Plan, PlanInfeasible, check
from hf_flexseq.plan.blocks import NO_PAIRS, SEE_BLOCKS
from hf_flexseq.plan.groups import with_longest_first
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.plan.units import Unit
from hf_flexseq.planner.fit import where_it_fits
from hf_flexseq.planner.lower_bound import step_bound_ns
from hf_flexseq.planner.memory import Rung, planned_by_rung, rungs_of
from hf_flexseq.planner.notes import choice_note, degree_note, experts_note
from hf_flexseq.planner.order import communication_first
from hf_flexseq.planner.shared_rows import SharedRows, variants
from hf_flexseq.planner.task import PlanTask, checked_lengths

DEFAULTS = PlanOptions()


def make_plan(
    lengths: Sequence[int],
    topology: Topology,
    cost: CostModel,
    options: PlanOptions = DEFAULTS,
    *,
    units: Sequence[Unit] = (),
    later_pairs: Mapping[int, int] = NO_PAIRS,
    held_tokens: int = 0,
) -> Plan:
    """Return the plan of one optimizer step.

    Args:
        lengths: Tokens of each sequence.
        topology: The ranks.
        cost: Of the model on them.
        options: How to plan.
        units: Sequences that begin alike: those that gain by it share their prefixes.
        later_pairs: By id of a sequence with blocks, how many pairs of a query and a later key
            these have (`plan.blocks.later_pairs`). No ring computes such a sequence.
        held_tokens: Tokens whose memory every rank needs for something else, such as images.

    Raises ValueError for options that do not go with the ranks or the cost model, or where a
    sequence with blocks comes into a ring, and PlanInfeasible when a sequence fits nowhere.
    """
    began = time.perf_counter()
    # 1. check
    tokens = checked_lengths(lengths)
    later_pairs = {row: pairs for row, pairs in later_pairs.items() if pairs}
    options.check_on(topology)
    cost.strategies(options.strategy)  # raises if the model cannot price it
    world = topology.world_size
    if cost.experts is not None:
        cost.experts.check_ranks(world)
        if options.sync == "free":
            check_free(cost)
    cost.check_countable(tokens, world)
    widest = options.widest_degree(topology)
    if options.max_tokens_per_rank:  # what the user sets is kept
        held_tokens = 0
    rungs = rungs_of(cost, options, world, held_tokens)
    most = rungs[-1].tokens
    _check_fits(tokens, widest, most, topology, cost, options, held=held_tokens)
    # 2. decide, 3. order: each way to share prefixes, of which the fastest is taken
    decided: list[_Decided] = []
    # Rings would gather the keys of all rows of a unit on every rank.
    names = cost.strategies(options.strategy)
    widest_of_units = widest if "ulysses" in names or "hybrid" in names else 1
    # A hybrid inside of a node is priced like Ulysses, but computes no blocks.
    strategy = options.strategy if later_pairs else cost.allowed(options.strategy, topology)
    for shared in variants(
        tokens,
        units,
        cost,
        cap=most,
        world=world,
        widest=widest_of_units,
        later_pairs=later_pairs,
    ):
        task = PlanTask(
            lengths=shared.lengths() if shared.units or later_pairs else tokens,
            topology=topology,
            cost=cost,
            cap=rungs[0].tokens,
            strategy=strategy,
            sync=options.sync,
            sp_degree=options.sp_degree,
        )
        decided.append(_decided(task, options, rungs, shared))
    best = min(decided, key=lambda one: one.objective_ns)
    micro_batches, task, shared = best.micro_batches, best.task, best.shared
    chooses = any(micro_batch.memory is not None for micro_batch in micro_batches)
    cap = most if chooses else task.cap
    # 4. bound
    lower_bound_ns = step_bound_ns(replace(task, cap=cap))
    # 5. note
    if shared.units:
        micro_batches = shared.with_units(micro_batches)
    _check_seen(micro_batches, later_pairs)
    micro_batches = tuple(with_longest_first(one, shared.held) for one in micro_batches)
    notes: tuple[str, ...] = ()
    if tokens:
        by_id = replace(task, lengths=shared.by_id(), cap=cap)
        notes = (degree_note(micro_batches, by_id),)
        if cost.experts is not None:
            notes = (*notes, experts_note(micro_batches, by_id, best.objective_ns))
    if chooses:
        note = choice_note(micro_batches, tokens, best.objective_ns, best.as_set_ns)
        notes = (*notes, note)
    plan = Plan(
        lengths=shared.held,
        micro_batches=micro_batches,
        objective_s=best.objective_ns / 1e9,
        lower_bound_s=lower_bound_ns / 1e9,
        planner=options.planner,
        planning_s=time.perf_counter() - began,
        notes=notes,
    )
    check(plan, topology, cap)
    return plan


def loosest_task(
    lengths: Sequence[int], topology: Topology, cost: CostModel, options: PlanOptions
) -> PlanTask:
    """Return the task of a step with the most tokens of a rank that any choice for activations
    allows."""
    cap = rungs_of(cost, options, topology.world_size)[-1].tokens
    return PlanTask.of(lengths, topology, cost, options, cap=cap)


class _Decided(NamedTuple):
    """A step, decided."""

    objective_ns: int
    micro_batches: tuple[MicroBatch, ...]
    """Micro-batches in the best order."""
    as_set_ns: float
    """Nanoseconds that it takes at least as set for the run; infinite where it does not fit."""
    task: PlanTask
    shared: SharedRows


def _decided(
    task: PlanTask, options: PlanOptions, rungs: Sequence[Rung], shared: SharedRows
) -> _Decided:
    """Return the nanoseconds of a step, and its micro-batches in the best order."""
    micro_batches: tuple[MicroBatch, ...] = ()
    as_set_ns = 0.0
    if task.lengths:
        planner = object_of(PLANNERS[options.planner].function)
        micro_batches, as_set_ns = planned_by_rung(task, rungs, planner)
    ordered = communication_first(micro_batches, task.lengths)
    objective_ns = step_ns(task.cost, ordered, task.lengths, task.topology, sync=task.sync)
    return _Decided(objective_ns, ordered, as_set_ns, task, shared)


# ---- 1. check


def _check_fits(
    lengths: tuple[int, ...],
    widest: int,
    cap: int,
    topology: Topology,
    cost: CostModel,
    options: PlanOptions,
    *,
    held: int,
) -> None:
    """Raise PlanInfeasible if `widest` ranks of `cap` tokens cannot hold the longest sequence.
    held: tokens that images have taken off the cap."""
    if not lengths:
        return
    longest = lengths.index(max(lengths))
    need = -(-lengths[longest] // widest)
    if need <= cap:
        return
    world = topology.world_size
    wider = ""
    if widest != world:
        wider = f", let up to {world} ranks share a sequence (they may be {widest} now)"
    advice = f"Raise max_tokens_per_rank to {need}{wider}, use more ranks"
    if options.max_tokens_per_rank is None and widest == world and not held:
        advice = where_it_fits(cost, topology, lengths[longest]) or advice
    room = f"max_tokens_per_rank={cap}"
    if held:
        room += f", what the step's images leave (they take the memory of {held} tokens)"
    raise PlanInfeasible(
        f"sequence {longest} has {lengths[longest]} tokens: {need} on each of {widest} ranks, "
        f"above {room}. {advice}, or shorten or split the sequence"
    )


# ---- blocks


def _check_seen(micro_batches: Sequence[MicroBatch], later_pairs: Mapping[int, int]) -> None:
    """Raise ValueError if a row with blocks is in a group whose strategy does not compute them."""
    for group in (group for micro_batch in micro_batches for group in micro_batch.groups):
        seeing = later_pairs.keys() & set(group.rows)
        if seeing and group.strategy not in SEE_BLOCKS:
            raise ValueError(
                f"sequence {min(seeing)} has tokens that see both ways, as those of an image do, "
                f"which the strategy {group.strategy!r} cannot compute: set planner='auto' and "
                "strategy='auto'"
            )
