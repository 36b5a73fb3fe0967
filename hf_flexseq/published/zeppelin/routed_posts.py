"""The posts between nodes that are routed, and their paths: decided by all ranks alike.

`routing.py` finds the paths of a post's transfers. Here each path is cut into packets, and each
packet into the pieces of its legs. `routes.py` rewrites the programs accordingly.
"""

import functools
import math
from collections import Counter, defaultdict
from typing import NamedTuple

from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import contiguous_parts, make_shard
from hf_flexseq.program.compile import FORWARD, compile_program, parts_of
from hf_flexseq.program.instructions import LayerShape, PostSpec, Program, Value
from hf_flexseq.program.tags import EXCHANGE_TAGS, PASS_MESSAGES, ZONE_TAGS
from hf_flexseq.program.zones import Machine
from hf_flexseq.published.zeppelin.routing import STRAIGHT, NicFigures, Transfer, make_routing

LEGS = SCATTER, CROSS, GATHER = range(3)

# Tags of the legs of one post. Posts that are under way together have different first exchanges,
# modulo `POSTS`: a ring has at most ten exchanges of consecutive numbers under way.
POSTS = 16
POST_TAGS = (ZONE_TAGS - PASS_MESSAGES) // POSTS

Exchanges = frozenset[int]  # numbers of the exchanges in one post


class LegRows(NamedTuple):
    """Rows of a value on one leg."""

    leg: int
    packet: int
    source: int
    target: int
    transfer: int
    """Index of the transfer among those that are routed."""
    path: int
    """Index of the path."""
    value: int
    """Index of the value among the transfer's."""
    start: int
    """First row, counted in the value."""
    stop: int
    tag: int
    """Number of the piece among those between the two ranks."""


class RoutedPost(NamedTuple):
    """Paths of a post's messages, the same on all ranks."""

    pairs: tuple[tuple[int, int], ...]
    """(source, target) of the transfers that are routed."""
    values: tuple[tuple[Value, ...], ...]
    """By transfer, its values on the rank that sends them."""
    rows: dict[tuple[int, int, int], range]
    """By transfer, path and value, the rows that take the path."""
    relays: dict[tuple[int, int], tuple[int, int]]
    """By transfer and path, the exit rank and the entry rank."""
    pieces: tuple[LegRows, ...]
    packets: int


def exchanges_of(spec: PostSpec) -> tuple[int, Exchanges]:
    """Return the zone of a post, and the numbers of its exchanges there."""
    tags = [message.tag for message in (*spec.sends, *spec.recvs)]
    zone = tags[0] // ZONE_TAGS
    return zone, frozenset(tag % ZONE_TAGS // EXCHANGE_TAGS for tag in tags)


@functools.lru_cache(maxsize=64)
def routed_posts(
    group: Group,
    lengths: tuple[int, ...],
    machine: Machine,
    what: str,
    shape: LayerShape,
    links: NicFigures,
) -> dict[Exchanges, RoutedPost]:
    """Return the posts of a group that are routed, by their exchanges.

    lengths: tokens of the group's sequences. what, shape: of the programs.
    """
    # 1. who sends what to whom, in which post
    sent: dict[Exchanges, dict[tuple[int, int], list[tuple[int, Value]]]]
    sent = defaultdict(lambda: defaultdict(list))
    ranks: dict[Exchanges, set[int]] = defaultdict(set)
    posts_of: dict[int, set[Exchanges]] = defaultdict(set)  # by exchange
    for rank in group.ranks:
        program = _lone_program(group, lengths, machine, what, shape, rank=rank)
        for one in program.instructions:
            if one.operation != "post":
                continue
            _, spec, _ = one.constants
            _, exchanges = exchanges_of(spec)
            ranks[exchanges].add(rank)
            for exchange in exchanges:
                posts_of[exchange].add(exchanges)
            for message in spec.sends:
                value = program.all_values[message.value]
                sent[exchanges][rank, message.peer].append((message.tag, value))
    # 2. the routing of each post
    routed = {}
    for exchanges, transfers in sent.items():
        alike = all(posts_of[exchange] == {exchanges} for exchange in exchanges)
        if not alike:
            continue
        values = {}
        for pair, tagged in transfers.items():
            values[pair] = tuple(value for _, value in sorted(tagged))
        post = _routed_post(values, links, frozenset(ranks[exchanges]), shape)
        if post is not None:
            routed[exchanges] = post
    return routed


def _lone_program(
    group: Group,
    lengths: tuple[int, ...],
    machine: Machine,
    what: str,
    shape: LayerShape,
    *,
    rank: int,
) -> Program:
    """Return the program of a rank of a group that works in no other group."""
    alone = Group(ranks=group.ranks, sequences=tuple(range(len(lengths))), strategy=group.strategy)
    shard = make_shard(MicroBatch(groups=(alone,)), lengths, rank)
    parts = parts_of(shard, machine)
    forward = compile_program(parts, FORWARD, shape)
    return forward if what == FORWARD else compile_program(parts, what, shape, forward)


def _routed_post(
    values: dict[tuple[int, int], tuple[Value, ...]],
    links: NicFigures,
    ranks: frozenset[int],
    shape: LayerShape,
) -> RoutedPost | None:
    """Return how a post is routed; None if all of it goes straight.

    values: by (source, target), the values that are sent. ranks: those that take part.
    """
    transfers = []
    for (source, target), of_pair in sorted(values.items()):
        nbytes = sum(_nbytes(value, shape) for value in of_pair)
        transfers.append(Transfer(source, target, nbytes))
    routing = make_routing(tuple(transfers), links, ranks)
    if routing == STRAIGHT:
        return None
    rows: dict[tuple[int, int, int], range] = {}
    relays = {}
    pieces = []
    counts: Counter[tuple[int, int]] = Counter()  # pieces so far between two ranks
    for number, (transfer, paths) in enumerate(routing.paths):
        for path_number, path in enumerate(paths):
            relays[number, path_number] = (path.exit_rank, path.entry_rank)
            stops = (transfer.source, path.exit_rank, path.entry_rank, transfer.target)
            for index, value in enumerate(values[transfer.source, transfer.target]):
                start = value.rows * path.start // transfer.nbytes
                stop = value.rows * path.stop // transfer.nbytes
                rows[number, path_number, index] = range(start, stop)
                parts = contiguous_parts(stop - start, routing.packets)
                for packet, part in enumerate(parts):
                    for leg in LEGS:
                        source, target = stops[leg], stops[leg + 1]
                        if source == target or not part:
                            continue
                        piece = LegRows(
                            leg=leg,
                            packet=packet,
                            source=source,
                            target=target,
                            transfer=number,
                            path=path_number,
                            value=index,
                            start=start + part.start,
                            stop=start + part.stop,
                            tag=counts[source, target],
                        )
                        counts[source, target] += 1
                        pieces.append(piece)
    assert max(counts.values()) <= POST_TAGS, f"{max(counts.values())} pieces between two ranks"
    pairs = tuple((transfer.source, transfer.target) for transfer, _ in routing.paths)
    return RoutedPost(
        pairs=pairs,
        values=tuple(values[pair] for pair in pairs),
        rows=rows,
        relays=relays,
        pieces=tuple(pieces),
        packets=routing.packets,
    )


def _nbytes(value: Value, shape: LayerShape) -> int:
    return math.prod(value.shape) * shape.item_bytes(value.dtype)
