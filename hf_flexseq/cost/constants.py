"""The constants of a cost model: their meaning and units, their checks, what they leave room for,
and JSON.

`model.py` has the formulas of seconds. Constants are estimated from a model's and a device's
figures (`analytic.py`), and corrected by what steps take (`online.py`), or published
(`presets.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Self

from hf_flexseq.base.reading import parse_json, read_text
from hf_flexseq.base.values import (
    MAX_BYTES,
    MAX_RANKS,
    MAX_SECONDS,
    MAX_TOKENS,
    MAX_TOKENS_PER_RANK,
    VERSION,
    duration,
    fields_of,
    items,
    number,
    positive,
    quoted,
    whole,
    word,
)
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.experts import ExpertLayers
from hf_flexseq.cost.kinds import (
    NearLayers,
    check_kinds,
    check_listed_once,
    full_share,
    percents,
)
from hf_flexseq.cost.launches import MOST_PER_RANK
from hf_flexseq.cost.recurrent import RecurrentLayers
from hf_flexseq.cost.tower import TowerCost
from hf_flexseq.plan.images import ImageSize

# Query heads x tokens that a piece must have to be worth a kernel call of its own: on the CPU of
# one sequence, where each is a call; on CUDA of all of them, to fill the device.
PIECE_ROWS = {"cpu": 1 << 9, "cuda": 1 << 15}

# Planners multiply the nanoseconds of a step by thousandths, in 63 bits.
MAX_STEP_S = 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class CostConstants:
    """Measured or estimated constants of one model on one machine."""

    name: str
    """A label for people."""
    attention_s: float
    """Seconds per squared token (a1), forward and backward, all layers that read all keys."""
    linear_s: float
    """Seconds per token (a2), forward and backward, all layers, without `experts`."""
    micro_batch_s: float
    """Seconds per micro-batch, whatever is in it (b1)."""
    group_s: float
    """Seconds per group of several ranks: latency of its transfers, all layers."""
    all_to_all_bytes: float
    """Bytes per token that Ulysses moves, forward and backward, all layers."""
    ring_bytes: float | None
    """Bytes per token of a ring, forward and backward, all layers; None refuses rings."""
    query_bytes: float
    """Bytes of a token's queries on one trip, all layers."""
    ring_overlap: float
    """Share of a ring's transfers that attention can hide; 0 if they take the processor's time."""
    bandwidths: tuple[tuple[int, float], ...]
    """(degree, bytes/s) pairs, ascending by degree."""
    heads: int | None
    """Query heads. None: any degree divides them."""
    token_bytes: float
    """Activation bytes per token."""
    state_bytes: float
    """Bytes of model state that every rank holds."""
    sharded_state_bytes: float
    """Bytes of model state that all ranks hold together."""
    budget_bytes: float
    """Memory of one rank in bytes."""
    nics_per_node: int = 1
    """Links to other nodes that the ranks of a node send over, each rank over one of them."""
    transfer_s: float = 0.0
    """Seconds that a transfer between two ranks takes besides its bytes."""
    all_to_all_overlap: float = 0.0
    """Share of Ulysses' transfers, except for the first piece, that attention can hide."""
    piece_rows: float = PIECE_ROWS["cuda"]
    """Query heads x tokens of one sequence that make a piece worth a kernel call, see
    `PIECE_ROWS`. On CUDA the sequences packed in a row fill a piece together, which the model
    leaves out."""
    launch_s: float = 0.0
    """Seconds of the host per operation that it launches in every layer, all layers."""
    post_s: float = 0.0
    """Seconds of the host per call that posts messages in every layer, all layers."""
    message_s: float = 0.0
    """Seconds of the host per message in such a call, all layers."""
    host_overlap: float = 1.0
    """Share of the host's work that the device's can hide; 0 if both are one processor."""
    contact_s: float = 0.0
    """Seconds of the first message between two ranks, once in a run; no plan depends on it."""
    kinds: tuple[NearLayers, ...] = ()
    """Layers that read a window or a chunk of their sequence; () where all read all keys."""
    recurrent: tuple[RecurrentLayers, ...] = ()
    """Layers that go through a sequence from its first token to its last; () without any."""
    attention_share: float = 1.0
    """Share of the layers that have attention."""
    experts: ExpertLayers | None = None
    """Layers whose experts lie on several ranks; None where every rank computes its own."""
    tower: TowerCost | None = None
    """The vision tower; None without one."""
    activations: Activations | None = None
    """The bytes behind `token_bytes`; None where they are not known, and nothing can be chosen."""

    def __post_init__(self) -> None:
        word("name", self.name)
        positive("linear_s", self.linear_s, most=MAX_SECONDS)
        for name in (
            "attention_s",
            "micro_batch_s",
            "group_s",
            "transfer_s",
            "launch_s",
            "post_s",
            "message_s",
            "contact_s",
        ):
            duration(name, getattr(self, name))
        for name in ("token_bytes", "budget_bytes", "piece_rows"):
            positive(name, getattr(self, name))
        for name in ("all_to_all_bytes", "query_bytes", "state_bytes", "sharded_state_bytes"):
            number(name, getattr(self, name))
        if self.ring_bytes is not None:
            number("ring_bytes", self.ring_bytes)
        for name in ("ring_overlap", "all_to_all_overlap", "host_overlap"):
            number(name, getattr(self, name), most=1.0)
        if self.heads is not None:
            whole("heads", self.heads, least=1)
        whole("nics_per_node", self.nics_per_node, least=1)
        check_kinds(self.kinds)
        check_listed_once("recurrent", [kind.kind for kind in self.recurrent])
        number("attention_share", self.attention_share, most=1.0)
        if not self.attention_share and (self.kinds or self.attention_s):
            raise ValueError(
                "attention_share=0.0: attention of no layers takes attention_s or has kinds; give "
                "the share of the layers that have attention, or leave these out"
            )
        if not self.bandwidths:
            raise ValueError("bandwidths: give at least one (degree, bytes/s) pair")
        degrees = [whole("bandwidths, degree", one, most=MAX_RANKS) for one, _ in self.bandwidths]
        if degrees != sorted(set(degrees)) or degrees[0] < 1:
            raise ValueError(f"bandwidths: degrees {quoted(degrees)} must ascend from 1")
        for _, speed in self.bandwidths:
            positive("bandwidths, bytes/s", speed)

    # ---- bytes

    def free_bytes(self, world_size: int) -> float:
        """Return the bytes of a rank besides its model states; negative where these are more."""
        states = self.state_bytes + self.sharded_state_bytes / world_size
        return self.budget_bytes - states

    def max_tokens_per_rank(self, world_size: int) -> int:
        """Return the most tokens a rank can hold in one micro-batch besides its model states.

        Raises ValueError where the states leave no room for a token, or the host has none.
        """
        states = self.budget_bytes - self.free_bytes(world_size)
        tokens = int(min(self.free_bytes(world_size) // self.token_bytes, MAX_TOKENS_PER_RANK))
        if tokens < 1:
            raise ValueError(
                f"cost model {self.name!r}: model states take {states / 2**30:.1f} of "
                f"{self.budget_bytes / 2**30:.1f} GiB on {world_size} ranks, which leaves no room "
                "for a token: shard them (FSDP, ZeRO-3), use more ranks, or set "
                "max_tokens_per_rank"
            )
        if self.activations is None:
            return tokens
        as_set = self.activations.as_set
        tokens = self.activations.within_host(tokens, as_set)
        if tokens < 1:
            on_host = self.activations.host_token_bytes(as_set)
            raise ValueError(
                f"activations of a token take {on_host / 2**20:.1f} MiB of the host as the run is "
                f"set, and a rank may use {self.activations.host_bytes:.0f} bytes of it: raise "
                "host_memory_gib, or leave out offload=True of activation checkpointing"
            )
        return tokens

    # ---- what can be counted

    def check_countable(self, lengths: Sequence[int], world_size: int) -> None:
        """Raise ValueError unless a step of these sequences can be counted in 63 bits, however it
        is planned: its nanoseconds, and the bytes of a rank.

        Every sequence on its own, without a rank to share it, with all its transfers by the
        slowest link and with the most launches of `world_size` ranks, takes at least as long as
        any plan. lengths: tokens of each sequence.
        """
        if not len(lengths):
            return
        longest = max(lengths)
        if longest > MAX_TOKENS:
            raise ValueError(f"a sequence of {longest} tokens: it may have at most {MAX_TOKENS:,}")
        # Python's floats, and no arrays, for they become infinite in silence.
        tokens = float(sum(lengths))
        slowest = min(speed for _, speed in self.bandwidths)
        ring_bytes = 2 * (self.ring_bytes or 0.0) + 2 * self.query_bytes
        row_bytes = sum(kind.row_bytes for kind in self.recurrent)
        moved = 2 * self.all_to_all_bytes + ring_bytes + row_bytes  # a remapped token moves twice
        of_each_s = self.launch_s + self.post_s + self.message_s
        most_host_s = MOST_PER_RANK * world_size * of_each_s
        # a sequence of one token has two pairs to one squared token
        pair_s = self.attention_s + 2 * sum(kind.attention_s for kind in self.kinds)
        longest_s = (
            pair_s * longest * tokens  # at least the sum of squares
            + self.linear_s * tokens
            + moved * tokens / slowest
            + (self.micro_batch_s + self.group_s + most_host_s) * len(lengths)
        )
        for kind in self.recurrent:
            # a rank has two segments of a sequence at most, each with a chunk that is filled up
            filled = tokens + 2 * kind.chunk * len(lengths)
            longest_s += (kind.token_s + kind.again_s) * filled
            exchanged = kind.exchanged_bytes(world_size, "zigzag") / slowest
            longest_s += exchanged * len(lengths)
        if self.experts is not None:
            longest_s += self.experts.most_s(tokens)
        if longest_s > MAX_STEP_S:
            raise ValueError(
                f"cost model {self.name!r}: a step of {len(lengths)} sequences may take "
                f"{longest_s:.3g} s, at most {MAX_STEP_S:.0e} s can be counted: check its "
                "constants and the lengths"
            )
        held = self.state_bytes + self.sharded_state_bytes + self.token_bytes * tokens
        if held > MAX_BYTES:
            raise ValueError(
                f"cost model {self.name!r}: a step of {len(lengths)} sequences takes {held:.3g} "
                f"bytes, at most {MAX_BYTES:.3g} can be counted: check its constants"
            )

    def check_images(self, images: Sequence[ImageSize]) -> None:
        """Raise ValueError unless the tower's seconds for all images of a step, on one rank, can
        be counted like those of its sequences."""
        if self.tower is None:
            return
        seconds = sum(self.tower.image_ns(image) for image in images) / 1e9
        if seconds > MAX_STEP_S:
            raise ValueError(
                f"cost model {self.name!r}: its tower may take {seconds:.3g} s for {len(images)} "
                f"images of a step, at most {MAX_STEP_S:.0e} s can be counted: check its "
                "constants and the patches"
            )

    # ---- words

    def layers_text(self, world_size: int, *, before: str = "") -> str:
        """Return the shares of layers by kind, and how experts lie over ranks, in words; "" if all
        layers are full and no experts lie on several ranks. before: a prefix of each."""
        text = ""
        if self.kinds or self.recurrent:
            text += f"{before}layers {self._shares_text()}"
        if self.experts is not None:
            text += f"{before}{self.experts.text(world_size)}"
        return text

    def _shares_text(self) -> str:
        """Return the shares of layers by kind in words."""
        shares = [(kind.share, kind.kind.replace("_", " ")) for kind in self.recurrent]
        of_attention = [(kind.share, str(kind.reach)) for kind in self.kinds]
        of_attention.append((full_share(self.kinds), "full"))
        for share, name in of_attention:
            shares.append((self.attention_share * share, name))
        return percents(shares)

    # ---- JSON

    def to_record(self) -> dict[str, Any]:
        """Return the model as plain JSON values.

        Seconds, bytes and shares are floats, so that equal models have equal digests.
        """
        record: dict[str, Any] = {"version": VERSION}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("experts", "tower", "activations"):
                if value is not None:  # else the record is that of a model without
                    record[one.name] = value.to_record()
            elif one.name == "bandwidths":
                record[one.name] = [[degree, float(speed)] for degree, speed in value]
            elif one.name in ("kinds", "recurrent"):
                record[one.name] = [kind.to_record() for kind in value]
            elif one.name in ("name", "heads", "ring_bytes", "nics_per_node"):
                record[one.name] = value
            else:
                record[one.name] = float(value)
        return record

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Inverse of `to_record`. Raises ValueError, naming the key, for any other record."""
        needed = [one.name for one in fields(cls) if one.default is MISSING]
        optional = [one.name for one in fields(cls) if one.default is not MISSING]
        values = dict(fields_of(record, "a cost model", needed=needed, optional=optional))
        values.pop("version", None)
        # The constructor checks the values.
        values["bandwidths"] = _bandwidths(values["bandwidths"])
        for name, kind in (("kinds", NearLayers), ("recurrent", RecurrentLayers)):
            records = items(name, values.get(name, []))
            values[name] = tuple(kind.from_record(record) for record in records)
        for name, part in (
            ("experts", ExpertLayers),
            ("tower", TowerCost),
            ("activations", Activations),
        ):
            if values.get(name) is not None:
                values[name] = part.from_record(values[name])
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the model to a JSON file."""
        Path(path).write_text(json.dumps(self.to_record(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Inverse of `save`. Raises ValueError that names the file and its problem."""
        try:
            return cls.from_record(parse_json(read_text(path)))
        except (OSError, ValueError) as error:
            raise ValueError(f"cost model file {path}: {error}") from error


def _bandwidths(value: Any) -> tuple[tuple[int, float], ...]:
    """Return a record's bandwidths as (degree, bytes/s) pairs. Raises ValueError for others."""
    pairs = []
    for pair in items("bandwidths", value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"bandwidths={quoted(value)}: must be [degree, bytes/s] pairs")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)
