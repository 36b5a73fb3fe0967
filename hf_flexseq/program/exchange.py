"""Messages between this rank and others, as a program has them: collected, posted, waited for.

    Channel    tags and names of the messages of one group
    Exchange   the messages of one step of attention
    post       some exchanges in one post

Transfers between nodes may be split over several NICs. `schedule/routing.py` decides which take
which *paths*. Every transfer that is routed is one buffer of bytes, a *parcel*. Its paths are
slices of the parcel, and every path travels in the same number of packets, each over three legs:

    source --scatter--> exit rank --cross--> entry rank --gather--> target

    post    1. scatter all packets
            2. when a packet has come to its exit rank: send it across
    wait    3. when a packet has come to its entry rank: gather it
            4. wait for all packets at the target

What is slow, the way between nodes, is under way from `post` to `wait`, beside whatever is
computed meanwhile, and packets follow each other through the legs. Ranks that only pass packets on
take part at the same two points.

Nothing can hang: each leg of each packet is one post, and all ranks post these in one order, first
the scatter of every packet, then cross, then gather. A rank waits only for posts whose other ends
are posted already, or will be without waiting for a later one. The argument for whole calls of
attention is in `weave.py`. Legs inside a node and legs between nodes have different lanes, so
packets overlap; in remapping they share one.

Rejected: a thread that passes packets on, which would post in an order of its own. Rejected:
receives of all legs posted at once; a backend that runs one post after the other would wait on
them for ever.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_flexseq.plan import Group
from hf_flexseq.plan.shard import contiguous_part
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import MessageSpec, PostSpec, Value
from hf_flexseq.program.tags import packet_tag, zone_tag
from hf_flexseq.schedule.routing import Path, Routing, Transfer
from hf_flexseq.schedule.transfers import aligned

# (peer, whether this rank sends to it) -> what the message is; None where there is none
Describe = Callable[[int, bool], str | None]

STRAIGHT = Routing()
SCATTER, CROSS, GATHER = range(3)  # the legs


class Channel(NamedTuple):
    """The messages of one group on this rank: their tags, and their names in errors."""

    group: Group

    number: int
    """Index of the group's zone among the zones of this rank.

    Groups are nested and zones stand widest first, so all ranks of a group have the same wider
    zones before it and agree on its number. Tags of different zones differ.
    """

    def tag(self, message: int) -> int:
        """Return the tag of a message of this group; see `tags.py` for the messages."""
        return zone_tag(self.number, message)

    @property
    def name(self) -> str:
        """The name of the group, for errors."""
        return f"the {self.group.strategy} group of ranks {self.group.start}-{self.group.stop - 1}"


class Label:
    """Says what the messages of an exchange are, and to which group they belong."""

    __slots__ = ("channel", "describe", "peers")

    def __init__(self, channel: Channel | None, describe: Describe) -> None:
        self.channel = channel
        self.describe = describe
        self.peers: set[tuple[int, bool]] = set()  # (peer, whether this rank sends)

    def __call__(self, peer: int, sent: bool) -> str | None:
        """Return what a message is; None for one that is not of this exchange."""
        if (peer, sent) not in self.peers:
            return None
        text = self.describe(peer, sent)
        if self.channel is None:
            return text
        return f"{text}, of {self.channel.name}"

    def __str__(self) -> str:
        names = [self(peer, sent) for peer, sent in sorted(self.peers)[:1]]
        return " ".join(name or "" for name in names)


class TransitBytes(NamedTuple):
    """A path that this rank is on, with the bytes that travel on it."""

    transfer: Transfer
    path: Path

    buffer: Value
    """uint8 [path.nbytes]: a part of the parcel at its source and target, elsewhere on its own."""

    def ends(self, leg: int) -> tuple[int, int]:
        """Return the (source, target) ranks of a leg; one rank twice where the leg is empty."""
        stops = (
            self.transfer.source,
            self.path.exit_rank,
            self.path.entry_rank,
            self.transfer.target,
        )
        return stops[leg], stops[leg + 1]


class Exchange:
    """Messages between this rank and others: collected first, then posted and waited for once."""

    __slots__ = (
        "_builder",
        "_crossing",
        "_made",
        "_parcels",
        "_post",
        "_recvs",
        "_remaps",
        "_routing",
        "_sends",
        "_tag",
        "_transit",
        "_within",
        "label",
    )

    def __init__(
        self,
        builder: Builder,
        tag: int,
        label: Label,
        *,
        routing: Routing = STRAIGHT,
        within: str = "",
        remaps: bool = False,
    ) -> None:
        """tag: messages to one peer take the tags from here on.

        routing: over which ranks transfers go. All ranks of the nodes in question make the
        exchange, post it and wait for it, also those that neither send nor receive anything.
        within: names the exchange; errors name a packet by the ends of its transfer and by this.
        remaps: whether messages take the lane of remapping.
        """
        self._builder = builder
        self._tag = tag
        self.label = label
        self._routing = routing
        self._within = within
        self._remaps = remaps
        self._sends: list[tuple[Value, int]] = []  # (value, peer)
        self._recvs: list[tuple[Value, int]] = []
        self._made: list[Value] = []  # those received that a post makes; others are there already
        self._post: int | None = None  # number of the post of what goes straight, if anything does
        # (source, target) -> uint8 [bytes of the transfer], where this rank is one of the two
        self._parcels: dict[tuple[int, int], Value] = {}
        for transfer, _ in routing.paths:
            if builder.rank in (transfer.source, transfer.target):
                self._parcels[transfer.source, transfer.target] = builder.parcel(transfer.nbytes)
        self._transit: list[TransitBytes] = []
        self._crossing: list[int | None] = []  # posts, by packet

    @property
    def is_routed(self) -> bool:
        """Whether any transfer goes over the NICs of other ranks, of this rank or not."""
        return bool(self._routing.paths)

    # ---- collecting

    def send(self, values: Sequence[Value], peer: int) -> None:
        """Add values [rows, ...] of this rank that `peer` will receive."""
        parcel = self._parcels.get((self._builder.rank, peer))
        if parcel is not None:
            self._builder.fill_parcel(parcel, tuple(values), self._offsets(values, parcel))
            return
        self.label.peers.add((peer, True))
        for value in values:
            if 0 not in value.shape:
                self._sends.append((value, peer))

    def recv(self, likes: Sequence[Value], tokens: int, peer: int) -> Values:
        """Return values [tokens, ...] that hold what `peer` sends, from the wait on.

        likes: values [any rows, ...] with the other dimensions and the dtype.
        """
        parcel = self._parcels.get((peer, self._builder.rank))
        values = []
        if parcel is not None:
            shaped = [like._replace(shape=(tokens, *like.shape[1:])) for like in likes]
            offsets = self._offsets(shaped, parcel)
            for offset, like in zip(offsets, shaped, strict=True):
                values.append(self._builder.in_parcel(parcel, offset, like.shape, like.dtype))
            return tuple(values)
        self.label.peers.add((peer, False))
        for like in likes:
            shape = (tokens, *like.shape[1:])
            if 0 in shape:
                values.append(self._builder.empty(shape, like.dtype))
                continue
            value = self._builder.received(shape, like.dtype)
            self._made.append(value)
            self._recvs.append((value, peer))
            values.append(value)
        return tuple(values)

    def recv_into(self, value: Value, peer: int) -> None:
        """Add a value [rows, ...] that will hold what `peer` sends straight."""
        assert (peer, self._builder.rank) not in self._parcels, (
            f"what rank {peer} sends comes in a parcel: it is received by `recv`"
        )
        self.label.peers.add((peer, False))
        if 0 not in value.shape:
            self._recvs.append((value, peer))

    def _offsets(self, values: Sequence[Value], parcel: Value) -> list[int]:
        """Return where values that lie one behind the other in a parcel begin."""
        offsets = []
        start = 0
        for value in values:
            offsets.append(start)
            (row,) = self._builder.row_bytes((value,))
            start += aligned(row * value.rows)
        assert start == parcel.rows, f"values of {start} bytes for a transfer of {parcel.rows}"
        return offsets

    # ---- waiting

    def wait(self) -> None:
        """Wait until all messages have been sent and received, and all packets passed on."""
        # 3. gather each packet as soon as it has come
        gathered = []
        for packet, crossing in enumerate(self._crossing):
            self._wait(crossing)
            gathered.append(self._post_leg(GATHER, packet))
        # 4. wait for all of them, and for what went straight
        for number in gathered:
            self._wait(number)
        self._wait(self._post)

    def _wait(self, number: int | None) -> None:
        if number is not None:
            self._builder.wait(number)

    # ---- packets

    @property
    def rank(self) -> int:
        """The global rank that takes part."""
        return self._builder.rank

    def post_routed(self) -> None:
        """Send the packets across; waits for their first leg."""
        for transfer, paths in self._routing.paths:
            for path in paths:
                if self._is_on(transfer, path):
                    self._transit.append(self._transit_bytes(transfer, path))
        # 1. scatter all packets
        packets = range(self._routing.packets)
        scattered = [self._post_leg(SCATTER, packet) for packet in packets]
        # 2. send each one across as soon as it has come
        for packet in packets:
            self._wait(scattered[packet])
            self._crossing.append(self._post_leg(CROSS, packet))

    def _is_on(self, transfer: Transfer, path: Path) -> bool:
        ranks = (transfer.source, path.exit_rank, path.entry_rank, transfer.target)
        return self._builder.rank in ranks

    def _transit_bytes(self, transfer: Transfer, path: Path) -> TransitBytes:
        """Return a path of this rank, with uint8 [path.nbytes] for what travels on it."""
        parcel = self._parcels.get((transfer.source, transfer.target))
        if parcel is None:  # this rank only passes it on
            buffer = self._builder.parcel(path.nbytes)
        else:
            # [transfer.nbytes] -> [path.nbytes]
            buffer = self._builder.part(parcel, path.start, path.stop)
        return TransitBytes(transfer, path, buffer)

    def _post_leg(self, leg: int, packet: int) -> int | None:
        """Post one leg of one packet of every path."""
        sends = []
        recvs = []
        label = Label(None, lambda peer, sent: self._name(leg, peer, sent))
        for transit in self._transit:
            source, target = transit.ends(leg)
            if source == target:
                continue
            start, stop = contiguous_part(transit.buffer.rows, packet, self._routing.packets)
            if start == stop:
                continue
            # [path.nbytes] -> [about 1 / packets of it]
            packet_bytes = self._builder.part(transit.buffer, start, stop)
            if source == self._builder.rank:
                sends.append((packet_bytes, target))
                label.peers.add((target, True))
            elif target == self._builder.rank:
                recvs.append((packet_bytes, source))
                label.peers.add((source, False))
        tag = packet_tag(self._tag, leg, packet)
        return _posted(
            self._builder,
            _tagged(sends, tag),
            _tagged(recvs, tag),
            made=(),
            remaps=self._remaps,
            labels=(label,),
        )

    def _name(self, leg: int, peer: int, sent: bool) -> str:
        """Return the name of the packets between this rank and `peer` on a leg."""
        own = self._builder.rank
        ends = (own, peer) if sent else (peer, own)
        transfers = dict.fromkeys(
            f"rank {transit.transfer.source} sends to rank {transit.transfer.target}"
            for transit in self._transit
            if transit.ends(leg) == ends
        )
        return f"pieces of what {', '.join(transfers)}{self._within}"


def post(builder: Builder, exchanges: Sequence[Exchange]) -> None:
    """Start all transfers of some exchanges, what goes straight in one post."""
    sends: list[tuple[Value, MessageSpec]] = []
    recvs: list[tuple[Value, MessageSpec]] = []
    made: list[Value] = []
    for one in exchanges:
        sends += _tagged(one._sends, one._tag)
        recvs += _tagged(one._recvs, one._tag)
        made += one._made
    number = _posted(
        builder,
        sends,
        recvs,
        made=made,
        remaps=any(one._remaps for one in exchanges),
        labels=tuple(one.label for one in exchanges),
    )
    for one in exchanges:
        one._post = number
    for one in exchanges:
        if one.is_routed:
            one.post_routed()


def _posted(
    builder: Builder,
    sends: Sequence[tuple[Value, MessageSpec]],
    recvs: Sequence[tuple[Value, MessageSpec]],
    *,
    made: Sequence[Value],
    remaps: bool,
    labels: tuple[Label, ...],
) -> int | None:
    """Post messages, and return the number of the post; None where there are none.

    made: values received that do not exist yet; the others lie in values that do.
    """
    if not sends and not recvs:
        return None
    spec = PostSpec(
        sends=tuple(message for _, message in sends),
        recvs=tuple(message for _, message in recvs),
        remaps=remaps,
        labels=labels,
    )
    read = [value for value, _ in sends]
    makes = {value.number for value in made}
    read += [value for value, _ in recvs if value.number not in makes]
    return builder.post(spec, read, made)


def _tagged(transfers: Sequence[tuple[Value, int]], tag: int) -> list[tuple[Value, MessageSpec]]:
    """Return the messages of values to or from peers, each with its tag.

    The first value for a peer has `tag`, the next one for the same peer `tag` + 1, and so on.
    """
    before: Counter[int] = Counter()  # values so far, by peer
    tagged = []
    for value, peer in transfers:
        tagged.append((value, MessageSpec(value.number, peer, tag + before[peer])))
        before[peer] += 1
    return tagged
