"""Training steps that have run: their figures, and any values in them that were NaN or infinite.

Both are on every rank. On a GPU a step's figures are gathered at the end of the next step, when
the host can read them without waiting for the device.

Ranks meet before they wait for devices: a device whose peer is lost never ends its work and
reports nothing, and the CPU group names the peer.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.steps.nonfinite import NonfiniteWatch
from hf_flexseq.steps.prefetch import Step
from hf_flexseq.steps.trace import LogFigures, PlanTrace


class FinishedSteps:
    """Gathers the figures of steps that have run, and looks for values that are not finite."""

    def __init__(
        self,
        accelerator: Accelerator,
        communicator: Communicator,
        args: FlexSeqArguments,
        *,
        figures_of: Callable[[Step, PlanTrace], LogFigures],
        on_figures: Callable[[int, LogFigures], None] | None,
    ) -> None:
        """Collective over the world. figures_of: writes the trace of a step and returns its
        figures. on_figures: gets the number and the figures of each step as soon as they are
        known.

        Raises ValueError for a plan trace that cannot be written.
        """
        self._accelerator = accelerator
        self._cpu_group = communicator.cpu_group
        self._figures_of = figures_of
        self._trace = PlanTrace(args.plan_trace, communicator)
        self._watch = NonfiniteWatch(args.on_nonfinite, communicator.rank)
        self._on_figures = on_figures
        self._unread: Step | None = None  # has run, and its figures have not been gathered
        self.last_figures: LogFigures | None = None
        """Figures of the last step for which they were gathered."""

    def settle(self) -> None:
        """Count the last step in `check`, since its optimizer step is done."""
        self._watch.settle(skipped=step_was_skipped(self._accelerator))

    def look_at(self, step: Step, model: nn.Module) -> None:
        """Look for NaN and infinity in a step that has run, before its optimizer step, without
        waiting. model: as accelerate has wrapped it."""
        self._watch.take(step.number, step.final_loss, gradients_of(model, self._accelerator))

    def add(self, step: Step) -> None:
        """Gather the figures of a step that has run, or of the one before. Collective over the
        world. Raises FloatingPointError as `check` does, for the step before."""
        due: Step | None = step
        if step.stopwatch.is_behind:
            due, self._unread = self._unread, step
        self._gather(due)
        self._cpu_group.phase = f"what follows on step {step.number}"

    def gather_figures(self) -> None:
        """Gather postponed figures. Collective over the world."""
        due, self._unread = self._unread, None
        if due is not None:
            self._gather(due)

    def check(self) -> None:
        """Gather all figures after an optimizer step. Collective over the world. Raises
        FloatingPointError on all ranks alike, or warns, if anything in a step was not finite."""
        self.settle()
        due, self._unread = self._unread, None
        self._cpu_group.barrier()  # devices may still be at work on the step
        self._gather(due)

    def forget(self) -> None:
        """Forget figures that were not gathered."""
        self._watch.forget()
        self._unread = None

    def _gather(self, due: Step | None) -> None:
        """Gather NaN reports, which are of a step after which ranks have met, and then the figures
        of a step that is due. Collective over the world."""
        if due is not None:
            self._cpu_group.phase = f"step {due.number}, gathering its figures"
        reports = self._cpu_group.gather_values(self._watch.report())
        if due is not None:
            figures = self._figures_of(due, self._trace)
            self.last_figures = figures
            if self._on_figures is not None:
                self._on_figures(due.number, figures)
        self._watch.judge(reports)


# ---- gradients, where accelerate leaves them


ALL_BY_NORM = "all parameters (by DeepSpeed's norm)"
_WRAPPED = "module."  # what DDP and the wrapper of a stage put before every name


def gradients_of(model: nn.Module, accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """Return this rank's gradients by the names of their parameters, after the last backward of a
    step and before its optimizer step.

    model: as accelerate has wrapped it, and as the step ran it.

    DeepSpeed steps within the last backward and then has no gradients any more, but the norm of
    all of them, which names none; {} if it computes none.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _norm_of_all(model, accelerator.device)
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name.removeprefix(_WRAPPED)] = parameter.grad
    return gradients


def _norm_of_all(engine: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Return DeepSpeed's norm of all gradients, a scalar; NaN for its -1, which is not finite."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return {}
    if not isinstance(norm, torch.Tensor):
        norm = torch.full((), float(norm), device=device)
    return {ALL_BY_NORM: norm.where(norm >= 0, torch.nan)}


def step_was_skipped(accelerator: Accelerator) -> bool:
    """Tell if fp16's loss scaling has made the optimizer skip its last step. DeepSpeed also skips
    steps without a loss scale, if a gradient is not finite."""
    if not accelerator.optimizer_step_was_skipped:
        return False
    is_deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return not is_deepspeed or accelerator.mixed_precision == "fp16"
