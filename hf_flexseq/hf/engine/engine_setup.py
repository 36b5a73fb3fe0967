"""The parts that an engine has before it has seen a model: the accelerator, the options, the
ranks, and the source of its cost model.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine.cost_source import CostSource
from hf_flexseq.hf.model.facts import compute_dtype, layer_calls
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.kinds import choose_kernels
from hf_flexseq.memory.machine import budget_bytes
from hf_flexseq.program.tags import HEAD_PIECES


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """The parts of an engine before it has seen a model."""

    accelerator: Accelerator
    args: FlexSeqArguments
    communicator: Communicator

    costs: CostSource
    """Source of the cost model."""

    def host_bytes(self) -> int:
        """Return the most bytes of the host for activations of this rank, by the memory that the
        machine has now. Raises ValueError if the user asks for more than it has at all."""
        return budget_bytes(self.args.host_memory_gib, self.communicator.topology.ranks_per_node)

    def kernel_for(
        self, model: PreTrainedModel, degrees: Iterable[int], *, whose: str = ""
    ) -> Kernel:
        """Return a kernel for all attention layers of a model. Raises ValueError, on all ranks,
        without one. Collective over the world.

        degrees: numbers of ranks that may share heads. whose: words for the error.
        """
        pieces = {1: 1}
        for degree in degrees:
            spans_nodes = self.communicator.topology.spans_nodes(0, degree)
            pieces[degree] = HEAD_PIECES if spans_nodes else 1
        with ErrorCapture() as choosing:
            dtype = compute_dtype(model, self.accelerator)
            layers = layer_calls(model.config, pieces)
            kernel = choose_kernels(self.accelerator.device, dtype, layers)
        choosing.raise_on_all_ranks(
            self.communicator.cpu_group.gather_values, f"choosing the attention kernel{whose}"
        )
        return kernel
