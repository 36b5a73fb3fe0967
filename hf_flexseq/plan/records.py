"""Base of all decisions stored as data: records, JSON, digests, and a check of the form.

    record    plain JSON values, as in files, traces and pipes between processes
    bytes     the same as sent between ranks
    decision  the record without the planning seconds and the notes, which may differ between runs
    digest    a hash of the decision: equal on every rank and in every run

A record has a `version` (`values.VERSION`), 1 if it is missing. All values are checked on reading,
so other code need not check them again.

A `Record` is a frozen dataclass.

Rejected: `dataclasses.asdict` as the record. It copies every tuple recursively, which takes longer
than planning a pipeline of tens of thousands of actions, and it ties the file format to field
names.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from typing import Any, Self

from hf_flexseq.base.reading import parse_json

DIGEST_CHARACTERS = 16  # 64 bits distinguish the plans of a run


class Record(ABC):
    """A decision. Subclasses are frozen dataclasses."""

    __slots__ = ()

    @abstractmethod
    def to_record(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""

    @classmethod
    @abstractmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Inverse of `to_record`. Raises ValueError for any other record."""

    @abstractmethod
    def check_form(self) -> None:
        """Raise ValueError, naming the place, unless the parts are consistent.

        The check needs no topology, no cost model and no walk through actions.
        """

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return json.dumps(self.to_record())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`. Raises ValueError for any other text."""
        return cls.from_record(parse_json(text))

    def to_bytes(self) -> bytes:
        """Return the record as bytes, for other ranks."""
        return self.to_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Inverse of `to_bytes`. Raises ValueError for any other bytes."""
        return cls.from_json(data.decode())

    def decision(self) -> dict[str, Any]:
        """Return the record without planning seconds and notes."""
        record = self.to_record()
        # The key stays, with a constant: digests in old traces include it.
        record["planning_s"] = 0.0
        record.pop("notes", None)
        record.pop("version", None)
        return record

    def digest(self) -> str:
        """Return the hex digest of the decision."""
        text = json.dumps(self.decision(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]
