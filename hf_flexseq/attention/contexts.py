"""The contexts that a model is called with, one for each micro-batch."""

from collections.abc import Collection

import torch

from hf_flexseq.attention.context import SequenceContext
from hf_flexseq.attention.programs import MicroBatchPrograms
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan.blocks import NO_BLOCKS, Blocks
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.shard import Shard
from hf_flexseq.program.passes import PlanPasses


class ModelContexts:
    """Makes the contexts of one model's micro-batches."""

    def __init__(
        self,
        communicator: Communicator,
        kernel: Kernel,
        device: torch.device,
        *,
        save_attention_output: bool,
        passes: PlanPasses | None = None,
        both_ways: Collection[int] = (),
    ) -> None:
        """passes: the planner's passes, if it has any. both_ways: layers that show images both
        ways. Others: see `SequenceContext`."""
        self._communicator = communicator
        self._kernel = kernel
        self._device = device
        self._save_attention_output = save_attention_output
        self._passes = passes
        self._both_ways = both_ways
        self._former_programs: MicroBatchPrograms | None = None  # of the last context

    def __call__(
        self, shard: Shard, blocks: Blocks = NO_BLOCKS, memory: MemoryChoice | None = None
    ) -> SequenceContext:
        """Return a shard's context, with programs for the layers of the previous micro-batch.
        blocks, memory: see `SequenceContext`."""
        context = SequenceContext(
            shard,
            self._communicator,
            self._kernel,
            self._device,
            save_attention_output=self._save_attention_output,
            memory=memory,
            passes=self._passes,
            blocks=blocks,
            both_ways=self._both_ways,
        )
        if self._former_programs is not None:
            context.programs.prepare(self._former_programs.keys)
        self._former_programs = context.programs
        return context
