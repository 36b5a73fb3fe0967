"""The micro-batch that attention works on, as one object that travels with the call.

SequenceContext    of one micro-batch
ModelContexts      makes those of one model, which has the same layers in all of them
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from hf_flexseq.attention.programs import MicroBatchPrograms
from hf_flexseq.attention.remat import KeptAttention
from hf_flexseq.attention.replay import CutAttention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan.blocks import NO_BLOCKS, Blocks
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.shard import Shard
from hf_flexseq.program.compile import parts_of
from hf_flexseq.program.passes import PlanPasses
from hf_flexseq.program.zones import Machine


class SequenceContext:
    """A rank's shard of one micro-batch, with the programs that its attention runs.

    It is passed as the keyword `seq_ctx` to `model(...)` and arrives in every attention layer, in
    the forward and in the replay of a checkpointed one. Never a module-level "current" value: that
    is wrong as soon as two micro-batches are in flight. A plain class on purpose: FSDP2's input
    cast takes dataclasses, tuples and dicts apart and builds them anew at every unit.
    """

    __slots__ = (
        *("both_ways", "calls", "cut", "images", "kept", "memory", "noise", "programs"),
        *("row_counts", "shard", "target_counts", "virtual_tokens"),
    )

    def __init__(
        self,
        shard: Shard,
        communicator: Communicator,
        kernel: Kernel,
        device: torch.device,
        *,
        save_attention_output: bool = True,
        memory: MemoryChoice | None = None,
        passes: PlanPasses | None = None,
        blocks: Blocks = NO_BLOCKS,
        both_ways: Collection[int] = (),
    ) -> None:
        """Lay out the zones of this rank; no communication. passes: the planner's.
        save_attention_output: True if checkpointed layers keep the result of attention. memory:
        the plan's choice, which replaces this and the run's checkpointing. blocks: by sequence the
        tokens that see both ways in layers that ask for it (`plan/blocks.py`), of all sequences of
        this rank's groups, the same on all ranks of a group. both_ways: numbers of these layers.

        Raises ValueError for blocks that do not fit, or that a group's strategy cannot compute.
        """
        self.shard = shard
        self.both_ways = both_ways
        self.calls: list[Any] | None = None
        """Modules that have called attention in the forward that runs; None outside of one."""
        self.row_counts: torch.Tensor | None = None
        """[tokens] How many rows have each token, 0 for a dummy; None where none share any."""
        self.target_counts: torch.Tensor | None = None
        """[tokens] How many rows have each token as one with a target; None as above."""
        self.noise: Any = None
        """Adds noise to embedded tokens; None in a run without noise."""
        self.virtual_tokens: Any = None
        """Which tokens are virtual; None for a model that has no virtual tokens."""
        self.images: Any = None
        """Gives the features of this micro-batch's images; None in a step without images."""
        self.memory = memory
        """The plan's choice for activations; None for the user's setting of the run."""
        keeps_any = save_attention_output or memory is not None
        self.kept = KeptAttention() if keeps_any else None
        self.cut: CutAttention | None = None  # a micro-batch has whole sequences
        machine = Machine(
            topology=communicator.topology,
            device=device.type,
            wide_gradients=kernel.wide_gradients,
        )
        parts = parts_of(shard, machine, blocks)
        rewrite = None if passes is None else passes.of_programs(shard, machine)
        self.programs = MicroBatchPrograms(parts, communicator, kernel, device, rewrite=rewrite)

    def of_layer(self, layer: int | None, *, keeps_grad: bool) -> "SequenceContext":
        """Return this: a micro-batch is the same for all layers."""
        return self

    def carrying(self, *, keeps_grad: bool) -> None:
        """Return None: no sequence of a micro-batch is cut into chunks."""
        return

    @property
    def tokens(self) -> int:
        """Tokens this rank holds in norms, MLP and head."""
        return self.shard.tokens


class ModelContexts:
    """Makes the contexts of one model's micro-batches."""

    def __init__(self, make: Callable[..., SequenceContext]) -> None:
        """make: `SequenceContext`, with the arguments that all micro-batches have in common."""
        self._make = make
        self._former_programs: MicroBatchPrograms | None = None  # of the last context

    def __call__(
        self, shard: Shard, blocks: Blocks = NO_BLOCKS, memory: MemoryChoice | None = None
    ) -> SequenceContext:
        """Return a shard's context, with programs for the layers of the previous micro-batch.
        blocks, memory: see `SequenceContext`."""
        context = self._make(shard, blocks=blocks, memory=memory)
        if self._former_programs is not None:
            context.programs.prepare(self._former_programs.keys)
        self._former_programs = context.programs
        return context
