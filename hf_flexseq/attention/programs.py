"""The programs of a micro-batch, compiled and bound: once for all layers of one shape."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch

from hf_flexseq.attention.bound_programs import BoundProgram
from hf_flexseq.attention.uploads import Uploads
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.scans.grid import ChunkGrid
from hf_flexseq.program.compile import FORWARD, Parts, compile_program
from hf_flexseq.program.instructions import LayerShape, Program, RowShape
from hf_flexseq.program.passes import ProgramPass

Made = TypeVar("Made")

# (FORWARD, BACKWARD or BACKWARD_OF_ROWS, the layer), or (what a recurrent layer exchanges, its
# rows); see `program.compile`
ProgramKey = tuple[str, LayerShape | RowShape]


def layer_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    reach: Reach = FULL,
    sinks: torch.Tensor | None = None,
    *,
    both_ways: bool = False,
) -> LayerShape:
    """Return the shape of a layer: q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim]."""
    return LayerShape(
        query_heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        dtype=str(q.dtype).removeprefix("torch."),
        reach=reach,
        sinks=sinks is not None,
        both_ways=both_ways,
    )


class MicroBatchPrograms:
    """Compiles a program when a layer first asks for it, or ahead."""

    def __init__(
        self,
        parts: Parts,
        communicator: Communicator | None,
        kernel: Kernel,
        device: torch.device,
        *,
        rewrite: ProgramPass | None = None,
    ) -> None:
        """parts: programs are compiled from them. rewrite: a pass over each compiled program."""
        self.parts = parts
        self._communicator = communicator
        self._kernel = kernel
        self._rewrite = rewrite
        self._uploads = Uploads(parts.tables, device)
        self._made: dict[Hashable, Any] = {}
        self._compiled: dict[ProgramKey, Program] = {}
        self._bound: dict[ProgramKey, BoundProgram] = {}

    def find(self, direction: str, shape: LayerShape | RowShape) -> BoundProgram:
        """Return the program of a direction, or of an exchange of recurrent layers (`of_rows`)."""
        key = (direction, shape)
        if key not in self._bound:
            self.prepare([key])
        return self._bound[key]

    def prepare(self, keys: Iterable[ProgramKey]) -> None:
        """Make the missing programs of these keys; their integers go to the device."""
        new = [key for key in keys if key not in self._bound]
        for direction, shape in new:
            self._compile(direction, shape)
        self._uploads.bring()
        for direction, shape in new:
            self._bound[direction, shape] = BoundProgram(
                self._compiled[direction, shape],
                self._uploads,
                self._communicator,
                self._kernel,
                getattr(torch, shape.dtype),
            )

    @property
    def keys(self) -> tuple[ProgramKey, ...]:
        """Keys of the bound programs."""
        return tuple(self._bound)

    @property
    def computes(self) -> bool:
        """False with a stand-in for a kernel, which makes tensors and computes nothing
        (`memory/live_bytes.py`): neither do recurrent layers then, block by block of rows."""
        found: bool = getattr(self._kernel, "computes", True)
        return found

    @property
    def grid(self) -> ChunkGrid:
        """The chunks in which recurrent layers go through this rank's segments."""
        device, computes = self._uploads.device, self.computes
        return self.once("grid", lambda lengths: ChunkGrid(lengths, device, computes=computes))

    def once(self, name: Hashable, make: Callable[[tuple[int, ...]], Made]) -> Made:
        """Return the result of `make` for the lengths of this rank's segments, cached by name."""
        if name not in self._made:
            self._made[name] = make(self.parts.segments().lengths)
        made: Made = self._made[name]
        return made

    def index(self, number: int) -> torch.Tensor:
        """Return an index array of the tables, int64 [n], on the device."""
        self._uploads.bring()
        return self._uploads.indices[number]

    def _compile(self, direction: str, shape: LayerShape | RowShape) -> Program:
        """Return a program, which is compiled once."""
        key = (direction, shape)
        if key not in self._compiled:
            forward = None
            if isinstance(shape, LayerShape) and direction != FORWARD:
                forward = self._compile(FORWARD, shape)
            program = compile_program(self.parts, direction, shape, forward)
            if self._rewrite is not None:
                program = self._rewrite(program, direction, shape)
            self._compiled[key] = program
        return self._compiled[key]
