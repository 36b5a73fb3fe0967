"""A pipelined optimizer step as data: chunks of sequences, and the list of actions of each rank.

    unit    one cut sequence with sequences packed along, or a pack of whole sequences
    chunk   one forward and one backward of a stage: a few slices of sequences, numbered by `index`
            inside the unit
    action  2F0.1: stage 2 runs the Forward of unit 0's chunk 1

The kinds follow zero-bubble schedules (arXiv 2401.10241, section 2): F forward, B the whole
backward, or its two parts, I for the gradient of the input, which the previous stage needs, and W
for the gradient of the weights, which no other stage needs. Sends and receives are implied: F
receives from the previous stage and sends to the next one, B and I the reverse.

Inside a unit a chunk's attention reads the keys and values of previous chunks, so forwards ascend
and backwards descend (Seq1F1B, arXiv 2406.03488). A first-in-first-out backward through carried
keys and values gives silently wrong gradients (by two thirds); torch's own pipeline validator
accepts it. `PipelinePlan.check_form` refuses it:

    chunks    every token in exactly one chunk; the parts of a cut sequence are the chunks of one
              unit, in order
    actions   on every stage every chunk has one F and one B, or one F, one I and one W
    order     inside a unit forwards ascend and backwards descend; a W follows its I, in the order
              of the I's, since stage 0 and every carry run the whole backward in it

`walk.py` walks through the actions: it checks the order of exchanges between
neighbours, and memory.

Rejected: sends and receives as actions. They follow from the order of the others, and redundant
lists can contradict themselves.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

from hf_flexseq.base.records import Bounds, Form, Seconds
from hf_flexseq.base.values import MAX_TOKENS, fields_of, items, quoted, whole, wholes
from hf_flexseq.plan.records import Lengths, NumberLists, Record
from hf_flexseq.plan.shard import Slice

# Forward, whole backward, gradient of the input, gradient of the weights.
KINDS = ("F", "B", "I", "W")

# stage, kind, unit, chunk: 2F0.1; numbers have fewer than 10 digits
_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})\.([0-9]{1,9})")

# Maximum stages of a pipeline, one layer each.
MAX_STAGES = 1 << 14


class Action(NamedTuple):
    """Work of a stage on one chunk. A tuple, because a step may have tens of thousands."""

    stage: int
    kind: str
    """One of `KINDS`."""
    unit: int
    chunk: int
    """Index of the chunk in its unit."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.unit}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Inverse of `str`. Raises ValueError for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{quoted(text)} is not an action: expected stage, one of {', '.join(KINDS)}, "
                "unit.chunk, as 2F0.1"
            )
        stage, kind, unit, chunk = match.groups()
        return cls(int(stage), kind, int(unit), int(chunk))


def text(actions: Iterable[Action]) -> str:
    """Return actions as one line: `0F0.0 0F0.1 0B0.1 0B0.0`."""
    return " ".join(map(str, actions))


def parse(line: str) -> tuple[Action, ...]:
    """Return the actions whose `text` is `line`."""
    return tuple(Action.parse(word) for word in line.split())


Actions = tuple[tuple[Action, ...], ...]  # [rank] in their order


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The tokens of one forward and one backward; its name is `unit.index`."""

    unit: int
    index: int
    """Number of the chunk in its unit, from 0."""
    slices: tuple[Slice, ...]
    """Slices in row order. At most one is a part of a sequence, and it comes first."""

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.slices)

    def cut(self, lengths: tuple[int, ...]) -> Slice | None:
        """Return the slice that is only a part of its sequence, or None.

        Its attention crosses chunks. lengths: tokens per sequence of the plan.
        """
        first = self.slices[0]
        return first if first.tokens < lengths[first.sequence] else None


# ---- records


def _actions(name: str, lines: Any) -> Actions:
    """Return the actions of all ranks. Raises ValueError unless each has a line of text."""
    of_ranks = []
    for rank, line in enumerate(items(name, lines)):
        if not isinstance(line, str):
            raise ValueError(
                f"{name}[{rank}]={quoted(line)}: must be a string of actions, such as 0F0.0"
            )
        of_ranks.append(parse(line))
    return tuple(of_ranks)


def _chunks(name: str, records: Any) -> tuple[Chunk, ...]:
    """Return chunks. Raises ValueError for other records; `check_form` compares the slices with
    the lengths."""
    chunks = []
    for index, record in enumerate(items(name, records)):
        where = f"{name}[{index}]"
        record = fields_of(record, where, needed=("unit", "index", "slices"))
        slices = []
        for number, numbers in enumerate(items(f"{where}, slices", record["slices"])):
            if len(items(f"{where}, slices[{number}]", numbers)) != 3:
                raise ValueError(
                    f"{where}: {quoted(numbers)} is not a slice: expected [sequence, start, stop]"
                )
            slices.append(Slice(*wholes(f"{where}, slices[{number}]", numbers, most=MAX_TOKENS)))
        unit, place = (whole(f"{where}, {key}", record[key]) for key in ("unit", "index"))
        chunks.append(Chunk(unit=unit, index=place, slices=tuple(slices)))
    return tuple(chunks)


def _chunk_records(chunks: Iterable[Chunk]) -> list[dict[str, Any]]:
    records = []
    for chunk in chunks:
        slices = [list(part) for part in chunk.slices]
        records.append({"unit": chunk.unit, "index": chunk.index, "slices": slices})
    return records


Stages = Annotated[int, Bounds(least=1, most=MAX_STAGES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan(Record):
    """One optimizer step through one pipeline."""

    what: ClassVar[str] = "a plan of a pipeline"

    lengths: Lengths
    """Tokens per sequence; a sequence's id is its index."""
    ranks: Stages
    """Number of ranks of the pipeline (one replica)."""
    stages: Stages
    """Number of stages, a multiple of `ranks`; stage s is on rank s % ranks."""
    chunks: Annotated[tuple[Chunk, ...], Form(_chunks, write=_chunk_records)]
    """All chunks, by unit, then by index."""
    actions: Annotated[Actions, Form(_actions, write=lambda lists: [*map(text, lists)])]
    """[ranks] The actions of each rank, in order."""
    checkpointed: NumberLists
    """[stages, chunks] Layers of the stage that recompute the chunk; () for none."""
    schedule: str
    """Name of the schedule that made the plan."""
    objective_s: Seconds
    """Predicted seconds of the step; for `auto` at most a wait or two above `walk.py`."""
    planning_s: Seconds
    """Seconds that planning took; not in the digest."""

    @property
    def how(self) -> str:
        """The chunks and stages, in words."""
        return f"{len(self.chunks):,} chunks through {self.stages} stages"

    def places(self) -> dict[tuple[int, int], int]:
        """Return the index in `chunks` of each (unit, index)."""
        return {(chunk.unit, chunk.index): index for index, chunk in enumerate(self.chunks)}

    def layers_checkpointed(self, stage: int, chunk: int) -> int:
        """Return the number of layers of `stage` that recompute the chunk at this index."""
        return self.checkpointed[stage][chunk] if self.checkpointed else 0

    def check_form(self) -> None:
        """Raise ValueError, naming chunk or action, unless chunks and actions are legal.

        A plan of legal form can still hang: see `walk.py`.
        """
        if self.ranks < 1 or self.stages < self.ranks or self.stages % self.ranks:
            raise ValueError(
                f"{self.stages} stages cannot be spread evenly over {self.ranks} ranks"
            )
        _check_chunks(self)
        _check_checkpointed(self)
        if len(self.actions) != self.ranks:
            raise ValueError(f"{len(self.actions)} lists of actions for {self.ranks} ranks")
        for rank, actions in enumerate(self.actions):
            _check_rank(self, rank, actions)


# ---- the form: chunks


def _check_chunks(plan: PipelinePlan) -> None:
    """Raise ValueError unless the chunks hold every token once, in the order of their names."""
    # 1. numbers have no gaps
    next_names = [(0, 0)]
    for chunk in plan.chunks:
        if (chunk.unit, chunk.index) not in next_names:
            raise ValueError("chunks must be numbered unit by unit: 0.0, 0.1, ..., 1.0, ...")
        next_names = [(chunk.unit, chunk.index + 1), (chunk.unit + 1, 0)]
    # 2. every chunk continues where previous ones ended
    reached = [0] * len(plan.lengths)  # tokens of each sequence in previous chunks
    before: Chunk | None = None
    for chunk in plan.chunks:
        _check_slices(chunk, plan, reached)
        _check_cut(chunk, before, plan)
        before = chunk
    # 3. all tokens are in chunks
    for sequence, (length, stop) in enumerate(zip(plan.lengths, reached, strict=True)):
        if stop != length:
            raise ValueError(
                f"sequence {sequence} has {length} tokens, the chunks hold {stop} of them"
            )


def _check_slices(chunk: Chunk, plan: PipelinePlan, reached: list[int]) -> None:
    """Raise ValueError unless every slice continues where previous chunks ended.

    reached: [sequences] tokens in previous chunks; this function adds the tokens of `chunk`.
    """
    name = f"chunk {chunk.unit}.{chunk.index}"
    if not chunk.slices:
        raise ValueError(f"{name} holds no token")
    for index, part in enumerate(chunk.slices):
        if not (0 <= part.sequence < len(plan.lengths) and 0 <= part.start < part.stop):
            raise ValueError(f"{name}: {part} is not a slice of a sequence")
        if part.start != reached[part.sequence]:
            raise ValueError(f"{name}: {part} must begin at token {reached[part.sequence]}")
        if index > 0 and part.tokens < plan.lengths[part.sequence]:
            raise ValueError(
                f"{name}: only the first slice may be a part of a sequence, not {part}"
            )
        reached[part.sequence] = part.stop


def _check_cut(chunk: Chunk, before: Chunk | None, plan: PipelinePlan) -> None:
    """Raise ValueError unless a unit of several chunks is one cut sequence.

    The sequence runs from chunk 0 to the last chunk. before: the plan's previous chunk.
    """
    name = f"chunk {chunk.unit}.{chunk.index}"
    cut = chunk.cut(plan.lengths)
    begins = cut is None or cut.start == 0
    if begins != (chunk.index == 0):
        raise ValueError(
            f"{name}: a cut sequence must begin in chunk 0 of its unit and be in all others"
        )
    if cut is None or chunk.index == 0 or before is None:
        return
    if before.slices[0].sequence != cut.sequence:
        raise ValueError(
            f"{name}: sequence {cut.sequence} does not continue from the previous chunk"
        )


def _check_checkpointed(plan: PipelinePlan) -> None:
    """Raise ValueError unless checkpointed layers are given for all stages and chunks, or none."""
    sizes = [len(layers) for layers in plan.checkpointed]
    if plan.checkpointed and sizes != [len(plan.chunks)] * plan.stages:
        raise ValueError(
            f"checkpointed layers must be given for {plan.stages} stages x "
            f"{len(plan.chunks)} chunks"
        )
    if any(layers < 0 for stage in plan.checkpointed for layers in stage):
        raise ValueError("checkpointed layers must not be negative")


# ---- the form: actions


@dataclass(slots=True)
class _Progress:
    """Progress of one stage in its list of actions."""

    forwards: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of chunks whose F is done, by unit."""
    backwards: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of chunks whose B or I is done, by unit."""
    owed: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Chunks whose W is pending, by unit, in the order of their I's."""


def _check_rank(plan: PipelinePlan, rank: int, actions: Iterable[Action]) -> None:
    """Raise ValueError, naming the action, unless `rank` runs every chunk on all of its stages."""
    sizes = {chunk.unit: chunk.index + 1 for chunk in plan.chunks}  # chunks of each unit
    # Stages of a rank are `ranks` apart.
    stages = {stage: _Progress() for stage in range(rank, plan.stages, plan.ranks)}
    for action in actions:
        if action.stage not in stages:
            raise ValueError(f"{action}: stage {action.stage} is not on rank {rank}")
        if action.kind not in KINDS or not 0 <= action.chunk < sizes.get(action.unit, 0):
            raise ValueError(f"{action}: unknown kind or chunk")
        problem = _advance(stages[action.stage], action, sizes[action.unit])
        if problem:
            raise ValueError(f"{action}: {problem}")
    for stage, progress in stages.items():
        _check_complete(stage, progress, sizes)


def _advance(progress: _Progress, action: Action, size: int) -> str:
    """Count one action as done, and return an error or "".

    size: chunks of the action's unit.
    """
    unit = action.unit
    owed = progress.owed[unit]
    if action.kind == "F":
        due = progress.forwards[unit]
        if action.chunk != due:
            return f"forwards of a unit ascend, {due} comes next"
        progress.forwards[unit] += 1
        return ""
    if action.kind == "W":
        if owed[:1] != [action.chunk]:
            return f"weight gradients follow their I's, in their order: {owed} are due"
        owed.pop(0)
        return ""
    due = size - 1 - progress.backwards[unit]  # backwards descend
    if progress.forwards[unit] < size or action.chunk != due:
        return f"backwards of a unit begin after its {size} forwards and descend, {due} comes next"
    if action.kind == "B" and owed:
        return f"the weight gradients of {owed} come before this one's"
    progress.backwards[unit] += 1
    if action.kind == "I":
        owed.append(action.chunk)  # its W comes later
    return ""


def _check_complete(stage: int, progress: _Progress, sizes: dict[int, int]) -> None:
    """Raise ValueError, naming a missing action, unless `stage` is done."""
    for unit, size in sizes.items():
        if progress.forwards[unit] < size:
            raise ValueError(f"stage {stage} has no {stage}F{unit}.{progress.forwards[unit]}")
        if progress.backwards[unit] < size:
            due = size - 1 - progress.backwards[unit]
            raise ValueError(
                f"stage {stage} has no {stage}B{unit}.{due} and no {stage}I{unit}.{due}"
            )
        if progress.owed[unit]:
            raise ValueError(f"stage {stage} has no {stage}W{unit}.{progress.owed[unit][0]}")
