"""The base of everything that is decided as data: records, JSON, digests, and a check of the form.

    record    plain JSON values: what a file, a trace and a pipe between processes hold
    bytes     the same as ranks send it to each other
    decision  the record without what two runs of one decision may differ in: the seconds that
              planning took, and the notes for people
    digest    a hash of the decision: equal on every rank and in every run

A record says its `version` (`values.VERSION`); those from before it are of version 1. Whatever is
read back is checked value by value, so that nothing else needs to ask what a file may hold.

A `Record` is a frozen dataclass. A plan of a whole optimizer step, made of groups or of pipelines,
also is an `AnyPlan`: that is all an engine needs to know of it.

Rejected: `dataclasses.asdict` as the record. It copies every tuple recursively, which takes longer
than planning where a pipeline has tens of thousands of actions, and it would turn each name of a
field into a part of the file format.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from typing import Any, Protocol, Self

from hf_flexseq.base.reading import parse_json

DIGEST_CHARACTERS = 16  # 64 bits: enough to tell the plans of a run from each other


class Record(ABC):
    """Something that was decided. Subclasses are frozen dataclasses."""

    __slots__ = ()

    @abstractmethod
    def to_record(self) -> dict[str, Any]:
        """Return everything that was decided as plain JSON values."""

    @classmethod
    @abstractmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Return what `to_record` was called on. Raises ValueError for any other record."""

    @abstractmethod
    def check_form(self) -> None:
        """Raise ValueError, saying where, unless the parts fit each other.

        The check needs no topology, no cost model and no walk through actions.
        """

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` was called on. Raises ValueError for any other text."""
        return cls.from_record(parse_json(text))

    def to_bytes(self) -> bytes:
        """Return everything that was decided as rank 0 sends it to the others."""
        return self.to_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return what `to_bytes` was called on. Raises ValueError for any other bytes."""
        return cls.from_json(data.decode())

    def decision(self) -> dict[str, Any]:
        """Return the record without what is no part of the decision."""
        record = self.to_record()
        # The key stays, with a constant: digests in old traces were computed so.
        record["planning_s"] = 0.0
        record.pop("notes", None)
        record.pop("version", None)
        return record

    def digest(self) -> str:
        """Return the hex digest of the decision."""
        text = json.dumps(self.decision(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


class AnyPlan(Protocol):
    """The plan of one optimizer step, of either kind: `Plan` or `StepPlan`."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence of the step; the index is the sequence's id."""

    @property
    def objective_s(self) -> float:
        """Modelled seconds of the step."""

    @property
    def planner(self) -> str:
        """Name of the planner, or of the pipeline's schedule."""

    @property
    def planning_s(self) -> float:
        """Seconds that planning took."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons of the decision, one line for people each."""

    def to_record(self) -> dict[str, Any]:
        """Return everything that was decided as plain JSON values."""

    def to_bytes(self) -> bytes:
        """Return everything that was decided as rank 0 sends it to the others."""

    def digest(self) -> str:
        """Return the hex digest of the decision."""

    def check_form(self) -> None:
        """Raise ValueError, saying where, unless the parts fit each other."""
