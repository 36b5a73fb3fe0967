"""Refuse a pipeline's plan that would compute something wrong, hang, or not fit.

    chunks     every token in exactly one chunk; the parts of a cut sequence are the chunks of one
               unit, in order
    actions    on every stage every chunk has one F and one B, or one F, one I and one W
    order      inside a unit forwards ascend and backwards descend; a W follows its I, in the order
               of the I's, since
               stage 0 and every carry run the whole backward in it
    deadlock   all actions can happen when neighbours exchange in the order of their lists
               (`walk.py`)
    memory     no rank above its bytes

A first-in-first-out backward through carried keys and values gives gradients that are wrong by two
thirds, in silence; torch's own pipeline validator accepts it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.plan.pipeline import KINDS, Action, Chunk, PipelinePlan
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.schedule.pipeline.walk import timed, walk


def check(plan: PipelinePlan) -> None:
    """Raise ValueError, naming chunk or action, unless the plan is legal."""
    if plan.ranks < 1 or plan.stages < plan.ranks or plan.stages % plan.ranks:
        raise ValueError(f"{plan.stages} stages cannot be spread evenly over {plan.ranks} ranks")
    _check_chunks(plan)
    _check_checkpointed(plan)
    if len(plan.actions) != plan.ranks:
        raise ValueError(f"{len(plan.actions)} lists of actions for {plan.ranks} ranks")
    for rank, actions in enumerate(plan.actions):
        _check_rank(plan, rank, actions)
    for _ in walk(plan):
        pass


def check_step(step: StepPlan) -> None:
    """Raise ValueError unless every sequence is on one replica, whose plan is legal."""
    if sorted(i for ids in step.members for i in ids) != list(range(len(step.lengths))):
        raise ValueError(
            f"replicas must hold each of {len(step.lengths)} sequences once: {step.members}"
        )
    for replica, (ids, plan) in enumerate(zip(step.members, step.plans, strict=True)):
        if plan.lengths != tuple(step.lengths[i] for i in ids):
            raise ValueError(
                f"the plan of replica {replica} is for sequences of other lengths: {plan.lengths}"
            )
        check(plan)


def check_memory(plan: PipelinePlan, cost: PipelineCost, room: Sequence[int]) -> None:
    """Raise ValueError, naming the action, when a rank holds more than its `room` bytes of what is
    in flight."""
    for done in timed(plan, cost):
        if done.held > room[done.rank]:
            raise ValueError(
                f"{done.action}: rank {done.rank} holds {done.held} bytes, the limit is "
                f"{room[done.rank]}"
            )


def _check_chunks(plan: PipelinePlan) -> None:
    names = [(chunk.unit, chunk.index) for chunk in plan.chunks]
    sizes = _sizes(plan.chunks)
    if names != [
        (unit, index) for unit in range(len(sizes)) for index in range(sizes.get(unit, 0))
    ]:
        raise ValueError("chunks must be numbered unit by unit: 0.0, 0.1, ..., 1.0, ...")
    reached = [0] * len(plan.lengths)
    for before, chunk in zip((None, *plan.chunks), plan.chunks, strict=False):
        _check_slices(chunk, plan, reached)
        _check_cut(chunk, before, plan)
    for sequence, (length, stop) in enumerate(zip(plan.lengths, reached, strict=True)):
        if stop != length:
            raise ValueError(
                f"sequence {sequence} has {length} tokens, the chunks hold {stop} of them"
            )


def _check_slices(chunk: Chunk, plan: PipelinePlan, reached: list[int]) -> None:
    """One chunk, after those before it. reached: tokens of each sequence that those hold."""
    name = f"chunk {chunk.unit}.{chunk.index}"
    if not chunk.slices:
        raise ValueError(f"{name} holds no token")
    for place, part in enumerate(chunk.slices):
        if not (0 <= part.sequence < len(plan.lengths) and 0 <= part.start < part.stop):
            raise ValueError(f"{name}: {part} is no slice of a sequence")
        if part.start != reached[part.sequence]:
            raise ValueError(f"{name}: {part} must begin at token {reached[part.sequence]}")
        if place and part.tokens < plan.lengths[part.sequence]:
            raise ValueError(
                f"{name}: only the first slice may be a part of a sequence, not {part}"
            )
        reached[part.sequence] = part.stop


def _check_cut(chunk: Chunk, before: Chunk | None, plan: PipelinePlan) -> None:
    """A unit of several chunks is one cut sequence, from its first token in chunk 0 to its last in
    the last chunk."""
    name, cut = f"chunk {chunk.unit}.{chunk.index}", chunk.cut(plan.lengths)
    if (cut is None or cut.start == 0) != (chunk.index == 0):
        raise ValueError(
            f"{name}: a cut sequence begins in chunk 0 of its unit and goes on in the others"
        )
    if cut is not None and chunk.index and before and before.slices[0].sequence != cut.sequence:
        raise ValueError(f"{name}: sequence {cut.sequence} does not go on from the chunk before")


def _check_checkpointed(plan: PipelinePlan) -> None:
    sizes = [len(layers) for layers in plan.checkpointed]
    if plan.checkpointed and sizes != [len(plan.chunks)] * plan.stages:
        raise ValueError(
            f"checkpointed layers must be given for {plan.stages} stages x "
            f"{len(plan.chunks)} chunks"
        )
    if any(layers < 0 for stage in plan.checkpointed for layers in stage):
        raise ValueError("checkpointed layers must not be negative")


@dataclass(slots=True)
class _Stage:
    """How far one stage has come. forwards: chunks forwarded, by unit. backwards: chunks whose B
    or I is done. owed: chunks whose W is due, by unit, in the order of their I's."""

    forwards: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    backwards: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    owed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def _check_rank(plan: PipelinePlan, rank: int, actions: Iterable[Action]) -> None:
    sizes = _sizes(plan.chunks)
    stages = {stage: _Stage() for stage in range(rank, plan.stages, plan.ranks)}
    for action in actions:
        if action.stage not in stages:
            raise ValueError(f"{action}: stage {action.stage} is not on rank {rank}")
        if action.kind not in KINDS or not 0 <= action.chunk < sizes.get(action.unit, 0):
            raise ValueError(f"{action}: there is no such kind, or no such chunk")
        problem = _advance(stages[action.stage], action, sizes[action.unit])
        if problem:
            raise ValueError(f"{action}: {problem}")
    for stage, state in stages.items():
        _check_complete(stage, state, sizes)


def _advance(stage: _Stage, action: Action, size: int) -> str:
    """Take one action; what is wrong with it, or nothing."""
    unit, chunk = action.unit, action.chunk
    if action.kind == "F":
        if chunk != stage.forwards[unit]:
            return f"forwards of a unit ascend, {stage.forwards[unit]} comes next"
        stage.forwards[unit] += 1
    elif action.kind == "W":
        if stage.owed[unit][:1] != [chunk]:
            return f"weight gradients follow their I's, in their order: {stage.owed[unit]} are due"
        stage.owed[unit].pop(0)
    else:
        due = size - 1 - stage.backwards[unit]
        if stage.forwards[unit] < size or chunk != due:
            return (
                f"backwards of a unit begin after its {size} forwards and descend, "
                f"{due} comes next"
            )
        if action.kind == "B" and stage.owed[unit]:
            return f"the weight gradients of {stage.owed[unit]} come before this one's"
        stage.backwards[unit] += 1
        if action.kind == "I":
            stage.owed[unit].append(chunk)
    return ""


def _check_complete(number: int, stage: _Stage, sizes: dict[int, int]) -> None:
    for unit, size in sizes.items():
        if stage.forwards[unit] < size:
            raise ValueError(f"stage {number} has no {number}F{unit}.{stage.forwards[unit]}")
        if stage.backwards[unit] < size:
            due = size - 1 - stage.backwards[unit]
            raise ValueError(
                f"stage {number} has no {number}B{unit}.{due} and no {number}I{unit}.{due}"
            )
        if stage.owed[unit]:
            raise ValueError(f"stage {number} has no {number}W{unit}.{stage.owed[unit][0]}")


def _sizes(chunks: Iterable[Chunk]) -> dict[int, int]:
    """How many chunks each unit has."""
    return dict(sorted((chunk.unit, chunk.index + 1) for chunk in chunks))
