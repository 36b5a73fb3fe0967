"""The numbers of a cost model: their meaning and units, their checks, the tokens that fit into
memory, and JSON.

`model.py` has the seconds that follow. Numbers are estimated from the figures of a model and a
device (`analytic_model.py`), fitted while a run goes on (`correction.py`), or published
(`presets.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from hf_flexseq.base.reading import parse_json, read_text
from hf_flexseq.base.records import Amount, Bounds, Constants, Positive, Seconds, Share, Whole
from hf_flexseq.base.values import (
    MAX_BYTES,
    MAX_RANKS,
    MAX_SECONDS,
    MAX_TOKENS,
    MAX_TOKENS_PER_RANK,
    quoted,
)
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.experts import ExpertLayers
from hf_flexseq.cost.kernels import AttentionKernel
from hf_flexseq.cost.tower import TowerCost
from hf_flexseq.plan.images import ImageSize

# A number that every cost model of an earlier version has, and none of this one.
EARLIER = "ring_overlap"

# Planners multiply the nanoseconds of a step by thousandths, in 63 bits.
MAX_STEP_S = 1e6

# Passes of a rank's memory over a token, at most (`model.py`).
MOST_PASSES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class CostConstants(Constants):
    """Numbers of one model on one machine; seconds and bytes cover all layers, forward and
    backward."""

    what: ClassVar[str] = "a cost model"
    is_versioned: ClassVar[bool] = True

    name: str
    """A label for people."""
    attention_s: Seconds
    """Seconds per squared token of layers that read all keys; `kernel` counts the squares."""
    linear_s: Annotated[float, Bounds(most=MAX_SECONDS, above=True)]
    """Seconds per token: linear layers, windows and scans, whose work grows with the tokens; no
    `experts`."""
    micro_batch_s: Seconds
    """Seconds per micro-batch, whatever is in it."""
    group_s: Seconds
    """Seconds per group of several ranks: launches, posts and the latency of transfers."""
    all_to_all_bytes: Amount
    """Bytes per token that Ulysses moves."""
    ring_bytes: Amount | None
    """Bytes per token of a ring's keys and values, on three trips; None refuses rings."""
    bandwidths: tuple[tuple[Annotated[int, Bounds(least=1, most=MAX_RANKS)], Positive], ...]
    """(degree, bytes/s) pairs, ascending by degree."""
    heads: Whole | None
    """Query heads. None: any degree divides them."""
    token_bytes: Positive
    """Activation bytes per token."""
    state_bytes: Amount
    """Bytes of model state that every rank holds."""
    sharded_state_bytes: Amount
    """Bytes of model state that all ranks hold together."""
    budget_bytes: Positive
    """Memory of one rank in bytes."""
    group_rank_s: Seconds = 0.0
    """Seconds per rank of a ring, in addition to its group's."""
    pass_s: Seconds = 0.0
    """Seconds per token in which a rank's memory passes queries, keys and values once."""
    summary_bytes: Amount = 0.0
    """Bytes of a sequence's states that recurrent layers send to another rank; 0 without any."""
    overlap: Share = 1.0
    """Share of a ring's transfers, and of a group's seconds, that attention hides: 1 where a
    device has a separate host, 0 where both are one processor."""
    kernel: AttentionKernel | None = None
    """How attention's time depends on lengths; None for s^2."""
    widest_window: Annotated[int, Bounds(most=MAX_TOKENS)] = 0
    """Tokens of the widest window or chunk of a layer; 0 where all layers read all keys."""
    experts: ExpertLayers | None = None
    """Layers with experts on several ranks; None where every rank computes its own tokens."""
    tower: TowerCost | None = None
    """The vision tower; None without one."""
    activations: Activations | None = None
    """The bytes behind `token_bytes`; None where they are not known, and nothing can be chosen."""

    def __post_init__(self) -> None:
        Constants.__post_init__(self)
        if not self.bandwidths:
            raise ValueError("bandwidths: give at least one (degree, bytes/s) pair")
        degrees = [degree for degree, _ in self.bandwidths]
        if degrees != sorted(set(degrees)):
            raise ValueError(f"bandwidths: degrees {quoted(degrees)} must ascend")

    # ---- bytes

    def free_bytes(self, world_size: int) -> float:
        """Return the bytes per rank besides its model states; negative where these are more."""
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
        slowest link and with the waits of `world_size` ranks, takes at least as long as any plan.
        lengths: tokens per sequence.
        """
        if not len(lengths):
            return
        longest = max(lengths)
        if longest > MAX_TOKENS:
            raise ValueError(f"a sequence of {longest} tokens: it may have at most {MAX_TOKENS:,}")
        # Python's floats, and no arrays, for they become infinite in silence.
        tokens = float(sum(lengths))
        squares = 2 * longest * tokens  # at least the sum of squares
        if self.kernel is not None:
            squares += self.kernel.most_more(tokens, world_size * len(lengths))
        slowest = min(speed for _, speed in self.bandwidths)
        moved = 2 * self.all_to_all_bytes + 2 * (self.ring_bytes or 0.0)  # both ways of remapping
        waits_s = self.group_s + self.group_rank_s * world_size
        states_s = 2 * world_size * self.summary_bytes / slowest
        longest_s = (
            self.attention_s * squares
            + (self.linear_s + MOST_PASSES * self.pass_s) * tokens
            + moved * tokens / slowest
            + (self.micro_batch_s + waits_s + states_s) * len(lengths)
        )
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
        be counted, with the same limit as for sequences."""
        if self.tower is None:
            return
        seconds = sum(self.tower.image_ns(image) for image in images) / 1e9
        if seconds > MAX_STEP_S:
            raise ValueError(
                f"cost model {self.name!r}: its tower may take {seconds:.3g} s for {len(images)} "
                f"images of a step, at most {MAX_STEP_S:.0e} s can be counted: check its "
                "constants and the patches"
            )

    def experts_text(self, world_size: int, *, before: str = "") -> str:
        """Return the distribution of experts over ranks, in words; "" if every rank computes its
        own tokens. before: a prefix."""
        return "" if self.experts is None else f"{before}{self.experts.text(world_size)}"

    # ---- JSON

    @classmethod
    def from_record(cls, record: Any) -> Self:
        """Inverse of `to_record`. Raises ValueError, naming the key, for any other record."""
        if isinstance(record, dict) and EARLIER in record:
            raise ValueError(
                "the cost model of an earlier version of hf_flexseq, whose numbers mean something "
                "else: leave it out, and cost_model='auto' fits one while the run goes on"
            )
        return super(CostConstants, cls).from_record(record)

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
