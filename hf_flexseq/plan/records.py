"""Base of all decisions stored as data: records, JSON, digests, and a check of the form.

    record    plain JSON values, as in files, traces and pipes between processes and ranks
    decision  the record without the planning seconds and the notes, which may differ between runs
    digest    a hash of the decision: equal on every rank and in every run

A record has a `version` (`values.VERSION`), 1 if it is missing. All values are checked on reading,
so other code need not check them again.

A `Record` is a frozen dataclass, whose fields are read and written by their annotations
(`base/records.py`).

Rejected: `dataclasses.asdict` as the record. It copies every tuple recursively, which takes longer
than planning a pipeline of tens of thousands of actions.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from hf_flexseq.base.reading import parse_json
from hf_flexseq.base.records import Constants, Form
from hf_flexseq.base.values import MAX_TOKENS, items, wholes, words

DIGEST_CHARACTERS = 16  # 64 bits distinguish the plans of a run


def _lists(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Return lists of whole numbers. Raises ValueError for other values."""
    return tuple(wholes(f"{name}[{i}]", numbers) for i, numbers in enumerate(items(name, value)))


# Tokens of sequences; lists of whole numbers; remarks for people.
Lengths = Annotated[tuple[int, ...], Form(partial(wholes, least=1, most=MAX_TOKENS), write=list)]
NumberLists = Annotated[
    tuple[tuple[int, ...], ...], Form(_lists, write=lambda lists: [*map(list, lists)])
]
Notes = Annotated[tuple[str, ...], Form(words, write=list)]


class Record(Constants, ABC):
    """A decision. Subclasses are frozen dataclasses."""

    __slots__ = ()

    is_versioned: ClassVar[bool] = True

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

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> Self:
        """Return the decision in a line of a file, which has further keys in a trace. Raises
        ValueError for any other line."""
        if "step" in line:
            names = ["version", *(one.name for one in fields(cls))]  # type: ignore[arg-type]
            line = {name: line[name] for name in names if name in line}
        return cls.from_record(line)

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
