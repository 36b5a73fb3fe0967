"""Seconds and bytes of sequences on groups of ranks: the one model every decision is scored by.

A sequence of s tokens on a group of d ranks takes, with a1, a2 and b1 measured and v_d the group's
bandwidth,

    local     a1 s^2 + a2 s
    ulysses   max(a1 s^2 stretch / d, h t) + (1 - h) t + a2 s / d, with t = all-to-all bytes s / (d
              v_d)
    zigzag    max(a1 s^2 / d, ring bytes s (d - 1) / (d v_d)) + a2 s / d
    balanced  the same with a1 s^2 (d + 1) / d^2 at even d, and the bytes of `ring_traffic`
    allgather a1 s^2 / d + the bytes of `ring_traffic` s / (d v_d) + a2 s / d
    hybrid    Ulysses' transfers inside a node + max(a1 s^2 stretch, ring bytes s (nodes - 1) /
              v_d) / d + a2 s / d

* A group takes the sum over its sequences and, of two ranks and more, `group_s`: what its
  transfers wait for whatever they move. A rank takes the sum over its groups, a micro-batch in
  lockstep the maximum over ranks plus b1. Ranks in free synchronisation meet only inside groups:
  see `free_ns`.
* `stretch` is ceil(H/d) d / H: the rank with the most of H query heads sets Ulysses' pace, and
  ranks beyond H idle.
* Ring transfers run beside the attention they feed (LightSeq, arXiv 2310.03294, section 3.2), so
  the longer counts; an all-gather ends before its attention begins. Ulysses' heads come and go in
  pieces, of which all but one travel while others are computed: the share h.
* A rank holds token_bytes x tokens + state_bytes + sharded_state_bytes / ranks, at most
  budget_bytes.

The formula is FlexSP's (arXiv 2412.01523, equations 11 to 14), with heads, rings, latency and
unsharded states added. Rejected: the factor (d - 1)/d on all-to-all bytes, which the published
constants were fitted without. All decisions use whole nanoseconds, so that sums do not depend on
their order or on the machine.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.remap import moved_tokens, transport
from hf_flexseq.topology import Topology

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

RING_STRATEGIES = ("zigzag", "balanced", "allgather")
HEAD_PIECES = 4  # the most that a rank's heads come in under Ulysses; two have most of the gain
# What a piece must have to be worth a kernel call of its own, in query heads x tokens: on the CPU
# of a sequence, where each is a call; on CUDA of all of them, to fill the device.
PIECE_ROWS = {"cpu": 1 << 9, "cuda": 1 << 15}
# groups of so few ranks that nevertheless span nodes pay the next wider group's bandwidth
WIDEST_WITHIN_A_NODE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Measured or estimated constants of one model on one machine.

    name: a label. attention_s: seconds per squared token (a1). linear_s: seconds per token (a2).
    micro_batch_s: seconds per micro-batch, whatever is in it (b1). group_s: seconds per group of
    two ranks and more, whatever is in it: the latency of its transfers, all layers.
    all_to_all_bytes, ring_bytes: bytes per token that Ulysses and a ring move, forward and
    backward, all layers. ring_bytes None: not known, so no ring and no all-gather can be planned.
    query_bytes: bytes of a token's queries on one trip, all layers. ring_overlap: share of a
    ring's transfers that can travel while attention computes: 1 where they need none of the
    processor's time, 0 where they take it. all_to_all_overlap: the same of Ulysses', but for their
    first piece. piece_rows: see `PIECE_ROWS`; here of a sequence, though on CUDA packed ones fill
    a piece together. bandwidths: (degree, bytes/s) pairs, ascending. heads: query heads; None: any
    degree divides them. nics_per_node: links to other nodes that the ranks of a node send over,
    each over one of them. transfer_s: seconds that a transfer between two ranks takes beside its
    bytes. token_bytes: activation bytes per token. state_bytes: bytes of model state that every
    rank holds. sharded_state_bytes: bytes of model state that all ranks hold together.
    budget_bytes: memory of one rank.
    """

    name: str
    attention_s: float
    linear_s: float
    micro_batch_s: float
    group_s: float
    all_to_all_bytes: float
    ring_bytes: float | None
    query_bytes: float
    ring_overlap: float
    bandwidths: tuple[tuple[int, float], ...]
    heads: int | None
    token_bytes: float
    state_bytes: float
    sharded_state_bytes: float
    budget_bytes: float
    nics_per_node: int = 1
    transfer_s: float = 0.0
    all_to_all_overlap: float = 0.0
    piece_rows: float = PIECE_ROWS["cuda"]

    def __post_init__(self) -> None:
        for name in ("linear_s", "token_bytes", "budget_bytes", "piece_rows"):
            _require(getattr(self, name) > 0, f"{name}={getattr(self, name)}: must be positive")
        for name in (
            "attention_s",
            "micro_batch_s",
            "group_s",
            "all_to_all_bytes",
            "query_bytes",
            "state_bytes",
            "sharded_state_bytes",
            "transfer_s",
        ):
            _require(
                getattr(self, name) >= 0, f"{name}={getattr(self, name)}: must not be negative"
            )
        _require(
            self.ring_bytes is None or self.ring_bytes >= 0,
            f"ring_bytes={self.ring_bytes}: must not be negative",
        )
        for name in ("ring_overlap", "all_to_all_overlap"):
            _require(
                0 <= getattr(self, name) <= 1,
                f"{name}={getattr(self, name)}: must be between 0 and 1",
            )
        _require(
            self.heads is None or self.heads >= 1,
            f"heads={self.heads}: must be at least 1, or null",
        )
        _require(
            self.nics_per_node >= 1, f"nics_per_node={self.nics_per_node}: must be at least 1"
        )
        degrees = [degree for degree, _ in self.bandwidths]
        _require(bool(degrees), "bandwidths: give at least one (degree, bytes/s) pair")
        _require(
            degrees == sorted(set(degrees)) and degrees[0] >= 1,
            f"bandwidths: degrees {degrees} must ascend from 1",
        )
        _require(all(v > 0 for _, v in self.bandwidths), "bandwidths: bytes/s must be positive")

    # ---- seconds

    def bandwidth(self, degree: int, spans_nodes: bool) -> float:
        """Bytes/s of a group: as measured, or the next power of two's (the widest measured one
        beyond the table)."""
        wanted = (
            2 * WIDEST_WITHIN_A_NODE if spans_nodes and degree <= WIDEST_WITHIN_A_NODE else degree
        )
        measured = dict(self.bandwidths)
        if wanted in measured:
            return measured[wanted]
        power_of_two = 1 << (wanted - 1).bit_length()
        return next(
            (speed for d, speed in self.bandwidths if d >= power_of_two), self.bandwidths[-1][1]
        )

    def head_stretch(self, degree: int) -> float:
        """How much longer Ulysses' attention takes than an even split of the heads over `degree`
        ranks would."""
        return 1.0 if self.heads is None else -(-self.heads // degree) * degree / self.heads

    def hidden_share(self, s: FloatArray, degree: int, strategy: str) -> FloatArray:
        """Share of the all-to-alls of sequences of `s` tokens that can travel while attention
        computes. A hybrid has all heads in one piece."""
        if strategy != "ulysses":
            return np.zeros_like(s)
        heads_per_rank = HEAD_PIECES if self.heads is None else max(1, self.heads // degree)
        pieces = np.clip(
            s * heads_per_rank // self.piece_rows, 1, min(HEAD_PIECES, heads_per_rank)
        )
        return self.all_to_all_overlap * (1 - 1 / pieces)

    def sequences_ns(
        self, lengths: Int64Array, degree: int, strategy: str, spans_nodes: bool
    ) -> Int64Array:
        """Nanoseconds of each of `lengths` on its own on a group of `degree` ranks."""
        s = lengths.astype(np.float64)
        attention = self.attention_s * s * s / degree
        linear = self.linear_s * s / degree
        if strategy == "local":
            seconds = attention + linear
        elif strategy == "ulysses" or (strategy == "hybrid" and not spans_nodes):
            moved = self.all_to_all_bytes * s / degree / self.bandwidth(degree, spans_nodes)
            hidden = self.hidden_share(s, degree, strategy) * moved
            seconds = (
                np.maximum(attention * self.head_stretch(degree), hidden)
                + linear
                + (moved - hidden)
            )
        elif strategy == "hybrid":
            seconds = linear + self._hybrid_s(s, attention, degree)
        elif strategy in RING_STRATEGIES:
            moved = (
                self.ring_traffic(degree, strategy)
                * s
                / degree
                / self.bandwidth(degree, spans_nodes)
            )
            hidden = 0 * moved if strategy == "allgather" else self.ring_overlap * moved
            stretch = ring_stretch(degree, strategy)
            seconds = np.maximum(attention * stretch, hidden) + (moved - hidden) + linear
        else:
            raise ValueError(f"strategy {strategy!r} has no cost formula")
        return np.maximum(1, np.floor(seconds * 1e9 + 0.5)).astype(np.int64)  # work is never free

    def _hybrid_s(self, s: FloatArray, attention: FloatArray, degree: int) -> FloatArray:
        """Seconds of attention and its transfers where Ulysses runs inside nodes and a ring across
        them."""
        nodes = nodes_spanned(degree)
        width = degree // nodes
        inside = self.all_to_all_bytes * s / degree / self.bandwidth(width, False)
        across = 3 * self.trip_bytes()[0] * (nodes - 1) * s / degree / self.bandwidth(degree, True)
        hidden = self.ring_overlap * across
        return (
            inside + np.maximum(attention * self.head_stretch(width), hidden) + (across - hidden)
        )

    def sequence_ns(self, length: int, degree: int, strategy: str, spans_nodes: bool) -> int:
        """Nanoseconds of one sequence of `length` tokens on a group of `degree` ranks."""
        return int(self.sequences_ns(np.array([length]), degree, strategy, spans_nodes)[0])

    @property
    def micro_batch_ns(self) -> int:
        """Nanoseconds every micro-batch costs, whatever is in it."""
        return int(self.micro_batch_s * 1e9 + 0.5)

    def latency_ns(self, degree: int) -> int:
        """Nanoseconds a group of `degree` ranks costs beside its sequences."""
        return int(self.group_s * 1e9 + 0.5) if degree > 1 else 0

    def strategies(self, strategy: str) -> tuple[str, ...]:
        """The strategies that groups of two ranks and more may use when the user asks for
        `strategy`."""
        if strategy == "auto":
            # Not allgather: by this model zigzag moves fewer bytes for the same work. Not hybrid:
            # see nodes_spanned.
            return ("ulysses",) if self.ring_bytes is None else ("ulysses", "zigzag", "balanced")
        if strategy in (*RING_STRATEGIES, "hybrid"):
            self.trip_bytes()  # raises for a model that does not know them
        return () if strategy == "local" else (strategy,)

    def ring_traffic(self, degree: int, strategy: str) -> float:
        """Bytes that the busiest rank sends or receives for each token it holds, forward and
        backward, all layers."""
        keys, queries = self.trip_bytes()
        if strategy == "zigzag":
            return 3 * keys * (degree - 1)
        if strategy == "allgather":
            # gradients of keys and values travel summed, in float32
            return 4 * keys * (degree - 1)
        # forward: result back; backward: queries, their gradients and results there
        helps = (degree - 1) // 2
        return 2 * keys * (degree // 2) + 4 * queries * helps

    def trip_bytes(self) -> tuple[float, float]:
        """Bytes of a token's keys and values, and of its queries, on one trip, all layers. Keys
        and values make three trips in a ring."""
        if self.ring_bytes is None:
            raise ValueError(
                f"cost model {self.name!r} has no ring_bytes, so rings and all-gathers have no "
                f"cost: use ulysses or "
                "auto"
            )
        return self.ring_bytes / 3, self.query_bytes

    # ---- bytes

    def max_tokens_per_rank(self, world_size: int) -> int:
        """The most tokens a rank can hold in one micro-batch beside its model states."""
        states = self.state_bytes + self.sharded_state_bytes / world_size
        tokens = int((self.budget_bytes - states) // self.token_bytes)
        if tokens < 1:
            raise ValueError(
                f"cost model {self.name!r}: model states take {states / 2**30:.1f} of "
                f"{self.budget_bytes / 2**30:.1f} "
                f"GiB on {world_size} ranks, which leaves no room for a token: shard them (FSDP, "
                f"ZeRO-3), use more "
                "ranks, or set max_tokens_per_rank"
            )
        return tokens

    # ---- JSON

    def to_record(self) -> dict[str, Any]:
        """The model as plain JSON values."""
        whole = {
            name: getattr(self, name) for name in ("name", "heads", "ring_bytes", "nics_per_node")
        }
        return (
            {
                name: float(value)
                for name, value in asdict(self).items()
                if name not in (*whole, "bandwidths")
            }
            | whole
            | {"bandwidths": [[degree, float(speed)] for degree, speed in self.bandwidths]}
        )

    @classmethod
    def from_record(cls, record: Any) -> "CostModel":
        """The inverse of `to_record`. Raises ValueError, naming the key, for anything that is no
        cost model."""
        _require(
            isinstance(record, dict), f"a cost model is a JSON object, got {type(record).__name__}"
        )
        known = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.default is MISSING}
        _require(set(record) <= known, f"unknown keys {sorted(set(record) - known)}")
        _require(needed <= set(record), f"missing keys {sorted(needed - set(record))}")
        for name in set(record) - {"name", "bandwidths"}:
            optional = name in ("ring_bytes", "heads") and record[name] is None
            _require(
                optional or _is_number(record[name]),
                f"{name}={record[name]!r}: must be a finite number",
            )
        _require(isinstance(record["name"], str), f"name={record['name']!r}: must be a string")
        _require(
            record["heads"] is None or isinstance(record["heads"], int),
            f"heads={record['heads']!r}: not an integer",
        )
        nics = record.get("nics_per_node", 1)
        _require(isinstance(nics, int), f"nics_per_node={nics!r}: not an integer")
        return cls(**record | {"bandwidths": _bandwidths(record["bandwidths"])})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_record(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "CostModel":
        """The model that `save` wrote. Raises ValueError naming the file and what is wrong with
        it."""
        try:
            return cls.from_record(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(f"cost model file {path}: {error}") from error

    def digest(self) -> str:
        """Hex digest of every constant: part of a plan's input."""
        record = json.dumps(self.to_record(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(record.encode()).hexdigest()[:16]


def ring_stretch(degree: int, strategy: str) -> float:
    """How much longer the attention of a ring strategy takes than an even split would: see
    `schedule/attention.py`."""
    return (degree + 1) / degree if strategy == "balanced" and degree % 2 == 0 else 1.0


def nodes_spanned(degree: int) -> int:
    """Nodes of a group that spans several, as far as a cost model can know: the fewest of eight
    ranks, as in the machines that its bandwidths describe. Smaller nodes make a hybrid's ring
    longer than it is priced."""
    return next(
        n for n in range(max(2, -(-degree // WIDEST_WITHIN_A_NODE)), degree + 1) if degree % n == 0
    )


def group_ns(cost: CostModel, group: Group, lengths: Sequence[int], topology: Topology) -> int:
    """Nanoseconds of a group: the sum over its sequences, and its latency."""
    return int(groups_ns(cost, (group,), lengths, topology)[0])


def groups_ns(
    cost: CostModel, groups: Sequence[Group], lengths: Sequence[int], topology: Topology
) -> Int64Array:
    """[groups] The nanoseconds of each, computed for all groups of a kind at once."""
    kinds: dict[tuple[int, str, bool], list[int]] = {}
    for place, group in enumerate(groups):
        kind = group.degree, group.strategy, topology.spans_nodes(group.start, group.stop)
        kinds.setdefault(kind, []).append(place)
    nanoseconds = np.zeros(len(groups), dtype=np.int64)
    for (degree, strategy, spans), places in kinds.items():
        members = np.array(
            [lengths[i] for place in places for i in groups[place].sequences], dtype=np.int64
        )
        counts = np.array([len(groups[place].sequences) for place in places])
        each = cost.sequences_ns(members, degree, strategy, spans)
        nanoseconds[places] = np.add.reduceat(each, counts.cumsum() - counts) + cost.latency_ns(
            degree
        )
    return nanoseconds


def linear_ns(cost: CostModel, group: Group, lengths: Sequence[int]) -> int:
    """Nanoseconds of a group that are linear layers."""
    return round(cost.linear_s * group.tokens(lengths) / group.degree * 1e9)


def rank_ns(
    cost: CostModel, groups: Sequence[Group], lengths: Sequence[int], topology: Topology
) -> tuple[int, ...]:
    """Nanoseconds each rank works in a micro-batch of `groups`, without the constant of the
    micro-batch."""
    busy = np.zeros(topology.world_size, dtype=np.int64)
    for group, nanoseconds in zip(
        groups, groups_ns(cost, groups, lengths, topology).tolist(), strict=True
    ):
        busy[group.start : group.stop] += nanoseconds
    return tuple(busy.tolist())


def lockstep_ns(
    cost: CostModel,
    micro_batches: Iterable[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
) -> tuple[int, ...]:
    """Nanoseconds of each micro-batch when all ranks run it together: its slowest rank plus the
    constant."""
    return tuple(
        slowest_ns(cost, micro_batch, lengths, topology) + cost.micro_batch_ns
        for micro_batch in micro_batches
    )


def slowest_ns(
    cost: CostModel, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> int:
    """Nanoseconds of a micro-batch's slowest rank, without the constant."""
    if micro_batch.remap:
        return sum(remapped_ns(cost, micro_batch, lengths, topology))
    return max(rank_ns(cost, micro_batch.groups, lengths, topology))


def remapped_ns(
    cost: CostModel, micro_batch: MicroBatch, lengths: Sequence[int], topology: Topology
) -> tuple[int, int, int]:
    """Nanoseconds of a remapped micro-batch: the slowest rank's attention, linear layers on evenly
    spread tokens, and bringing tokens to their groups and back, which moves of each what an
    all-to-all does."""
    tokens = micro_batch.tokens_per_rank(lengths, topology.world_size)
    attention = np.array(rank_ns(cost, micro_batch.groups, lengths, topology))
    for group in micro_batch.groups:
        attention[group.start : group.stop] -= linear_ns(cost, group, lengths)
    inside, across = moved_tokens(transport(tokens, topology), topology)
    moved_s = inside / cost.bandwidth(topology.ranks_per_node, False)
    if across:
        moved_s += across / cost.bandwidth(topology.world_size, True)
    return (
        max(0, int(attention.max())),
        round(cost.linear_s * -(-sum(tokens) // topology.world_size) * 1e9),
        round(cost.all_to_all_bytes * moved_s * 1e9),
    )


def free_ns(
    cost: CostModel,
    micro_batches: Iterable[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
) -> tuple[int, ...]:
    """Each rank's clock, in nanoseconds, at the end of a step whose ranks meet only inside groups.

    Micro-batch by micro-batch and widest first, a group starts when the last of its ranks is free.
    A rank pays the constant once for every micro-batch it works in, before its first group there.
    In a remapped one all ranks meet.
    """
    clock = np.zeros(topology.world_size, dtype=np.int64)
    for micro_batch in micro_batches:
        if micro_batch.remap:
            clock[:] = (
                clock.max()
                + cost.micro_batch_ns
                + slowest_ns(cost, micro_batch, lengths, topology)
            )
            continue
        works = np.zeros(topology.world_size, dtype=bool)
        for group in micro_batch.groups:
            works[group.start : group.stop] = True
        clock[works] += cost.micro_batch_ns
        works_ns = groups_ns(cost, micro_batch.groups, lengths, topology).tolist()
        for group, nanoseconds in zip(micro_batch.groups, works_ns, strict=True):
            ranks = slice(group.start, group.stop)
            clock[ranks] = clock[ranks].max() + nanoseconds
    return tuple(clock.tolist())


def step_ns(
    cost: CostModel,
    micro_batches: Iterable[MicroBatch],
    lengths: Sequence[int],
    topology: Topology,
    *,
    sync: str,
) -> int:
    """Nanoseconds of an optimizer step under `sync`, `lockstep` or `free`. A step without
    micro-batches takes none."""
    if sync == "free":
        return max(free_ns(cost, micro_batches, lengths, topology))
    return sum(lockstep_ns(cost, micro_batches, lengths, topology))


def _bandwidths(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in value
    )
    _require(pairs, f"bandwidths={value!r}: must be a list of [degree, bytes/s] pairs")
    _require(
        all(isinstance(degree, int) and _is_number(speed) for degree, speed in value),
        f"bandwidths={value!r}: degrees must be integers, speeds finite numbers",
    )
    return tuple((degree, speed) for degree, speed in value)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < float("inf")
    )


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
