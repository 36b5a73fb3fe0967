"""Messages between this rank and others, as a program has them: collected, posted, waited for.

    Channel    tags and names of the messages of one group
    Exchange   the messages of one step of attention
    post       some exchanges in one post

Everything goes straight from the rank that has it to the rank that reads it. A pass may rewrite
the posts of a finished program (`passes.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hf_flexseq.plan import Group
from hf_flexseq.program.builder import Builder, Values
from hf_flexseq.program.instructions import MessageSpec, PostSpec, Value
from hf_flexseq.program.tags import zone_tag

# (peer, whether this rank sends to it) -> name of the message, or None
Describe = Callable[[int, bool], str | None]


class Channel(NamedTuple):
    """The messages of one group on this rank: their tags, and their names in errors."""

    group: Group

    number: int
    """Index of the group's zone among the zones of this rank.

    Groups are nested and zones are ordered widest first, so all ranks of a group have the same
    wider zones before it and agree on its number. Tags of different zones differ.
    """

    def tag(self, message: int) -> int:
        """Return the tag of a message of this group; see `tags.py` for the messages."""
        return zone_tag(self.number, message)

    @property
    def name(self) -> str:
        """The name of the group, for errors."""
        return f"the {self.group.strategy} group of ranks {self.group.start}-{self.group.stop - 1}"


class Label:
    """Names the messages of an exchange, and the group to which they belong."""

    __slots__ = ("channel", "describe", "peers")

    def __init__(self, channel: Channel | None, describe: Describe) -> None:
        self.channel = channel
        self.describe = describe
        self.peers: set[tuple[int, bool]] = set()  # (peer, whether this rank sends)

    def __call__(self, peer: int, sent: bool) -> str | None:
        """Return a message's name; None for messages of other exchanges."""
        if (peer, sent) not in self.peers:
            return None
        text = self.describe(peer, sent)
        if self.channel is None:
            return text
        return f"{text}, of {self.channel.name}"


class Exchange:
    """Messages between this rank and others: collected first, then posted and waited for once."""

    __slots__ = ("_builder", "_post", "_recvs", "_sends", "_tag", "label")

    def __init__(self, builder: Builder, tag: int, label: Label) -> None:
        """tag: messages to one peer take the tags from here on."""
        self._builder = builder
        self._tag = tag
        self.label = label
        self._sends: list[tuple[Value, int]] = []  # (value, peer)
        self._recvs: list[tuple[Value, int]] = []
        self._post: int | None = None  # number of the post; None without messages

    def send(self, values: Sequence[Value], peer: int) -> None:
        """Add values [rows, ...] of this rank that `peer` will receive."""
        self.label.peers.add((peer, True))
        for value in values:
            if 0 not in value.shape:
                self._sends.append((value, peer))

    def recv(self, likes: Sequence[Value], tokens: int, peer: int) -> Values:
        """Return values [tokens, ...] like `likes`, which `peer` sends; valid from the wait on."""
        self.label.peers.add((peer, False))
        values = []
        for like in likes:
            shape = (tokens, *like.shape[1:])
            if 0 in shape:
                values.append(self._builder.empty(shape, like.dtype))
                continue
            value = self._builder.received(shape, like.dtype)
            self._recvs.append((value, peer))
            values.append(value)
        return tuple(values)

    def wait(self) -> None:
        """Wait until all messages have been sent and received."""
        if self._post is not None:
            self._builder.wait(self._post)


def post(builder: Builder, exchanges: Sequence[Exchange]) -> None:
    """Start all transfers of some exchanges in one post; nothing where there are none."""
    sends: list[tuple[Value, MessageSpec]] = []
    recvs: list[tuple[Value, MessageSpec]] = []
    for one in exchanges:
        sends += _tagged(one._sends, one._tag)
        recvs += _tagged(one._recvs, one._tag)
    if not sends and not recvs:
        return
    spec = PostSpec(
        sends=tuple(message for _, message in sends),
        recvs=tuple(message for _, message in recvs),
        labels=tuple(one.label for one in exchanges),
    )
    number = builder.post(spec, [value for value, _ in sends], [value for value, _ in recvs])
    for one in exchanges:
        one._post = number


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
