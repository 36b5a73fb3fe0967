"""What an engine's steps are executed by, which depends on how much of the model a rank has.

    WholeModelExecutor    all of it: a plan is micro-batches of groups (`whole_model.py`)
    StageExecutor         one stage of a pipeline: a plan is chunks and actions
                          (`pipeline/executor.py`)

`FlexSeqEngine` does everything that is alike: it draws, plans ahead, traces. It asks its
`Executor` for the rest, and never which of the two it has.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from accelerate import Accelerator
from torch import nn
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.cost import CostModel
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.connect import connect
from hf_flexseq.hf.calibration.source import CostSource, named_cost
from hf_flexseq.hf.model.facts import compute_dtype, layer_calls
from hf_flexseq.hf.model.router import RouterLoss
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.kinds import choose_kernels
from hf_flexseq.memory.machine import budget_bytes
from hf_flexseq.planner.process.client import InlinePlanner, Planner, PlannerWorker
from hf_flexseq.planner.process.jobs import Job
from hf_flexseq.program.tags import HEAD_PIECES
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.prefetch import ImageReader, VersionedJob
from hf_flexseq.steps.source_row import PlannedStep
from hf_flexseq.steps.trace import LogFigures, PlanTrace

# ---- what an executor is


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """Holds all that an engine has before it has seen a model; its executor is made from it."""

    accelerator: Accelerator
    args: FlexSeqArguments
    communicator: Communicator

    costs: CostSource
    """Source of the cost model."""

    @classmethod
    def of(
        cls,
        accelerator: Accelerator,
        args: FlexSeqArguments,
        communicator: Communicator | None,
        *,
        timeout: timedelta | None = None,
    ) -> "EngineSetup":
        """Connect the ranks, unless `communicator` does already, and load the named cost model.
        Collective over the world.

        timeout: of every exchange; None takes that of the job's group. Raises ValueError, on all
        ranks, for a cost model that does not exist on rank 0's machine, and where the ranks cannot
        be connected.
        """
        if communicator is None:
            communicator = Communicator(transport=connect(accelerator.device, timeout=timeout))
        return cls(
            accelerator=accelerator,
            args=args,
            communicator=communicator,
            costs=CostSource(
                args.cost_model,
                named_cost(args.cost_model, communicator),
                accelerator,
                communicator,
            ),
        )

    def host_bytes(self) -> int:
        """Return the most bytes of the host for activations of this rank, by what the machine has
        now. Raises ValueError if the user asks for more than it has at all."""
        return budget_bytes(self.args.host_memory_gib, self.communicator.topology.ranks_per_node)


class Executor(Protocol):
    """Runs the steps of one model. Calls: `attach`; `planner`; for each step `check` (on rank 0),
    `read`, `dispatch`, `micro_batches`, `figures`; finally `detach`."""

    @property
    def setup(self) -> EngineSetup:
        """Setup of all executors."""

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the whole model; None before it is known."""

    @property
    def attached(self) -> bool:
        """True between `attach` and `detach`."""

    @property
    def trainer_hooks(self) -> Any:
        """Trainer hooks for ranks that hold one stage (`pipeline/hooks.py`); None for others."""

    @property
    def router(self) -> RouterLoss | None:
        """The router loss of the attached model; None without one."""

    @property
    def reason_not_shared(self) -> str | None:
        """Why rows of the attached model's steps may not share prefixes; None if they may."""

    @property
    def reason_without_choices(self) -> str | None:
        """Why no plan may choose where activations of the attached model are; None if it may."""

    @property
    def keeps_own_loss(self) -> bool:
        """True if the attached model computes its loss itself, of all logits at once."""

    @property
    def images(self) -> ImageReader | None:
        """What reads the images of rows, or refuses them; None for a model of text."""

    @property
    def virtual_tokens(self) -> int:
        """Virtual tokens that the attached model puts in front of each sequence."""

    def attach(self, model: nn.Module, *, lockstep: bool) -> None:
        """Make `model` run on planned steps. Collective over the world. lockstep: True if
        something outside makes all ranks run every micro-batch together."""

    def detach(self) -> None:
        """Leave the model and the accelerator as `attach` found them."""

    def planner(self, *, ahead: bool) -> Planner:
        """Make the planner of rank 0. ahead: in a process of its own."""

    @property
    def jobs(self) -> VersionedJob | None:
        """Jobs of training steps, which change with what steps teach; None if they stay."""

    def check(self, plan: Any) -> None:
        """Raise ValueError for a plan that would compute something wrong or hang."""

    def read(self, data: bytes) -> Any:
        """Return the plan whose `to_bytes` gave `data`."""

    def dispatch(self, planned: PlannedStep) -> Any:
        """Dispatch the drawn tokens; return this rank's step. Collective over the world."""

    def micro_batches(self, step: Any, model: nn.Module, *, trains: bool) -> Iterator[Inputs]:
        """Yield the inputs of every micro-batch of a whole model, whose losses the caller adds to
        the step; a stage runs its actions itself, sets the loss of the step, and yields nothing.
        Collective over the world.

        Afterwards `step.loss` is this rank's loss, a scalar; the mean over ranks is the mean over
        target tokens. trains: True if gradients are computed and reduced. model: as accelerate has
        wrapped it.
        """

    def figures(self, step: Any, trace: PlanTrace) -> LogFigures:
        """Write a finished step's trace; return its figures. Collective over the world."""


# ---- what both executors use


def planner_of(job: Job, *, ahead: bool) -> Planner:
    """Return a planner for `job`, in a separate process if steps are planned ahead."""
    if ahead:
        return PlannerWorker(job)
    return InlinePlanner(job)


def kernel_of(
    setup: EngineSetup, model: PreTrainedModel, degrees: Iterable[int], *, whose: str = ""
) -> Kernel:
    """Return a kernel for all attention layers of a model. Raises ValueError, on all ranks,
    without one. Collective over the world.

    degrees: numbers of ranks that may share heads. whose: words for the error.
    """
    device = setup.accelerator.device
    pieces = {1: 1}
    for degree in degrees:
        spans_nodes = setup.communicator.topology.spans_nodes(0, degree)
        pieces[degree] = HEAD_PIECES if spans_nodes else 1
    with ErrorCapture() as choosing:
        dtype = compute_dtype(model, setup.accelerator)
        kernel = choose_kernels(device, dtype, layer_calls(model.config, pieces))
    choosing.raise_on_all_ranks(
        setup.communicator.cpu_group.gather_values, f"choosing the attention kernel{whose}"
    )
    return kernel


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model, without PEFT's wrapper. Raises ValueError for a model that
    accelerate has wrapped or compiled, NotImplementedError for one of another library."""
    is_wrapped = isinstance(getattr(model, "module", None), nn.Module)
    if is_wrapped and not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"attach the model before accelerator.prepare wraps it in {type(model).__name__}"
        )
    if isinstance(model, OptimizedModule):
        raise ValueError("attach the model before it is compiled by torch.compile or prepare")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(base, PreTrainedModel):
        raise NotImplementedError(f"expected a transformers model, got {type(base).__name__}")
    return base
