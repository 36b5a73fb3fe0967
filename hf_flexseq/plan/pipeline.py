"""A pipelined optimizer step as data: chunks of sequences, and for each rank the list of what it
does with them.

    unit    one cut sequence with whatever is packed beside it, or a pack of whole sequences
    chunk   one forward and one backward of a stage: a few slices of sequences, `index` counts them
            inside the unit
    action  2F0.1: stage 2 runs the Forward of unit 0's chunk 1

Kinds are those of zero-bubble schedules (arXiv 2401.10241, section 2): F forward, B the whole
backward, or its two parts, I for the gradient of the input, which the stage before waits for, and
W for the gradient of the weights, which nobody does. Sends and receives are implied: F takes its
input from the stage before and hands its output to the stage after, B and I the other way round.

Inside a unit a chunk's attention reads the keys and values of the chunks before it, so forwards
ascend and backwards descend (Seq1F1B, arXiv 2406.03488). `check.py` refuses everything else.

Rejected: sends and receives as actions of their own. They follow from the order of the others, and
a list that says the same twice can contradict itself.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hf_flexseq.plan.shard import Slice

KINDS = ("F", "B", "I", "W")
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)\.(\d+)")


class Action(NamedTuple):
    """What `stage` does with chunk number `chunk` of `unit`. A tuple, since a step may have tens
    of thousands."""

    stage: int
    kind: str
    unit: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.unit}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The inverse of `str`. Raises ValueError for anything else."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is no action: expected stage, one of {', '.join(KINDS)}, "
                f"unit.chunk, as 2F0.1"
            )
        stage, kind, unit, chunk = found.groups()
        return cls(int(stage), kind, int(unit), int(chunk))


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What one forward and one backward work on.

    unit, index: its name, `unit.index`. slices: in the order of the row. At most one is a part of
    a sequence, and then it comes first; the others are whole.
    """

    unit: int
    index: int
    slices: tuple[Slice, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.slices)

    def cut(self, lengths: tuple[int, ...]) -> Slice | None:
        """The slice that is only a part of its sequence, whose attention therefore crosses
        chunks."""
        first = self.slices[0]
        return first if first.tokens < lengths[first.sequence] else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """One optimizer step through a pipeline.

    lengths: tokens of each sequence; a sequence's id is its index. ranks: pipeline ranks (of one
    replica). stages: a multiple of `ranks`; stage s is on rank s % ranks. chunks: by unit, then by
    index. actions: of each rank, in order. checkpointed: [stage][place in `chunks`] how many of
    the stage's layers drop their activations and compute them again; () for none anywhere.
    schedule: who made it. objective_s: modelled seconds of the step, for `auto` at most a wait or
    two above what `walk.py` finds. planning_s: seconds it took to plan (not in the digest).
    """

    lengths: tuple[int, ...]
    ranks: int
    stages: int
    chunks: tuple[Chunk, ...]
    actions: tuple[tuple[Action, ...], ...]
    checkpointed: tuple[tuple[int, ...], ...] = ()
    schedule: str
    objective_s: float
    planning_s: float

    def places(self) -> dict[tuple[int, int], int]:
        """Where in `chunks` each (unit, index) stands."""
        return {(chunk.unit, chunk.index): place for place, chunk in enumerate(self.chunks)}

    def layers_checkpointed(self, stage: int, place: int) -> int:
        """How many layers of `stage` recompute the chunk at `place` in their backward."""
        return self.checkpointed[stage][place] if self.checkpointed else 0

    def digest(self) -> str:
        """Hex digest of all but `planning_s`: equal on every rank and every run of the same
        decision."""
        record = json.dumps(
            replace(self, planning_s=0.0).to_record(), sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(record.encode()).hexdigest()[:16]

    def to_record(self) -> dict[str, Any]:
        """The plan as plain JSON values; a rank's actions are one line of text."""
        return {
            "lengths": list(self.lengths),
            "ranks": self.ranks,
            "stages": self.stages,
            "chunks": [
                {
                    "unit": chunk.unit,
                    "index": chunk.index,
                    "slices": [[part.sequence, part.start, part.stop] for part in chunk.slices],
                }
                for chunk in self.chunks
            ],
            "actions": [text(actions) for actions in self.actions],
            "checkpointed": [list(layers) for layers in self.checkpointed],
            "schedule": self.schedule,
            "objective_s": self.objective_s,
            "planning_s": self.planning_s,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "PipelinePlan":
        """The inverse of `to_record`. Raises ValueError for anything that is no plan of a
        pipeline."""
        try:
            return cls(
                lengths=tuple(record["lengths"]),
                ranks=record["ranks"],
                stages=record["stages"],
                chunks=tuple(_chunk(chunk) for chunk in record["chunks"]),
                actions=tuple(parse(line) for line in record["actions"]),
                checkpointed=tuple(tuple(layers) for layers in record["checkpointed"]),
                schedule=record["schedule"],
                objective_s=record["objective_s"],
                planning_s=record["planning_s"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not a plan of a pipeline: {error!r} (it has the keys of PipelinePlan.to_record)"
            ) from error

    def to_json(self) -> str:
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, line: str) -> "PipelinePlan":
        return cls.from_record(json.loads(line))


def text(actions: Iterable[Action]) -> str:
    """Actions as one line: `0F0.0 0F0.1 0B0.1 0B0.0`."""
    return " ".join(map(str, actions))


def parse(line: str) -> tuple[Action, ...]:
    """The inverse of `text`."""
    return tuple(Action.parse(word) for word in line.split())


def _chunk(record: dict[str, Any]) -> Chunk:
    slices = tuple(
        Slice(sequence=sequence, start=start, stop=stop)
        for sequence, start, stop in record["slices"]
    )
    return Chunk(unit=record["unit"], index=record["index"], slices=slices)
