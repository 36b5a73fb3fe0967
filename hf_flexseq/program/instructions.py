"""A program: a flat list of instructions over numbered values.

    12 attend        v17, v18 <- v5, v15, v16  32 queries x 64 keys
    13 merge         v13, v12, v17, v19  rows 32-63
    14 post          v20 <- v4  3: v4 to rank 4, v20 from rank 4
    15 wait          1

A *value* is a tensor of known shape that does not exist yet. An instruction names an operation of
`attention/replay.py`, the values that it reads, the values that it makes, and its constants. Some
operations write to values that they read (`merge`, `add`, `put`); their methods in `builder.py`
say which.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from hf_flexseq.base.layers import FULL, Reach

Saved = TypeVar("Saved")

# ---- dtypes of values

INPUT = "input"  # the dtype of queries, keys and values
WIDE = "wide"  # float32, or float64 for float64: log-sum-exps and sums

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class LayerShape(NamedTuple):
    """Sizes of a layer's attention that a program depends on."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    """A key of `ITEM_BYTES`."""
    reach: Reach = FULL
    """Keys that a query reads."""
    sinks: bool = False
    """True if every head has a sink: a score in the softmax without a value."""
    both_ways: bool = False
    """True if the tokens of a block (`plan/blocks.py`) read each other both ways."""

    def item_bytes(self, dtype: str) -> int:
        """Return the bytes of a number of a value: `dtype` is INPUT or WIDE."""
        if dtype == INPUT:
            return ITEM_BYTES[self.dtype]
        return 8 if self.dtype == "float64" else 4


class RowShape(NamedTuple):
    """Sizes of a recurrent layer's rows that a program depends on."""

    columns: int
    """Numbers of a row."""
    dtype: str
    """A key of `ITEM_BYTES`."""
    width: int = 1
    """Rows that a convolution reads, its own among them."""

    @property
    def as_layer(self) -> LayerShape:
        """The rows as one head of a layer."""
        return LayerShape(1, 1, self.columns, self.dtype)

    def item_bytes(self, dtype: str) -> int:
        """Return the bytes of a number of a value: `dtype` is INPUT or WIDE."""
        return self.as_layer.item_bytes(dtype)


# Operations that make the host do something, and the device nothing: views, memory, messages.
NO_LAUNCH = frozenset(
    (
        *("part", "heads", "columns", "unpair", "turned", "arrived_heads"),
        "empty",
        *("post", "all_to_all", "wait"),
    )
)


# ---- values


class Value(NamedTuple):
    """A tensor of a program, before it exists."""

    number: int
    """Its place among all values of the program."""
    shape: tuple[int, ...]

    dtype: str
    """INPUT or WIDE."""

    @property
    def rows(self) -> int:
        """Size of the first dimension."""
        return self.shape[0]


class RowsSpec(NamedTuple):
    """Some rows of a value."""

    tokens: int
    """Number of rows."""
    start: int | None = None
    """The first of them, where they stand together."""
    array: int | None = None
    """The number of the index array that lists them, where they do not. None of both for rows of
    another rank, of which only the number matters."""

    def __str__(self) -> str:
        if self.start is None:
            return f"{self.tokens} rows of array {self.array}"
        return f"rows {self.start}-{self.start + self.tokens - 1}"


class Index(NamedTuple):
    """Stands for an array of integers, int64, among the constants of an instruction."""

    number: int

    def __str__(self) -> str:
        return f"array {self.number}"


class CallLengths(NamedTuple):
    """Sequences packed one after the other, as the queries and the keys of one kernel call."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    causal: bool
    window: int | None = None


class CallReference(NamedTuple):
    """Stands for the lengths of a kernel call among the constants of an instruction."""

    number: int
    lengths: CallLengths

    def __str__(self) -> str:
        queries = sum(self.lengths.q_lens)
        keys = sum(self.lengths.k_lens)
        kind = "causal " if self.lengths.causal else ""
        if self.lengths.window is not None:
            kind = f"window {self.lengths.window} "
        return f"{kind}call {self.number}: {queries} queries x {keys} keys"


# ---- messages


class MessageSpec(NamedTuple):
    """A value on its way between this rank and another one."""

    value: int
    """Number of the value."""
    peer: int
    """Global rank on the other side."""
    tag: int


class PostSpec(NamedTuple):
    """Some messages that are posted together."""

    sends: tuple[MessageSpec, ...]
    recvs: tuple[MessageSpec, ...]
    labels: tuple[Any, ...]
    """Callables (peer, whether this rank sends) -> the message's name, or None for messages of
    other exchanges; called when a transfer fails."""

    @property
    def peers(self) -> list[int]:
        """The rank on the other side of each message."""
        return [message.peer for message in (*self.sends, *self.recvs)]

    def __str__(self) -> str:
        sent = [f"v{message.value} to rank {message.peer}" for message in self.sends]
        received = [f"v{message.value} from rank {message.peer}" for message in self.recvs]
        return ", ".join((*sent, *received))

    def label(self, peer: int, sent: bool) -> str:
        """Return the names of the messages between this rank and `peer`, for errors."""
        names = [label(peer, sent) for label in self.labels]
        return " or ".join(name for name in names if name is not None)


class AllToAllSpec(NamedTuple):
    """Elements of a flat value that go to and come from each of some ranks."""

    ranks: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    tag: int
    label: Any
    own: int
    """Index of this rank among them."""

    @property
    def peers(self) -> list[int]:
        """The rank on the other side of each message."""
        peers = []
        for counts in (self.sent, self.received):
            for index, rank in enumerate(self.ranks):
                if index != self.own and counts[index]:
                    peers.append(rank)
        return peers

    def __str__(self) -> str:
        return f"between ranks {self.ranks[0]}-{self.ranks[-1]}"


# ---- programs


class Instruction(NamedTuple):
    """One thing that a rank does."""

    operation: str
    """Name of a method of `attention.replay.Replay`."""
    ins: tuple[int, ...]
    """Values that are read, or written to."""
    outs: tuple[int, ...]
    """Values that are made."""
    constants: tuple[Any, ...]
    """Arguments of the operation besides the tensors."""

    def remark(self) -> str:
        """Return the constants as text."""
        if self.operation == "post":
            number, spec, _ = self.constants
            return f"{number}: {spec}"
        return " ".join(str(constant) for constant in self.constants)


class Program(NamedTuple):
    """The instructions of a rank for one direction of a layer's attention."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    saved: tuple[tuple[Value, ...], ...]
    """By zone, the values that the backward reads, the log-sum-exp last; empty for a backward."""
    instructions: tuple[Instruction, ...]

    frees: tuple[tuple[int, ...], ...]
    """By instruction, the values that no later one reads."""
    all_values: tuple[Value, ...]
    """All values, by number."""

    def operations(self) -> Counter[str]:
        """Return how often each operation occurs."""
        return Counter(instruction.operation for instruction in self.instructions)

    @property
    def kernel_calls(self) -> int:
        """Kernel calls."""
        counts = self.operations()
        return counts["attend"] + counts["gradients"]

    @property
    def launches(self) -> int:
        """Operations on the device, kernel calls included; fused operations count once."""
        counts = self.operations()
        return counts.total() - sum(counts[name] for name in NO_LAUNCH)

    def posts(self, node_of: Callable[[int], int], *, rank: int) -> int:
        """Return how many batches of messages this rank posts, one for each lane that is taken:
        inside nodes and between them.

        node_of: the node of a rank. rank: the one whose program this is.
        """
        posts = 0
        for one in self.instructions:
            if one.operation in ("post", "all_to_all"):
                lanes = {node_of(peer) == node_of(rank) for peer in one.constants[1].peers}
                posts += len(lanes)
        return posts

    @property
    def messages(self) -> int:
        """Sends and receives."""
        messages = 0
        for one in self.instructions:
            if one.operation in ("post", "all_to_all"):
                messages += len(one.constants[1].peers)
        return messages

    def log_sum_exps(self, saved: Sequence[Saved]) -> list[Saved]:
        """Return the log-sum-exp of each zone among the saved values of all zones."""
        found = []
        stop = 0
        for of_zone in self.saved:
            stop += len(of_zone)
            found.append(saved[stop - 1])
        return found

    def __str__(self) -> str:
        """Return one line for each instruction."""
        lines = ["inputs  " + _names(value.number for value in self.inputs)]
        for number, one in enumerate(self.instructions):
            made = f"{_names(one.outs)} <- " if one.outs else ""
            text = f"{number:4} {one.operation:16} {made}{_names(one.ins)}  {one.remark()}"
            lines.append(text.rstrip())
        lines.append("outputs " + _names(value.number for value in self.outputs))
        return "\n".join(lines)


def _names(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{number}" for number in numbers)


def last_uses(
    instructions: tuple[Instruction, ...], kept: Iterable[int]
) -> tuple[tuple[int, ...], ...]:
    """Return by instruction the values that are not read later, except `kept`."""
    seen = set(kept)
    frees = []
    for one in reversed(instructions):
        over = []
        for number in (*one.ins, *one.outs):
            if number not in seen:
                seen.add(number)
                over.append(number)
        frees.append(tuple(over))
    return tuple(reversed(frees))
