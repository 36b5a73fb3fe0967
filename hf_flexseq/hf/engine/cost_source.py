"""Source of a run's cost model, in this order:

    1. the preset or file named by `cost_model=`
    2. the checkpoint that the run resumes from, for the same model on the same devices
    3. the estimate (`cost_choice.py`). With "auto" it is corrected: as an earlier run of the same
       model on the same devices has found, or by the steps of this run (`learned_cost.py`)

Plans depend on the cost model, and steps teach other corrections in every run: a resumed run that
learned again would run other plans, with another summation order. If the checkpoint's cost model
cannot be used, one warning says why.

The findings of runs are kept in the folder `hf_flexseq` of the HuggingFace cache, one JSON file
each. The name of a file is a digest of everything that its factors depend on, so another machine,
model or version finds no file instead of a wrong one.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from hf_flexseq.base.reading import parse_json, read_text
from hf_flexseq.checkpoints.files import write_json
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.cost.sharding import replicated
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.cost_choice import CostSubject
from hf_flexseq.steps.learned_cost import LearnedCost, Version, record_of, versions_of

logger = logging.getLogger(__name__)


# Values of `cost_model=` other than presets and files.
AUTO = "auto"
MADE_FOR_THE_MODEL = (AUTO, "estimate")

# Parts of a subject's key that may differ: versions and threads never make a plan wrong.
MAY_DIFFER = ("threads", "torch")
MEMORY = "memory_bytes"
SAME_MEMORY = 0.01  # relative difference of a machine's memory between starts
SHOWN_CHARACTERS = 40  # per value in a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCost:
    """Cost model of a run as saved in its checkpoints."""

    cost: CostModel
    """Without corrections."""
    made_for: Mapping[str, Any]
    """Model, devices and `cost_model=` of the saving run, as plain JSON values."""
    versions: Sequence[Version] = ()
    """Corrections, by step."""

    def to_record(self) -> dict[str, Any]:
        """Return the cost model as plain JSON values."""
        return {
            "digest": self.cost.digest(),
            "made_for": dict(self.made_for),
            "record": self.cost.to_record(),
            "learned": record_of(self.versions),
        }

    @classmethod
    def from_record(cls, record: Any) -> "SavedCost":
        """Inverse of `to_record`. Raises ValueError for an invalid record."""
        if not isinstance(record, dict) or not isinstance(record.get("made_for"), dict):
            raise ValueError("not a record of a cost model")
        cost = CostModel.from_record(record.get("record"))
        if record.get("digest") != cost.digest():
            raise ValueError("its digest does not match its values")
        versions = versions_of(record.get("learned"))
        return cls(cost=cost, made_for=record["made_for"], versions=versions)

    def differences(self, made_for: Mapping[str, Any]) -> list[str]:
        """Return the names of differing entries, with both values if they are short."""
        found = []
        for name, now in made_for.items():
            then = self.made_for.get(name)
            if name == MEMORY:
                is_same = isinstance(then, int | float) and abs(now - then) <= SAME_MEMORY * now
            else:
                is_same = then == now
            if not is_same:
                found.append(f"{name}{_shown(then, now)}")
        return found


def _shown(then: Any, now: Any) -> str:
    """Return both values in brackets; an empty string if they are long."""
    values = [json.dumps(then), json.dumps(now)]
    if max(len(value) for value in values) > SHOWN_CHARACTERS:
        return ""
    return f" ({values[0]} then, {values[1]} now)"


def named_cost(asked: str, communicator: Communicator) -> CostModel | None:
    """Return rank 0's cost model for a preset or a file; None for "auto" and "estimate".
    Collective over the world. Raises ValueError, on all ranks, if rank 0's machine does not have
    it."""
    if asked in MADE_FOR_THE_MODEL:
        return None
    record = None
    with ErrorCapture() as loading:
        if communicator.rank == 0:
            record = load_cost_model(asked).to_record()
    loading.raise_on_all_ranks(communicator.cpu_group.gather_values, "loading the cost model")
    return CostModel.from_record(communicator.cpu_group.broadcast_value(record))


@dataclass(slots=True)
class CostSource:
    """Finds the cost model of a run."""

    asked: str
    """The option `cost_model`."""
    named: CostModel | None
    """Result of `named_cost`."""
    communicator: Communicator
    learned: LearnedCost = field(default_factory=LearnedCost)
    """Corrections of the last cost model found."""
    _brought: tuple[str, SavedCost] | None = None  # checkpoint, its cost model
    _used: SavedCost | None = None

    def bring(self, checkpoint: str | None, record: Any) -> None:
        """Offer the cost model saved in a checkpoint, if any. record: of `SavedCost.to_record`."""
        self._brought = None
        if checkpoint is None or record is None:
            return
        name = Path(checkpoint).name
        try:
            self._brought = (name, SavedCost.from_record(record))
        except ValueError as error:
            self._warn(f"the cost model of {name} is not used: {error}")

    def to_record(self) -> dict[str, Any] | None:
        """Return the last cost model found, for a checkpoint, and freeze it; None before."""
        if self._used is None:
            return None
        self.learned.freeze("a checkpoint is saved")
        return replace(self._used, versions=tuple(self.learned.versions)).to_record()

    def expected(self, subject: CostSubject) -> CostModel:
        """Return rank 0's cost model for memory checks, without counted bytes. Collective over the
        world. One of text that is named gets the estimated cost of the model's tower."""
        own = subject.estimate
        if self.named is not None:
            tower = self.named.tower or own.tower
            own = replace(replicated(self.named, subject.replicas), tower=tower)
        return CostModel.from_record(self.communicator.cpu_group.broadcast_value(own.to_record()))

    def find(self, subject: CostSubject) -> CostModel:
        """Return rank 0's cost model of the run, without the corrections that are in `learned`
        then. Collective over the world."""
        made_for = self._made_for(subject)
        brought = self._taken_over(made_for)
        learned = LearnedCost()
        if self.named is not None:
            own, origin = self.expected(subject), "named by cost_model"
            self._compare_named(own)
        elif brought is not None:
            own, origin = brought[1].cost, f"from {brought[0]}"
            learned = LearnedCost(brought[1].versions)
        else:
            own = subject.counted() if self.communicator.rank == 0 else subject.estimate
            origin = "estimated"
            if self.asked == AUTO and self._used is not None and self._used.made_for == made_for:
                learned = self.learned  # a model is attached again, for an evaluation
                learned.begin_anew()
            elif self.asked == AUTO:
                learned, origin = self._learned_before(subject, made_for)
        # A cost model's file may differ between nodes.
        cost = CostModel.from_record(self.communicator.cpu_group.broadcast_value(own.to_record()))
        self.learned = learned
        self._used = SavedCost(cost=cost, made_for=made_for)
        if self.communicator.rank == 0:
            logger.info("cost model %s, digest %s: %s", cost.name, cost.digest(), origin)
        return cost

    def _learned_before(
        self, subject: CostSubject, made_for: Mapping[str, Any]
    ) -> tuple[LearnedCost, str]:
        """Return an earlier run's corrections, or an empty `LearnedCost` for this run, and the
        origin of the cost model in words. Collective over the world."""
        kept_for = {name: made_for[name] for name in made_for if name != MEMORY}
        path = _cache_path({**kept_for, **subject.key(), "estimate": subject.seconds_digest()})
        record = _cached(path) if self.communicator.rank == 0 else None
        record = self.communicator.cpu_group.broadcast_value(record)
        try:
            versions = versions_of(record)
        except ValueError:  # none, or a file of another version
            learned = LearnedCost(learns=True)
            learned.keep = partial(_keep, path)
            return learned, "estimated; the first steps correct it"
        return LearnedCost(versions), f"estimated, and corrected by an earlier run, {path}"

    def _made_for(self, subject: CostSubject) -> dict[str, Any]:
        """Return model, devices and the option as plain JSON values."""
        made_for: dict[str, Any] = {"cost_model": self.asked}
        if self.named is None:
            made_for[MEMORY] = subject.estimate.budget_bytes
            if subject.as_set is not None:
                made_for["activations"] = str(subject.as_set)
        for name, value in subject.key().items():
            if name not in MAY_DIFFER:
                made_for[name] = value
        values: dict[str, Any] = json.loads(json.dumps(made_for))
        return values

    def _taken_over(self, made_for: Mapping[str, Any]) -> tuple[str, SavedCost] | None:
        """Return the checkpoint's cost model if it fits. Collective over the world."""
        if self._brought is None or self.named is not None:
            return None
        name, brought = self._brought
        # devices may differ between ranks: rank 0 decides
        differences = self.communicator.cpu_group.broadcast_value(brought.differences(made_for))
        if not differences:
            return self._brought
        self._warn(
            f"the cost model of {name} is not used, so plans may differ from the checkpoint's "
            f"run: this run differs in {', '.join(differences)}"
        )
        self._brought = None  # warn once: an evaluation attaches the model again
        return None

    def _compare_named(self, own: CostModel) -> None:
        """Warn if the run names another cost model than the checkpoint's."""
        if self._brought is not None and self._brought[1].cost.digest() != own.digest():
            name, brought = self._brought
            self._warn(
                f"cost_model={self.asked!r} is used instead of {brought.cost.name!r} of {name}: "
                "plans may differ from the checkpoint's run"
            )
            self._brought = None  # as above

    def _warn(self, text: str) -> None:
        """Warn on rank 0."""
        if self.communicator.rank == 0:
            logger.warning("%s", text)


# ---- factors of earlier runs


FORMAT = 7  # version of what is kept; raised when older files must not be used any more


def _cache_path(key: Mapping[str, object]) -> Path:
    """Return the path of the factors that depend on `key`, a mapping of plain JSON values."""
    # Sorted and without spaces, so that equal keys give equal text.
    record = json.dumps({"format": FORMAT, **key}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(record.encode()).hexdigest()
    return Path(HF_HOME) / "hf_flexseq" / f"factors-{digest[:16]}.json"


def _cached(path: Path) -> Any:
    """Return the JSON value at `path`; None if it is missing or unreadable."""
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError):
        return None


def _keep(path: Path, record: Mapping[str, Any]) -> None:
    """Write a file atomically; warn if the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
    except OSError as error:
        logger.warning("what the cost model has learned could not be kept: %s", error)
