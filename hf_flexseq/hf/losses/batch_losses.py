"""The losses of one step's batches, and their gradients with respect to figures of tokens.

The trainer's own `training_step` computes each of them. Its calls of the model are answered from
figures (`answers.py`), at which its backward ends. A loss may also have a term of the model's
parameters, such as a penalty. The parameters' gradients are kept beside the figures' gradients,
and come in with the first backward of a micro-batch as the term

    sum over parameters of (gradient * parameter),

so any code that reduces gradients, or scales them, finds one backward of one loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_flexseq.base.patches import Patch
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine.loaders import LoaderState
from hf_flexseq.hf.losses.answers import POLICY, Answers
from hf_flexseq.hf.losses.heads import Head
from hf_flexseq.hf.losses.step_loss import RunStep
from hf_flexseq.hf.losses.watch import WeightWatch, no_gradients_yet
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.logged_loss import filtered
from hf_flexseq.steps.source_row import Columns


class BatchLosses:
    """The losses of one step's batches: an `Objective` of `figure_passes.py`."""

    def __init__(
        self,
        trainer: Trainer,
        head: Head,
        answers: Answers,
        model: nn.Module,
        batches: Sequence[Any],
        calls: Sequence[ModelCall],
    ) -> None:
        """model: as accelerate has wrapped it. batches: as the trainer has prepared them. calls:
        with gradients, one of each batch."""
        self._trainer: Any = trainer
        self._head = head
        self._answers = answers
        self._model = model
        self.batches = batches
        self.calls = calls
        self.totals = head.totals
        self._leaves: list[Columns] = []  # figures of each batch, at which its backward ends
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        """Those that are trained."""
        self.had_gradients = any(one.grad is not None for one in self.parameters)
        """True if some of them had gradients before the step."""
        self._index_of = {id(one): index for index, one in enumerate(self.parameters)}
        self.of_parameters: dict[int, torch.Tensor] = {}
        """Gradients of a term of parameters, by the index of each, until a backward."""
        self.has_term = False
        """True if the losses have a term of parameters."""
        device = self._trainer.args.device
        self.total = torch.zeros((), device=device)
        """The sum of the losses, a scalar. A batch without labels, of which models have a loss of
        NaN and gradients of 0, has no part in it."""
        self.logged = torch.zeros((), device=device)
        """The sum of the losses as the Trainer would log it, a scalar."""

    # ---- the passes

    def forward(self, inputs: Inputs, weights: Columns | None = None) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...]. weights: see
        `Objective.forward`."""
        with self._trainer.compute_loss_context_manager():
            return self._head.forward(self._model, inputs, weights)

    def backward(self, weighted: torch.Tensor) -> None:
        """Run backward of a scalar, as the trainer does; the first one of a second pass brings in
        a term of parameters."""
        for index, gradient in self.of_parameters.items():
            weighted = weighted + _product(gradient, self.parameters[index])
        self.of_parameters = {}
        options = {"scale_wrt_gas": False} if self._trainer.is_deepspeed_enabled else {}
        self._trainer.accelerator.backward(weighted, **options)

    def drop_gradients(self) -> None:
        """Drop the gradients of a pass, before which there were none."""
        for parameter in self.parameters:
            parameter.grad = None

    # ---- the losses

    def compute(
        self, figures: Columns, items: Any, run: RunStep, loader_state: LoaderState
    ) -> None:
        """Let the trainer run its own step on each batch. Collective over the world if a loss
        makes a call that was not foreseen.

        figures: of this rank's drawn tokens, each [tokens, ...], and totals, on the CPU.
        items: the Trainer's count of targets. run: the Trainer's own `training_step`.
        loader_state: of the loader after the batches.
        """
        # 1. the figures of each batch, at which its backward ends
        self._leaves = self._answers.split(figures, self.calls)
        for call, own in zip(self.calls, self._leaves, strict=True):
            for name in self._head.differentiable:
                if name in own:
                    own[name] = own[name].detach().requires_grad_()
            self._answers.note(POLICY, call, own)

        # 2. the trainer's own steps
        last = len(self.batches) - 1
        weights = WeightWatch(self._trainer, self.parameters)
        with (
            self._answers.answering(self._model),
            Patch(self._answers, check_weights=weights.check),
            Patch(self._trainer.accelerator, backward=self._end_at_figures),
            no_gradients_yet(self._trainer, self._model),
        ):
            for index, batch in enumerate(self.batches):
                with self._answers.loss_of(batch, loader_state, is_last=index == last):
                    self._add(run(self._trainer.model, batch, items).detach(), batch)
            weights.check()

    def _add(self, loss: torch.Tensor, batch: Any) -> None:
        """Add the loss of a batch, a scalar."""
        has_nothing = _is_mean_of_nothing(loss, batch)
        self.total = self.total + torch.where(has_nothing, 0.0, loss)
        self.logged = self.logged + self._filtered(loss)

    def gradients(self, figures: Columns) -> Columns:
        """Return gradients of figures, batches in a row, each [tokens, ...] on the CPU."""
        gradients: Columns = {}
        for name in self._head.differentiable:
            if name not in figures:
                continue
            parts = [own[name].grad for own in self._leaves]
            if name in self.totals:
                found = [part.detach().cpu() for part in parts if part is not None]
                if found:
                    gradients[name] = torch.stack(found).sum(dim=0)
            elif name == self._head.main or any(part is not None for part in parts):
                gradients[name] = _in_a_row(parts, [own[name] for own in self._leaves])
        return gradients

    def _filtered(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scalar that the Trainer would add to its logged losses for another loss."""
        trainer = self._trainer
        if not trainer.args.logging_nan_inf_filter:
            return loss
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        return filtered(loss, before=trainer._tr_loss + self.logged, steps=steps)

    def _end_at_figures(self, loss: torch.Tensor, **options: Any) -> None:
        """Run backward of a loss, a scalar, to the figures, and to whatever else it depends on,
        without fp16 scaling and DeepSpeed, and without the hooks with which DDP and ZeRO reduce a
        parameter's gradient. Raises NotImplementedError for parameters that FSDP2 has
        gathered."""
        if not loss.requires_grad:  # a batch has nothing to learn
            return
        leaves = leaves_of(loss)
        with _without_hooks(leaves):
            gradients = torch.autograd.grad(loss, leaves)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            index = self._index_of.get(id(leaf))
            if index is not None:
                former = self.of_parameters.get(index)
                self.of_parameters[index] = gradient if former is None else former + gradient
                self.has_term = True
                continue
            if any(leaf is one for one in self._model.parameters()):
                raise NotImplementedError(
                    f"the loss of {type(self._trainer).__name__} depends on parameters that FSDP2 "
                    "has gathered for the model's forward: leave the term out, or use weight_decay"
                )
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


@contextmanager
def _without_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep hooks of tensors from their gradients inside the block: a parameter's hooks see the
    gradient of the whole step, in its last backward."""
    hooks = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    kept = [dict(own) for own in hooks]
    for own in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, former in zip(hooks, kept, strict=True):
            own.update(former)


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors, without duplicates, at which the backward of a scalar ends."""
    if loss.grad_fn is None:
        return [loss]
    found: dict[int, torch.Tensor] = {}
    seen = {loss.grad_fn}
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            found[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list(found.values())


def _product(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradient * parameter, a scalar, of this rank's part of both."""
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        gradient, parameter = gradient.to_local(), parameter.to_local()
    return (gradient * parameter).sum()


def _is_mean_of_nothing(loss: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return whether a loss is not finite because its batch has no labels, a boolean tensor."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return torch.zeros_like(loss, dtype=torch.bool)
    has_none = (labels == IGNORE_INDEX).all().to(loss.device)
    return has_none & ~torch.isfinite(loss)


def _in_a_row(parts: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of all batches in a row, on the CPU, zeros for None. like: figures."""
    filled = []
    for part, own in zip(parts, like, strict=True):
        filled.append((torch.zeros_like(own) if part is None else part).detach().cpu())
    return torch.cat(filled)
