"""The pass that sends transfers between nodes over several NICs: it rewrites the posts of a
finished program.

`routing.py` decides which transfers of a post take which *paths*. The rows of such a transfer are
cut into the parts of its paths, every part into packets, and each packet travels over three legs:

    source --scatter--> exit rank --cross--> entry rank --gather--> target

    post    1. post the transfers that go straight
            2. scatter all packets
            3. when a packet has come to its exit rank: send it across
    wait    4. when a packet has come to its entry rank: gather it
            5. wait for all packets at the target, and for the straight transfers

The slow part, the way between nodes, lasts from the post to its wait, beside all computation in
between. Ranks that only pass packets on take part at the same two points.

All ranks must decide alike, so each of them compiles the programs of all ranks of a group that
spans nodes: their messages say who sends how much to whom. A post is routed only if all ranks that
take part in it have the same exchanges in it, and none but these ranks pass anything on: so every
rank has a post in the place where its legs belong.

Nothing can hang: each leg of each packet is one post, and all ranks post these in one order, first
the scatter of every packet, then cross, then gather. A rank waits only for posts whose other ends
are posted already, or will be without waiting for a later one.

Compiling for all ranks takes time that grows with the square of their number. A micro-batch with a
ring over 16 ranks takes 0.1 s of a processor, and one over 64 ranks 1.8 s.

Rejected: a thread that passes packets on, which would post in its own order. Rejected: the
transfers of a ring by formulas, which finds them faster on hundreds of ranks and has to know the
ring.
"""

from collections.abc import Sequence

from hf_flexseq.plan.shard import Shard
from hf_flexseq.program.builder import Rewriter
from hf_flexseq.program.exchange import Channel, Label
from hf_flexseq.program.instructions import (
    LayerShape,
    MessageSpec,
    PostSpec,
    Program,
    RowShape,
    Value,
)
from hf_flexseq.program.tags import PASS_MESSAGES
from hf_flexseq.program.zones import Machine
from hf_flexseq.published.zeppelin.routed_posts import (
    CROSS,
    GATHER,
    POST_TAGS,
    POSTS,
    SCATTER,
    Exchanges,
    LegRows,
    RoutedPost,
    exchanges_of,
    routed_posts,
)
from hf_flexseq.published.zeppelin.routing import NicFigures

ROUTED = ("zigzag",)  # strategies of groups whose posts are routed


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
        b = Rewriter(program, shape, rank=self._shard.rank)
        legs: dict[int, _Legs] = {}  # by post that is routed
        for one in program.instructions:
            if one.operation == "post":
                number, spec, _ = one.constants
                zone, exchanges = exchanges_of(spec)
                post = self._routed_posts(zone, what, shape).get(exchanges)
                if post is not None:
                    channel = Channel(self._shard.zones[zone].group, zone)
                    legs[number] = _Legs(b, channel, exchanges, post)
                    legs[number].begin(spec, program.all_values)
                    continue
            if one.operation == "wait" and one.constants[0] in legs:
                legs[one.constants[0]].end()
                continue
            b.copy(one)
        return b.program(program.outputs, program.saved) if legs else program

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


class _Legs:
    """The legs of one post on this rank."""

    def __init__(
        self, b: Rewriter, channel: Channel, exchanges: Exchanges, post: RoutedPost
    ) -> None:
        self._builder = b
        self._rank = b.rank
        self._channel = channel
        self._post = post
        self._first_tag = channel.tag(PASS_MESSAGES + min(exchanges) % POSTS * POST_TAGS)
        # by transfer: the values on their source and their target, in the order of the tags
        self._ends: dict[int, list[Value]] = {}
        # by transfer, path and value: the rows that this rank passes on
        self._passed: dict[tuple[int, int, int], Value] = {}
        self._straight: int | None = None  # post of what goes straight
        self._crossing: list[int | None] = []  # posts, by packet

    def begin(self, spec: PostSpec, values: Sequence[Value]) -> None:
        """Post the transfers that go straight, scatter all packets of the others, and send each
        across when it has come. values: all values of the program, by number."""
        sends = self._take_routed(spec.sends, values, sent=True)
        recvs = self._take_routed(spec.recvs, values, sent=False)
        if sends or recvs:
            rest = spec._replace(sends=tuple(sends), recvs=tuple(recvs))
            sent = [values[message.value] for message in sends]
            received = [values[message.value] for message in recvs]
            self._straight = self._builder.post(rest, sent, received)
        for (transfer, path, index), rows in self._post.rows.items():
            if transfer not in self._ends and self._rank in self._post.relays[transfer, path]:
                like = self._post.values[transfer][index]
                shape = (len(rows), *like.shape[1:])
                self._passed[transfer, path, index] = self._builder.empty(shape, like.dtype)
        packets = range(self._post.packets)
        scattered = [self._post_leg(SCATTER, packet) for packet in packets]
        for packet in packets:
            self._wait(scattered[packet])
            self._crossing.append(self._post_leg(CROSS, packet))

    def end(self) -> None:
        """Gather each packet when it has come, and wait for everything."""
        gathered = []
        for packet, crossing in enumerate(self._crossing):
            self._wait(crossing)
            gathered.append(self._post_leg(GATHER, packet))
        for number in (*gathered, self._straight):
            self._wait(number)

    def _take_routed(
        self, messages: Sequence[MessageSpec], values: Sequence[Value], *, sent: bool
    ) -> list[MessageSpec]:
        """Take the values of the messages that are routed, and return the others."""
        pairs = self._post.pairs
        others = []
        for message in sorted(messages, key=lambda one: one.tag):
            pair = (self._rank, message.peer) if sent else (message.peer, self._rank)
            if pair not in pairs:
                others.append(message)
                continue
            value = values[message.value]
            if not sent:
                self._builder.make(value, "empty", (), value.shape, value.dtype)
            self._ends.setdefault(pairs.index(pair), []).append(value)
        return others

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

    def _rows(self, piece: LegRows) -> Value:
        """Return the rows of a piece on this rank, a view."""
        if piece.transfer in self._ends:
            value = self._ends[piece.transfer][piece.value]
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
