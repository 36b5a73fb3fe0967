"""The pass that sends transfers between nodes over several NICs: it rewrites the posts of a
finished program.

`routing.py` decides which transfers of a post take which *paths*. The rows of such a transfer are
cut into the parts of its paths, every part into packets, and each packet travels over three legs:

    source --scatter--> exit rank --cross--> entry rank --gather--> target

    post    1. post what goes straight
            2. scatter all packets
            3. when a packet has come to its exit rank: send it across
    wait    4. when a packet has come to its entry rank: gather it
            5. wait for all packets at the target, and for what went straight

What is slow, the way between nodes, is under way from the post to its wait, beside whatever is
computed meanwhile. Ranks that only pass packets on take part at the same two points.

All ranks must decide alike, so each of them compiles the programs of all ranks of a group that
spans nodes: their messages say who sends how much to whom. A post is routed only if all ranks that
take part in it have the same exchanges in it, and none but these ranks pass anything on: so every
rank has a post in the place where its legs belong.

Nothing can hang: each leg of each packet is one post, and all ranks post these in one order, first
the scatter of every packet, then cross, then gather. A rank waits only for posts whose other ends
are posted already, or will be without waiting for a later one.

Compiling for all ranks takes time that grows with the square of their number. A micro-batch with a
ring over 16 ranks takes 0.1 s of a processor, and one over 64 ranks 1.8 s.

Rejected: a thread that passes packets on, which would post in an order of its own. Rejected: the
transfers of a ring by formulas, which finds them faster on hundreds of ranks and has to know the
ring.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import Shard, contiguous_part, make_shard
from hf_flexseq.program.builder import Rewriter
from hf_flexseq.program.compile import FORWARD, Machine, MicroBatchLayout, compile_program
from hf_flexseq.program.exchange import Channel, Label
from hf_flexseq.program.instructions import (
    Instruction,
    LayerShape,
    MessageSpec,
    PostSpec,
    Program,
    RowShape,
    Value,
)
from hf_flexseq.program.tags import EXCHANGE_TAGS, PASS_MESSAGES, ZONE_TAGS
from hf_flexseq.published.zeppelin.routing import STRAIGHT, NicFigures, Transfer, make_routing

ROUTED = ("zigzag",)  # strategies of groups whose posts are routed
LEGS = SCATTER, CROSS, GATHER = range(3)

# Tags of the legs of one post. Posts that are under way together have different first exchanges,
# modulo `POSTS`: a ring has at most ten exchanges of consecutive numbers under way.
POSTS = 16
POST_TAGS = (ZONE_TAGS - PASS_MESSAGES) // POSTS

Exchanges = frozenset[int]  # numbers of the exchanges in one post


class Piece(NamedTuple):
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
    """Index of the value among those of the transfer."""
    start: int
    """First row, counted in the value."""
    stop: int
    tag: int
    """Number of the piece among those between the two ranks."""


class PathRows(NamedTuple):
    """Rows [start, stop) of one value that take a path."""

    start: int
    stop: int


class RoutedPost(NamedTuple):
    """How the messages of a post travel, the same on all ranks."""

    pairs: tuple[tuple[int, int], ...]
    """(source, target) of the transfers that are routed."""
    values: tuple[tuple[Value, ...], ...]
    """By transfer, its values on the rank that sends them."""
    rows: dict[tuple[int, int, int], PathRows]
    """By transfer, path and value."""
    relays: dict[tuple[int, int], tuple[int, int]]
    """By transfer and path, the exit rank and the entry rank."""
    pieces: tuple[Piece, ...]
    packets: int


class RoutePass:
    """Routes the programs of one rank in one micro-batch."""

    def __init__(self, shard: Shard, machine: Machine, links: NicFigures) -> None:
        self._shard = shard
        self._machine = machine
        self._links = links

    def __call__(self, program: Program, what: str, shape: LayerShape | RowShape) -> Program:
        """Return a program whose posts between nodes are routed if that is faster."""
        if isinstance(shape, RowShape) or not shape.reach.is_full:
            return program
        routed: dict[int, tuple[Channel, Exchanges, RoutedPost]] = {}  # by post
        for one in program.instructions:
            if one.operation != "post":
                continue
            number, spec, _ = one.constants
            zone, exchanges = _exchanges_of(spec)
            found = self._routed_posts(zone, what, shape).get(exchanges)
            if found is not None:
                channel = Channel(self._shard.zones[zone].group, zone)
                routed[number] = (channel, exchanges, found)
        if not routed:
            return program
        return _Rewriting(program, shape, self._shard.rank, routed).run()

    def _routed_posts(
        self, zone: int, what: str, shape: LayerShape
    ) -> dict[Exchanges, RoutedPost]:
        """Return the posts of a zone that are routed."""
        group = self._shard.zones[zone].group
        if group.strategy not in ROUTED:
            return {}
        if not self._machine.topology.spans_nodes(group.start, group.stop):
            return {}
        lengths = self._shard.zones[zone].lengths
        return routed_posts(group, lengths, self._machine, what, shape, self._links)


def _exchanges_of(spec: PostSpec) -> tuple[int, Exchanges]:
    """Return the zone of a post, and the numbers of its exchanges there."""
    tags = [message.tag for message in (*spec.sends, *spec.recvs)]
    zone = tags[0] // ZONE_TAGS
    return zone, frozenset(tag % ZONE_TAGS // EXCHANGE_TAGS for tag in tags)


# ---- what all ranks decide alike


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
    fixed: set[Exchanges] = set()  # posts that receive into values that are there already
    for rank in group.ranks:
        program = _lone_program(group, lengths, machine, what, shape, rank=rank)
        for one in program.instructions:
            if one.operation != "post":
                continue
            _, spec, _ = one.constants
            _, exchanges = _exchanges_of(spec)
            ranks[exchanges].add(rank)
            for exchange in exchanges:
                posts_of[exchange].add(exchanges)
            for message in spec.sends:
                value = program.all_values[message.value]
                sent[exchanges][rank, message.peer].append((message.tag, value))
            if any(message.value not in one.outs for message in spec.recvs):
                fixed.add(exchanges)
    # 2. the routing of each post
    routed = {}
    for exchanges, transfers in sent.items():
        alike = all(posts_of[exchange] == {exchanges} for exchange in exchanges)
        if not alike or exchanges in fixed:
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
    parts = MicroBatchLayout(shard, machine).parts
    forward = compile_program(parts, FORWARD, shape)
    return forward if what == FORWARD else compile_program(parts, what, shape, forward)


def _routed_post(
    values: dict[tuple[int, int], tuple[Value, ...]],
    links: NicFigures,
    ranks: frozenset[int],
    shape: LayerShape,
) -> RoutedPost | None:
    """Return how a post is routed; None if all of it goes straight.

    values: by (source, target), what is sent. ranks: those that take part.
    """
    transfers = []
    for (source, target), of_pair in sorted(values.items()):
        nbytes = sum(_nbytes(value, shape) for value in of_pair)
        transfers.append(Transfer(source, target, nbytes))
    routing = make_routing(tuple(transfers), links, ranks)
    if routing == STRAIGHT:
        return None
    rows: dict[tuple[int, int, int], PathRows] = {}
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
                rows[number, path_number, index] = PathRows(start, stop)
                for packet in range(routing.packets):
                    first, last = contiguous_part(stop - start, packet, routing.packets)
                    for leg in LEGS:
                        source, target = stops[leg], stops[leg + 1]
                        if source == target or first == last:
                            continue
                        piece = Piece(
                            leg=leg,
                            packet=packet,
                            source=source,
                            target=target,
                            transfer=number,
                            path=path_number,
                            value=index,
                            start=start + first,
                            stop=start + last,
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
    elements = 1
    for size in value.shape:
        elements *= size
    return elements * shape.item_bytes(value.dtype)


# ---- what one rank does


class _Legs:
    """The legs of one post on this rank."""

    def __init__(
        self, b: Rewriter, rank: int, channel: Channel, exchanges: Exchanges, post: RoutedPost
    ) -> None:
        self._builder = b
        self._rank = rank
        self._channel = channel
        self._post = post
        self._first_tag = channel.tag(PASS_MESSAGES + min(exchanges) % POSTS * POST_TAGS)
        # by transfer: the values on their source and their target, in the order of the tags
        self.ends: dict[int, list[Value]] = {}
        # by transfer, path and value: the rows that this rank passes on
        self._passed: dict[tuple[int, int, int], Value] = {}
        self._crossing: list[int | None] = []  # posts, by packet

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of the transfers that are routed."""
        return self._post.pairs

    def begin(self) -> None:
        """Scatter all packets, and send each across when it has come."""
        for (transfer, path, index), rows in self._post.rows.items():
            if transfer not in self.ends and self._rank in self._post.relays[transfer, path]:
                like = self._post.values[transfer][index]
                shape = (rows.stop - rows.start, *like.shape[1:])
                self._passed[transfer, path, index] = self._builder.empty(shape, like.dtype)
        packets = range(self._post.packets)
        scattered = [self._post_leg(SCATTER, packet) for packet in packets]
        for packet in packets:
            self._wait(scattered[packet])
            self._crossing.append(self._post_leg(CROSS, packet))

    def end(self) -> None:
        """Gather each packet when it has come, and wait for all of them."""
        gathered = []
        for packet, crossing in enumerate(self._crossing):
            self._wait(crossing)
            gathered.append(self._post_leg(GATHER, packet))
        for number in gathered:
            self._wait(number)

    def _wait(self, number: int | None) -> None:
        if number is not None:
            self._builder.wait(number)

    def _post_leg(self, leg: int, packet: int) -> int | None:
        """Post one leg of one packet of every path; None without pieces of this rank."""
        sends = []
        recvs = []
        tensors = []
        label = Label(self._channel, self._describe)
        for piece in self._post.pieces:
            if (piece.leg, piece.packet) != (leg, packet):
                continue
            if self._rank not in (piece.source, piece.target):
                continue
            rows = self._rows(piece)
            tensors.append(rows)
            tag = self._first_tag + piece.tag
            if piece.source == self._rank:
                sends.append(MessageSpec(rows.number, piece.target, tag))
                label.peers.add((piece.target, True))
            else:
                recvs.append(MessageSpec(rows.number, piece.source, tag))
                label.peers.add((piece.source, False))
        if not tensors:
            return None
        spec = PostSpec(sends=tuple(sends), recvs=tuple(recvs), labels=(label,))
        return self._builder.post(spec, tensors, ())

    def _rows(self, piece: Piece) -> Value:
        """Return the rows of a piece on this rank, a view."""
        if piece.transfer in self.ends:
            value = self.ends[piece.transfer][piece.value]
            return self._builder.part(value, piece.start, piece.stop)
        key = (piece.transfer, piece.path, piece.value)
        before = self._post.rows[key].start
        return self._builder.part(self._passed[key], piece.start - before, piece.stop - before)

    def _describe(self, peer: int, sent: bool) -> str:
        """Return the name of the pieces between this rank and `peer`."""
        ends = (self._rank, peer) if sent else (peer, self._rank)
        transfers = {p.transfer for p in self._post.pieces if (p.source, p.target) == ends}
        pairs = [self._post.pairs[transfer] for transfer in sorted(transfers)]
        names = [f"rank {source} sends to rank {target}" for source, target in pairs]
        return f"pieces of what {', '.join(names)}"


class _Rewriting:
    """A program on its way to one with routed posts."""

    def __init__(
        self,
        program: Program,
        shape: LayerShape,
        rank: int,
        routed: dict[int, tuple[Channel, Exchanges, RoutedPost]],
    ) -> None:
        """routed: by post, its group, its exchanges, and how it is routed."""
        self._builder = Rewriter(program, shape, rank=rank)
        self._program = program
        self._rank = rank
        self._routed = routed
        # by post that was routed: its legs, and the post of what goes straight
        self._pending: dict[int, tuple[_Legs, int | None]] = {}

    def run(self) -> Program:
        """Return the rewritten program."""
        for one in self._program.instructions:
            if one.operation == "post" and one.constants[0] in self._routed:
                self._begin(one)
            elif one.operation == "wait" and one.constants[0] in self._pending:
                legs, straight = self._pending.pop(one.constants[0])
                legs.end()
                if straight is not None:
                    self._builder.wait(straight)
            else:
                self._builder.copy(one)
        return self._builder.program(self._program.outputs, self._program.saved)

    def _begin(self, one: Instruction) -> None:
        """Post what goes straight, and begin the legs of the rest."""
        b = self._builder
        number, spec, _ = one.constants
        channel, exchanges, post = self._routed[number]
        legs = _Legs(b, self._rank, channel, exchanges, post)
        sends = self._straight(spec.sends, legs, sent=True)
        recvs = self._straight(spec.recvs, legs, sent=False)
        straight = None
        if sends or recvs:
            rest = spec._replace(sends=tuple(sends), recvs=tuple(recvs))
            straight = b.post(rest, self._values(sends), self._values(recvs))
        legs.begin()
        self._pending[number] = (legs, straight)

    def _straight(
        self, messages: Sequence[MessageSpec], legs: _Legs, *, sent: bool
    ) -> list[MessageSpec]:
        """Return the messages that go straight; give the values of the others to the legs, those
        that are received without contents so far."""
        pairs = legs.pairs
        straight = []
        for message in sorted(messages, key=lambda one: one.tag):
            pair = (self._rank, message.peer) if sent else (message.peer, self._rank)
            if pair not in pairs:
                straight.append(message)
                continue
            value = self._program.all_values[message.value]
            if not sent:
                self._builder.make(value, "empty", (), value.shape, value.dtype)
            legs.ends.setdefault(pairs.index(pair), []).append(value)
        return straight

    def _values(self, messages: Sequence[MessageSpec]) -> list[Value]:
        return [self._program.all_values[message.value] for message in messages]
