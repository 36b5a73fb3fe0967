"""Attention kernel of a model, and the contexts of its micro-batches."""

from transformers import PreTrainedModel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention.programs import MicroBatchPrograms
from hf_flexseq.distributed.agreement import Attempt
from hf_flexseq.hf.executors import EngineSetup
from hf_flexseq.hf.model.facts import compute_dtype, layer_calls
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.kinds import choose_kernels
from hf_flexseq.plan.shard import Shard
from hf_flexseq.program.passes import PlanPasses


class ModelContexts:
    """Makes the contexts of one model's micro-batches."""

    def __init__(self, setup: EngineSetup, kernel: Kernel, passes: PlanPasses | None) -> None:
        """passes: the planner's passes, if it has any."""
        self._setup = setup
        self._kernel = kernel
        self._passes = passes
        self._former_programs: MicroBatchPrograms | None = None  # of the last context

    def __call__(self, shard: Shard) -> SequenceContext:
        """Return the context of one shard, with programs for the layers seen in the previous
        micro-batch."""
        args = self._setup.args
        context = SequenceContext(
            shard,
            self._setup.communicator,
            self._kernel,
            self._setup.accelerator.device,
            save_attention_output=args.save_attention_output,
            passes=self._passes,
        )
        if self._former_programs is not None:
            context.programs.prepare(self._former_programs.keys)
        self._former_programs = context.programs
        return context


def kernel_of(setup: EngineSetup, model: PreTrainedModel) -> Kernel:
    """Return a kernel for all layers of a model. Raises ValueError if there is none."""
    return choose_kernels(
        setup.accelerator.device,
        compute_dtype(model, setup.accelerator),
        layer_calls(model.config),
    )


def kernel_of_run(setup: EngineSetup, model: PreTrainedModel) -> Kernel:
    """Return the kernel of all steps; errors are raised on all ranks. Collective over the
    world."""
    with Attempt() as choosing:
        kernel = kernel_of(setup, model)
    cpu_group = setup.communicator.cpu_group
    choosing.raise_together(cpu_group.gather_values, "choosing the attention kernel")
    return kernel
