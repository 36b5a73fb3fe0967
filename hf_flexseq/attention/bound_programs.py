"""Programs bound to a device: constants are tensors, kernel lengths and lanes of messages.

A program is bound once for a micro-batch and runs as often as there are layers, on the operations
of `replay.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hf_flexseq.attention.replay import CutAttention, Means, Replay, Tensors
from hf_flexseq.attention.uploads import Uploads
from hf_flexseq.base.layers import Scores
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import Label, Lane
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.kernels.choose import choose_fused
from hf_flexseq.kernels.fused_operations import Rows
from hf_flexseq.program.instructions import (
    INPUT,
    WIDE,
    CallReference,
    Index,
    Instruction,
    PostSpec,
    Program,
    RowsSpec,
)


class LaneMessages(NamedTuple):
    """Messages of a post that take one lane: (position among the tensors, peer, tag) each."""

    lane: Lane
    sends: tuple[tuple[int, int, int], ...]
    recvs: tuple[tuple[int, int, int], ...]


class BoundPost(NamedTuple):
    """A post whose lanes are known."""

    number: int
    made: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shape and dtype of the tensors that are received and do not exist yet."""
    lanes: tuple[LaneMessages, ...]
    label: Label


class BoundInstruction(NamedTuple):
    """An instruction whose operation and constants are bound."""

    operation: Callable[..., Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    constants: tuple[Any, ...]
    frees: tuple[int, ...]


class BoundProgram:
    """A program that can run, as often as there are layers."""

    def __init__(
        self,
        program: Program,
        uploads: Uploads,
        communicator: Communicator | None,
        kernel: Kernel,
        dtype: torch.dtype,
    ) -> None:
        """communicator: None for a rank alone. dtype: dtype of queries, keys and values."""
        self.program = program
        device = uploads.device
        self.means = Means(device, kernel, choose_fused(device), communicator)
        self.inputs = tuple(value.number for value in program.inputs)
        self.outputs = tuple(value.number for value in program.outputs)
        self.saved = tuple(value.number for of_zone in program.saved for value in of_zone)
        binder = _Binder(self.means, uploads, dtype)
        self.steps = []
        for instruction, frees in zip(program.instructions, program.frees, strict=True):
            self.steps.append(binder.step(instruction, frees))

    def run(
        self, inputs: Sequence[torch.Tensor], scores: Scores, cut: CutAttention | None = None
    ) -> tuple[Tensors, Tensors]:
        """Run the program on tensors of the inputs' shapes; return outputs, and the tensors that
        the backward needs. cut: attention of the part of a cut sequence, for a program that has
        one."""
        values: list[Any] = [None] * len(self.program.all_values)
        for number, tensor in zip(self.inputs, inputs, strict=True):
            values[number] = tensor
        run = Replay(self.means, scores, cut)
        for operation, ins, outs, constants, frees in self.steps:
            result = operation(run, *[values[number] for number in ins], *constants)
            if type(result) is tuple:
                for number, tensor in zip(outs, result, strict=True):
                    values[number] = tensor
            elif outs:
                values[outs[0]] = result
            for number in frees:
                values[number] = None
        assert not run.pending, f"posts {sorted(run.pending)} were not waited for"
        outputs = tuple(values[number] for number in self.outputs)
        return outputs, tuple(values[number] for number in self.saved)


class _Binder:
    """Binds instructions to a device, a dtype and the lanes of a communicator."""

    def __init__(self, means: Means, uploads: Uploads, dtype: torch.dtype) -> None:
        self._means = means
        self._uploads = uploads
        self._dtypes = {INPUT: dtype, WIDE: lse_dtype(dtype)}

    def step(self, instruction: Instruction, frees: tuple[int, ...]) -> BoundInstruction:
        """Return the step of an instruction, after which values are freed."""
        if instruction.operation == "post":
            constants: tuple[Any, ...] = (self._post(instruction),)
        else:
            constants = tuple(self._constant(one) for one in instruction.constants)
        return BoundInstruction(
            getattr(Replay, instruction.operation),
            instruction.ins,
            instruction.outs,
            constants,
            frees,
        )

    def _constant(self, constant: Any) -> Any:
        if isinstance(constant, Index):
            return self._uploads.indices[constant.number]
        if isinstance(constant, RowsSpec):
            return self._rows(constant)
        if isinstance(constant, CallReference):
            return self._uploads.segments[constant.number]
        if isinstance(constant, str):
            return self._dtypes[constant]
        return constant

    def _rows(self, rows: RowsSpec) -> Rows:
        if rows.array is not None:
            return self._uploads.indices[rows.array]
        assert rows.start is not None, "rows of another rank are not bound"
        return slice(rows.start, rows.start + rows.tokens)

    def _post(self, instruction: Instruction) -> BoundPost:
        number, spec, made = instruction.constants
        position = {value: at for at, value in enumerate((*instruction.ins, *instruction.outs))}
        return BoundPost(
            number=number,
            made=tuple((shape, self._dtypes[dtype]) for _, shape, dtype in made),
            lanes=self._lanes(spec, position),
            label=spec.label,
        )

    def _lanes(self, spec: PostSpec, position: dict[int, int]) -> tuple[LaneMessages, ...]:
        """Return the messages of a post by lane, lanes in one order on all ranks. position: of
        each value among the tensors of the post."""
        communicator = self._means.communicator
        sends: dict[Lane, list[tuple[int, int, int]]] = {}
        recvs: dict[Lane, list[tuple[int, int, int]]] = {}
        for by_lane, messages in ((sends, spec.sends), (recvs, spec.recvs)):
            for value, peer, tag in messages:
                by_lane.setdefault(communicator.lane(peer), []).append(
                    (position[value], peer, tag)
                )
        lanes = []
        for lane in communicator.lanes:
            if lane in sends or lane in recvs:
                lanes.append(
                    LaneMessages(lane, tuple(sends.pop(lane, ())), tuple(recvs.pop(lane, ())))
                )
        left = {**sends, **recvs}
        assert not left, f"{list(left)} are not lanes of this rank: {spec}"
        return tuple(lanes)
