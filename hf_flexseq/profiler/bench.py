"""The runs of a calibration: parts of a layer, and micro-batches of copies of the model.

`measure.py` times them. A copy of the model is all that the profiler knows of it: a `Probe`, which
the caller's `ProbeFactory` makes.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.layers import Reach, RecurrentShape
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.profiler.design import (
    Design,
    LayerType,
    ProbeLayout,
    ProbeShape,
    all_reaches,
    alone,
    in_groups,
    timed_bytes,
    types_of_copy,
)
from hf_flexseq.profiler.host import ALL_TO_ALLS, RING
from hf_flexseq.profiler.recurrent_runs import ScanRun, SecondPassRun
from hf_flexseq.profiler.runs import (
    AllToAllRun,
    CountingKernel,
    KernelRun,
    LayerCall,
    LayerRun,
    Repeated,
    RingRun,
    Run,
)


class Probe(Protocol):
    """A copy of the model, made to be timed."""

    def run(self, layout: ProbeLayout, kernel: Kernel) -> Run:
        """Return a function that runs one micro-batch, forward and backward."""
        ...


class ProbeFactory(Protocol):
    """The maker of copies of a model; the only thing the profiler knows about the model itself."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that attention computes in."""
        ...

    @property
    def calls(self) -> Mapping[Reach, LayerCall]:
        """What the attention of the layers of each reach is called with."""
        ...

    @property
    def recurrent(self) -> Mapping[str, RecurrentShape]:
        """The sizes of the recurrent layers of each kind."""
        ...

    @property
    def replays(self) -> bool:
        """Whether layers compute again in the backward."""
        ...

    def kernel(self) -> Kernel:
        """Choose the kernel that serves all layers."""
        ...

    def __call__(self, types: Mapping[LayerType, int]) -> Probe:
        """Make a copy with so many layers of each type."""
        ...


class Bench:
    """Makes runs with copies of the model of all depths and with one layer of it."""

    def __init__(
        self,
        design: Design,
        probes: ProbeFactory,
        shape: ModelShape,
        estimate: CostModel,
        communicator: Communicator,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._communicator = communicator
        self._device = device
        self._dtype = probes.compute_dtype
        self._probes = {}
        for layers in design.depths:
            self._probes[layers] = probes(types_of_copy(shape, layers))
        # bytes that one layer moves for each token of a group
        self._exchanged, self._passed_on = timed_bytes(estimate, shape)
        self._calls = probes.calls
        self._recurrent = probes.recurrent
        self._replays = probes.replays
        self._kernel = probes.kernel()
        self._forwards = self._forwards_per_backward()

    def _forwards_per_backward(self) -> int:
        """Count how often attention runs forward for one backward: checkpointing may repeat it."""
        counting = CountingKernel(self._kernel)
        layout = alone((8,), self._communicator.topology)  # any few tokens will do
        probe = next(iter(self._probes.values()))
        run = probe.run(layout, counting)
        run()
        if not counting.backwards:  # a model without attention
            return 1
        return counting.forwards // counting.backwards

    def whole_run(self, layout: ProbeLayout, layers: int) -> Run:
        """Return a run of one micro-batch by the copy of `layers` layers."""
        return self._probes[layers].run(layout, self._kernel)

    def kernel_run(self, tokens: int, reach: Reach) -> KernelRun:
        """Return a run of one layer's attention over a sequence of `tokens` tokens. reach: of the
        layer."""
        return KernelRun(
            self._kernel,
            tokens,
            self._calls[reach],
            forwards=self._forwards,
            reach=reach,
            dtype=self._dtype,
            device=self._device,
        )

    def layer_run(self, shape: ProbeShape) -> Run:
        """Return a run of one layer's attention, or of its transfers."""
        (tokens,) = shape.lengths
        if shape.strategy == "kernel":
            return self.kernel_run(tokens, shape.reach)
        if shape.strategy in ("scan", "again"):
            return self._scan_run(shape.strategy, tokens, self._recurrent[shape.recurrent])

        tokens_per_rank = tokens / shape.degree
        if shape.strategy == "ulysses":
            return AllToAllRun(
                self._communicator,
                shape.starts,
                shape.degree,
                bytes_moved=int(self._exchanged * tokens_per_rank),
                device=self._device,
            )
        return RingRun(
            self._communicator,
            shape.starts,
            shape.degree,
            bytes_moved=int(self._passed_on * tokens_per_rank * (shape.degree - 1)),
            device=self._device,
        )

    def _scan_run(self, what: str, tokens: int, sizes: RecurrentShape) -> Run:
        """Return a run of one recurrent layer on a sequence of each rank, or of its second
        pass."""
        topology = self._communicator.topology
        layout = alone((tokens,), topology)
        context = SequenceContext(
            make_shard(layout.micro_batch, layout.lengths, self._communicator.rank),
            self._communicator,
            self._kernel,
            self._device,
            save_attention_output=self._forwards == 1,  # scans are kept as attention is
        )
        options: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        if what == "again":
            return SecondPassRun(sizes, context, tokens, **options)
        return ScanRun(sizes, context, tokens, replays=self._replays, **options)

    def small_run(self, shape: ProbeShape) -> Run:
        """Return a run of one layer's attention in groups, or of its bare transfers."""
        communicator = self._communicator
        options: dict[str, Any] = {"bytes_moved": 0, "device": self._device}
        if shape.strategy == ALL_TO_ALLS:
            return Repeated(AllToAllRun(communicator, shape.starts, shape.degree, **options))
        if shape.strategy == RING:
            return Repeated(RingRun(communicator, shape.starts, shape.degree, **options))
        layout = in_groups(shape)
        return LayerRun(
            communicator,
            layout.micro_batch,
            layout.lengths,
            self._kernel,
            self._calls[all_reaches(self._shape)[0]],
            dtype=self._dtype,
            device=self._device,
        )

    def ring_bytes(self, tokens_per_rank: int, degree: int) -> int:
        """Count the bytes that a rank of a ring moves in one layer."""
        return int(self._passed_on * tokens_per_rank) * (degree - 1)
