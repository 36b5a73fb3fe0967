"""The steps of a hand-written loop: in training, and in evaluation.

    for step in engine.steps(dataloader):
        step.backward(model)
        print(step.mean_loss())
        ...

    evaluation = engine.evaluation(held_out)
    for step in evaluation:
        step.forward(model)
    print(evaluation.mean_loss())

`engine.steps` and `engine.evaluation` make them.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_flexseq.hf.engine.evaluation import EvaluationLoss, PlanSteps, once_each
from hf_flexseq.hf.engine.out_of_memory import noted
from hf_flexseq.hf.engine.sum_trial import SumTrial, loss_of_model
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.prefetch import Step

# step, and in training the model -> the inputs of one micro-batch after the other
MicroBatches = Callable[..., Generator[Inputs, None, None]]


class LoopItem:
    """A planned step, as a hand-written loop gets it."""

    __slots__ = ("_has_run", "_micro_batches", "_trial", "_whole_model", "step")

    def __init__(
        self, step: Step, whole_model: WholeModel, trial: SumTrial, micro_batches: MicroBatches
    ) -> None:
        self.step = step
        self._whole_model = whole_model
        self._trial = trial
        self._micro_batches = micro_batches
        self._has_run = False  # to its end

    @property
    def plan(self) -> Any:
        """The plan of the whole step, over all ranks."""
        return self.step.plan

    def mean_loss(self) -> float:
        """Return the loss of this step, which has run: the mean over all its target tokens, nan
        without any. Collective over the world."""
        self.check_has_run()
        own = EvaluationLoss()
        own.add(self.step.final_loss, self.step.targets)
        return own.mean(self._whole_model.setup.communicator)

    def check_has_run(self) -> None:
        """Raise RuntimeError if the loop has gone on without the call that runs the step."""
        if not self._has_run:
            raise RuntimeError(
                f"step {self.step.number} has not run: call step.backward(model) in training, and "
                "draw from engine.evaluation(dataloader) to evaluate, with step.forward(model)"
            )

    def _check_model(self, model: nn.Module) -> None:
        """Raise RuntimeError if the step has run, ValueError for another model than its own."""
        if self.step.loss is not None:
            raise RuntimeError(f"step {self.step.number} has run: draw another one")
        whole = extract_model_from_parallel(model, keep_torch_compile=False)
        if base_model(whole) is not self._whole_model.base:
            raise ValueError(
                f"step {self.step.number} got a {type(whole).__name__} that is not the model of "
                "engine.attach: another model lets the sequences of a row see each other, so "
                "attach it to an engine of its own"
            )

    def _loss(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """Return this rank's share of a micro-batch's loss, a scalar."""
        loss = loss_of_model(self._whole_model, max(self.step.targets, 1))
        return loss(model, inputs) * self._whole_model.setup.accelerator.num_processes


class TrainingItem(LoopItem):
    """A training step of a hand-written loop."""

    __slots__ = ()

    def backward(self, model: nn.Module) -> torch.Tensor:
        """Run forward and backward of the whole step. Return this rank's share of the loss, a
        detached scalar: its mean over ranks is `mean_loss`. Gradients are of the mean over the
        step's target tokens."""
        self._check_model(model)
        accelerator = self._whole_model.setup.accelerator
        options: dict[str, Any] = {}
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            options["scale_wrt_gas"] = False
        cpu_group = self._whole_model.setup.communicator.cpu_group
        with cpu_group.naming_lost(), noted(self._whole_model.planning, self.step):
            self._trial.run(self.step.row, model, loss_of_model(self._whole_model))
            for inputs in self._micro_batches(self.step, model):
                # DDP, FSDP and DeepSpeed average gradients over ranks, as the loss is.
                loss = self._loss(model, inputs)
                accelerator.backward(loss, **options)
                self.step.add(loss.detach())
        self._has_run = True
        return self.step.final_loss


class EvaluationItem(LoopItem):
    """A step of an `Evaluation`."""

    __slots__ = ("_sum",)

    def __init__(self, step: Step, evaluation: "Evaluation") -> None:
        super().__init__(step, evaluation.whole_model, evaluation.trial, evaluation.micro_batches)
        self._sum = evaluation.sum  # which gets the loss of the step when it runs

    def forward(self, model: nn.Module) -> torch.Tensor:
        """Run the forward of the whole step, without gradients. Return this rank's share of the
        loss, a scalar whose mean over ranks is the mean over targets. model: as accelerate has
        wrapped it."""
        self._check_model(model)
        # DDP would exchange buffers in each forward, and ranks run different numbers of them.
        whole = model.module if isinstance(model, DistributedDataParallel) else model
        with noted(self._whole_model.planning, self.step):
            self._trial.run(self.step.row, whole, loss_of_model(self._whole_model))
            with closing(self._micro_batches(self.step)) as micro_batches:
                for inputs in micro_batches:
                    with torch.no_grad():
                        self.step.add(self._loss(whole, inputs))
        self._has_run = True
        self._sum.add(self.step.final_loss, self.step.targets)
        return self.step.final_loss


@dataclass
class Evaluation:
    """One pass over a dataloader without gradients, in steps of one batch per rank, untraced."""

    dataloader: Iterable[Mapping[str, Any]]
    plan_steps: PlanSteps
    whole_model: WholeModel
    trial: SumTrial
    micro_batches: MicroBatches
    sum: EvaluationLoss = field(default_factory=EvaluationLoss, init=False)

    def __iter__(self) -> Iterator[EvaluationItem]:
        """Yield the steps, each sample once. Raises RuntimeError when the loop goes on without a
        step's forward. Collective over the world."""
        self.sum = EvaluationLoss()
        for step in once_each(self.dataloader, self.plan_steps):
            item = EvaluationItem(step, self)
            yield item
            item.check_has_run()

    def mean_loss(self) -> float:
        """Return the mean loss over all targets so far; nan without any. Collective."""
        return self.sum.mean(self.whole_model.setup.communicator)
