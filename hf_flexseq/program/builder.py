"""The builder of a program: every method emits an instruction and returns the values it makes.

H query heads, Hkv heads of keys and values, D the head dimension; [n, ...] n rows of any shape.
A method emits no instruction without work: taking all rows of a value returns the value.
"""

from collections.abc import Sequence
from typing import Any

from hf_flexseq.plan.head_layout import HeadLayout
from hf_flexseq.program.instructions import (
    INPUT,
    WIDE,
    AllToAllSpec,
    CallReference,
    Index,
    Instruction,
    LayerShape,
    PostSpec,
    Program,
    RowsSpec,
    Value,
    last_uses,
)
from hf_flexseq.program.tables import Tables

Values = tuple[Value, ...]


class Builder:
    """Emits the instructions of one program."""

    def __init__(self, tables: Tables, shape: LayerShape, *, rank: int, wide: bool) -> None:
        """rank: global, of this program. wide: True if gradients of 16-bit tensors are WIDE."""
        self.tables = tables
        self.shape = shape
        self.rank = rank
        self.wide = wide
        self._inputs: list[Value] = []
        self._instructions: list[Instruction] = []
        self._values: list[Value] = []
        self._posts = 0
        self._waited: set[int] = set()
        self._taken: dict[tuple[tuple[int, ...], int], Values] = {}  # by values and array
        self._parts: dict[tuple[int, int, int], Value] = {}  # views, by value and rows
        self._kernel_lses: dict[int, Value] = {}  # by number of the log-sum-exp

    # ---- programs

    def input(self, shape: Sequence[int], dtype: str = INPUT) -> Value:
        """Return an input of the program; inputs are given in this order."""
        value = self._value(shape, dtype)
        self._inputs.append(value)
        return value

    def program(self, outputs: Values, saved: Sequence[Values] = ()) -> Program:
        """Return the program of the emitted instructions."""
        instructions = tuple(self._instructions)
        kept = [value.number for value in outputs]
        for of_zone in saved:
            kept += [value.number for value in of_zone]
        return Program(
            inputs=tuple(self._inputs),
            outputs=outputs,
            saved=tuple(saved),
            instructions=instructions,
            frees=last_uses(instructions, kept),
            all_values=tuple(self._values),
        )

    def _value(self, shape: Sequence[int], dtype: str) -> Value:
        value = Value(len(self._values), tuple(shape), dtype)
        self._values.append(value)
        return value

    def _emit(
        self, operation: str, ins: Sequence[Value], outs: Sequence[Value], *constants: Any
    ) -> None:
        self._instructions.append(
            Instruction(
                operation,
                tuple([value.number for value in ins]),
                tuple([value.number for value in outs]),
                constants,
            )
        )

    def _made(
        self,
        operation: str,
        ins: Sequence[Value],
        shape: Sequence[int],
        dtype: str,
        *constants: Any,
    ) -> Value:
        """Emit an operation that makes one value."""
        made = self._value(shape, dtype)
        self._emit(operation, ins, (made,), *constants)
        return made

    # ---- memory

    def empty(self, shape: Sequence[int], dtype: str) -> Value:
        """Return a value without contents."""
        return self._made("empty", (), shape, dtype, tuple(shape), dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> Value:
        """Return a value of zeros."""
        return self._made("zeros", (), shape, dtype, tuple(shape), dtype)

    def cast(self, x: Value, dtype: str) -> Value:
        """Return x in another dtype; x itself where that is the same."""
        if self.shape.item_bytes(x.dtype) == self.shape.item_bytes(dtype):
            return x._replace(dtype=dtype)
        return self._made("cast", (x,), x.shape, dtype, dtype)

    # ---- rows

    def take(self, x: Value, rows: RowsSpec) -> Value:
        """Return some rows of x: [t, ...] -> [n, ...], a view where they stand together."""
        (taken,) = self.take_all((x,), rows)
        return taken

    def take_all(self, values: Values, rows: RowsSpec) -> Values:
        """Return the same rows of some values: [t, ...] -> [n, ...] each, views where they stand
        together. They are copied once for all who ask, so the values must not change any more."""
        if rows.array is None:
            assert rows.start is not None, "rows of another rank cannot be taken"
            stop = rows.start + rows.tokens
            return tuple(self.part(x, rows.start, stop) for x in values)
        key = (tuple(x.number for x in values), rows.array)
        if key not in self._taken:
            taken = [self._value((rows.tokens, *x.shape[1:]), x.dtype) for x in values]
            self._emit("take", values, taken, rows)
            self._taken[key] = tuple(taken)
        return self._taken[key]

    def part(self, x: Value, start: int, stop: int) -> Value:
        """Return rows [start, stop) of x: [t, ...] -> [stop - start, ...], a view."""
        if (start, stop) == (0, x.rows):
            return x
        key = (x.number, start, stop)
        if key not in self._parts:
            shape = (stop - start, *x.shape[1:])
            self._parts[key] = self._made("part", (x,), shape, x.dtype, start, stop)
        return self._parts[key]

    def put(self, total: Value, rows: RowsSpec, part: Value) -> None:
        """Write part [n, ...] to these n rows of total [t, ...], in the dtype of total."""
        if rows.tokens:
            self._emit("put", (total, part), (), rows)

    def add(self, total: Value, rows: RowsSpec, part: Value) -> None:
        """Add part [n, ...] to these n different rows of total [t, ...], in its dtype."""
        if rows.tokens:
            self._emit("add", (total, part), (), rows)

    def accumulate(self, total: Value, rows: RowsSpec, part: Value) -> None:
        """Add part [n, ...] to rows of total [t, ...], which may repeat, in its dtype."""
        assert rows.array is not None, "rows that stand together are meant once: add them"
        self._emit("accumulate", (total, part), (), Index(rows.array))

    def merge(self, out: Value, lse: Value, rows: RowsSpec, part: tuple[Value, Value]) -> None:
        """Merge the result of a call into the running result of all calls so far.

        out [t, H, D], lse [t, H]: the running result; rows: those n that the part is about.
        part: (out [n, H, D], lse [n, H]) over the keys of the call.
        """
        if rows.tokens:
            self._emit("merge", (out, lse, *part), (), rows)

    def join(self, parts: Sequence[Value], dim: int = 0) -> Value:
        """Concatenate the parts along `dim`; a single part is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        return self._made("join", parts, shape, parts[0].dtype, dim)

    # ---- heads

    def heads(self, x: Value, start: int, stop: int) -> Value:
        """Return heads [start, stop) of x: [t, heads, D] -> [t, stop - start, D], a view."""
        if (start, stop) == (0, x.shape[1]):
            return x
        shape = (x.shape[0], stop - start, *x.shape[2:])
        return self._made("heads", (x,), shape, x.dtype, start, stop)

    def split_heads(self, x: Value, counts: Sequence[int]) -> Values:
        """Return x [t, heads, D] as views of so many heads each."""
        parts = []
        start = 0
        for count in counts:
            parts.append(self.heads(x, start, start + count))
            start += count
        return tuple(parts)

    def repeat_heads(self, x: Value, index: int, count: int) -> Value:
        """Return the heads of x that an index array lists: [t, heads, D] -> [t, count, D]."""
        shape = (x.shape[0], count, *x.shape[2:])
        return self._made("repeat_heads", (x,), shape, x.dtype, Index(index))

    def sum_heads(self, x: Value, index: int, count: int) -> Value:
        """Sum repeated heads, the transpose of `repeat_heads`: [t, heads, D] -> [t, count, D]."""
        shape = (x.shape[0], count, *x.shape[2:])
        return self._made("sum_heads", (x,), shape, x.dtype, Index(index), count)

    def pair(self, k: Value, v: Value) -> Value:
        """Return k and v side by side: 2 x [t, Hkv, D] -> [t, 2, Hkv, D]."""
        return self._made("pair", (k, v), (k.rows, 2, *k.shape[1:]), k.dtype)

    def unpair(self, kv: Value) -> tuple[Value, Value]:
        """Return kv as views: [t, 2, Hkv, D] -> 2 x [t, Hkv, D]."""
        shape = (kv.rows, *kv.shape[2:])
        k = self._value(shape, kv.dtype)
        v = self._value(shape, kv.dtype)
        self._emit("unpair", (kv,), (k, v))
        return k, v

    def turned(self, lse: Value) -> Value:
        """Return a log-sum-exp with its dimensions swapped, a view: [H, n] <-> [n, H]."""
        return self._made("turned", (lse,), lse.shape[::-1], lse.dtype)

    def kernel_lse(self, lse: Value) -> Value:
        """Return lse [n, H] in the layout of kernels, [H, n]; it must not change any more."""
        if lse.number not in self._kernel_lses:
            made = self._made("kernel_lse", (lse,), lse.shape[::-1], lse.dtype)
            self._kernel_lses[lse.number] = made
        return self._kernel_lses[lse.number]

    def columns(self, lse: Value, rows: RowsSpec) -> Value:
        """Return the columns of some rows of lse: [H, t] -> [H, n], a view where they stand
        together; it must not change any more."""
        if rows.array is not None:
            return self.kernel_lse(self.take(self.turned(lse), rows))
        assert rows.start is not None, "rows of another rank have no columns here"
        start, stop = rows.start, rows.start + rows.tokens
        if (start, stop) == (0, lse.shape[1]):
            return lse
        shape = (lse.rows, stop - start)
        return self._made("columns", (lse,), shape, lse.dtype, start, stop)

    def pack_heads(self, tensors: Values, layout: HeadLayout) -> Value:
        """Return all heads side by side, part after part: [tokens, heads, D] -> [slots x D]."""
        shape = (sum(layout.slots) * tensors[0].shape[2],)
        return self._made("pack_heads", tensors, shape, tensors[0].dtype, shape, layout)

    def unpack_heads(self, flat: Value, layout: HeadLayout, head_dim: int) -> Values:
        """Unpack heads, shared ones summed: flat [slots x D] -> [tokens, heads, D] in INPUT."""
        shapes = tuple((layout.tokens, heads, head_dim) for heads in layout.heads)
        outs = tuple(self._value(shape, INPUT) for shape in shapes)
        self._emit("unpack_heads", (flat,), outs, shapes, INPUT, layout)
        return outs

    def flat_heads(self, tensors: Values) -> Value:
        """Return all heads side by side, flat: [tokens, heads, D] -> [tokens x all heads x D]."""
        elements = tensors[0].rows * sum(x.shape[1] for x in tensors) * tensors[0].shape[2]
        return self._made("flat_heads", tensors, (elements,), tensors[0].dtype)

    def arrived_heads(
        self, flat: Value, tokens: int, heads: Sequence[int], head_dim: int
    ) -> Values:
        """Return the heads that all ranks sent, as views: flat, by rank -> [tokens, heads, D] by
        tensor."""
        outs = tuple(self._value((tokens, count, head_dim), flat.dtype) for count in heads)
        self._emit("arrived_heads", (flat,), outs, tokens, tuple(heads), head_dim)
        return outs

    # ---- kernels

    def attend(self, q: Value, k: Value, v: Value, call: int) -> tuple[Value, Value]:
        """Return out [n, H, D], lse [H, n] of a kernel call: q [n, H, D], k, v [m, Hkv, D]."""
        out = self._value((*q.shape[:2], v.shape[2]), INPUT)
        lse = self._value((q.shape[1], q.rows), WIDE)
        self._emit("attend", (q, k, v), (out, lse), self._call(call))
        return out, lse

    def gradients(
        self, dout: Value, q: Value, k: Value, v: Value, out: Value, lse: Value, call: int
    ) -> tuple[Value, Value, Value]:
        """Return dq [n, H, D], dk and dv [m, Hkv, D] of a kernel call.

        dout, q, out [n, H, D]; k, v [m, Hkv, D]; lse [H, n], merged over all keys of the queries.
        """
        dtype = WIDE if self.wide else INPUT
        dq, dk, dv = (self._value(x.shape, dtype) for x in (q, k, v))
        self._emit("gradients", (dout, q, k, v, out, lse), (dq, dk, dv), self._call(call))
        return dq, dk, dv

    def sink(self, out: Value, lse: Value, sinks: Value) -> None:
        """Add sinks [H] to a complete result, in place: out [t, H, D], lse [H, t]."""
        self._emit("sink", (out, lse, sinks), ())

    def sink_gradient(
        self, total: Value, sinks: Value, dout: Value, out: Value, lse: Value
    ) -> None:
        """Add the gradient of sinks to total [H]; out [t, H, D], lse [H, t] include them."""
        self._emit("sink_gradient", (total, sinks, dout, out, lse), ())

    def special(
        self,
        operation: str,
        ins: Sequence[Value],
        made: Sequence[tuple[Sequence[int], str]],
        *constants: Any,
    ) -> Values:
        """Emit an operation of one strategy alone; made: (shape, dtype) of each result."""
        outs = tuple(self._value(shape, dtype) for shape, dtype in made)
        self._emit(operation, ins, outs, *constants)
        return outs

    def _call(self, number: int) -> CallReference:
        return CallReference(number, self.tables.calls[number])

    # ---- transfers

    def received(self, shape: Sequence[int], dtype: str) -> Value:
        """Return a value that a later `post` makes and fills."""
        return self._value(shape, dtype)

    def post(self, spec: PostSpec, sent: Sequence[Value], received: Sequence[Value]) -> int:
        """Post some messages, and return the number of the post.

        sent: values to send, left as they are until the wait. received: values from `received`,
        which hold the received data from the wait on.
        """
        shapes = tuple((value.number, value.shape, value.dtype) for value in received)
        number = self._posts
        self._posts += 1
        self._emit("post", sent, received, number, spec, shapes)
        return number

    def all_to_all(self, sent: Value, received: Value, spec: AllToAllSpec) -> int:
        """Post an exchange of parts of flat values, [elements to all ranks] -> [elements from all
        ranks], and return its number. `received` is filled from the wait on."""
        number = self._posts
        self._posts += 1
        self._emit("all_to_all", (sent, received), (), number, spec)
        return number

    def wait(self, number: int) -> None:
        """Wait for a post, unless that was done already."""
        if number not in self._waited:
            self._waited.add(number)
            self._emit("wait", (), (), number)


class Rewriter(Builder):
    """Copies a finished program, with other instructions before, between or after its own."""

    def __init__(self, program: Program, shape: LayerShape, *, rank: int) -> None:
        """shape: of the layer. rank: runs `program`, whose values and posts keep their numbers."""
        super().__init__(Tables(), shape, rank=rank, wide=False)
        self._values = list(program.all_values)
        self._inputs = list(program.inputs)
        self._posts = sum(one.operation in ("post", "all_to_all") for one in program.instructions)

    def replace_input(self, index: int, rows: int) -> Value:
        """Return a new input of `rows` rows; another operation has to make the old value."""
        old = self._inputs[index]
        new = self._value((rows, *old.shape[1:]), old.dtype)
        self._inputs[index] = new
        return new

    def copy(self, instruction: Instruction) -> None:
        """Add an instruction as it is."""
        self._instructions.append(instruction)

    def make(self, value: Value, operation: str, ins: Sequence[Value], *constants: Any) -> None:
        """Add an operation that makes a value of the finished program."""
        self._emit(operation, ins, (value,), *constants)
