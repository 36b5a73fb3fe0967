"""A step of a trainer that computes its loss at home.

`PlannedLoss.train` runs a step:

1. batches         of the whole step, prepared as the trainer prepares them (GRPO generates here)
2. one plan        of all their sequences, over all ranks
3. the reference   and whatever else is asked without gradients, forward only
4. first pass      of the trained model, forward only but for its last micro-batch
5. the loss        the trainer's own `training_step`, batch by batch; where it calls a model, it
                   gets the results of 3 and 4, and its backward ends at them
6. second pass     with the gradients of 5 as weights

Where these gradients are known beforehand (`divergences.py`), one pass does for 4 and 6, and 5
comes last.

In an evaluation, and where a loss asks for something that was not foreseen, a call is planned and
run when it comes (`answering`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_flexseq.hf.engine import FlexSeqEngine
from hf_flexseq.hf.executors import base_model
from hf_flexseq.hf.loaders import (
    BEFORE_END,
    LoaderState,
    as_drawn,
    drawn_batches,
    lengths_of,
)
from hf_flexseq.hf.losses import distills, reads_figures, rolls_out
from hf_flexseq.hf.objectives.divergences import Divergences
from hf_flexseq.hf.objectives.heads import Head, TokenFigures, head_of
from hf_flexseq.hf.objectives.reference import (
    adapter_state,
    attached_reference,
    reference_of,
)
from hf_flexseq.hf.objectives.trainers import Foreseen, foreseen
from hf_flexseq.hf.whole_model import WholeModelExecutor
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.steps.answering import answered_by
from hf_flexseq.steps.calls import Call, joined
from hf_flexseq.steps.exchange import Columns
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.passes import PassStep
from hf_flexseq.steps.training_mode import in_training_mode

POLICY = "policy"
REFERENCE = "reference"

# Runs the trainer's own training_step on a model and a batch.
StockStep = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(slots=True)
class _Result:
    """What a model was found to give for a call."""

    role: str
    call: Call
    figures: Columns
    """Of the call's tokens, each [tokens, ...] on the model's device."""


class PlannedLoss:
    """Computes a trainer's loss, and its gradients, on planned results."""

    def __init__(self, trainer: Trainer, engine: FlexSeqEngine) -> None:
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._engine = engine
        self._head: Head = head_of(
            base_model(trainer.model),
            reads_figures=reads_figures(trainer),
            has_router_loss=getattr(trainer, "aux_loss_enabled", False),
        )
        if distills(trainer):
            self._head = Divergences(trainer)
        # drawing: batches of the steps to come, and the step whose batches were handed out
        self._iterator: Iterator[Any] | None = None
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._drawn: deque[tuple[list[Any], LoaderState]] = deque()
        self._loader_state = BEFORE_END  # when the batches that were handed out had been drawn
        self._step: PassStep | None = None
        self._expected = 1  # its batches
        self._batches: list[Any] = []  # those of them that have come
        self._results: list[_Result] = []  # foreseen, and not asked for yet
        self._running: nn.Module | None = None  # the wrapped model, while calls are answered
        self._is_paused = False
        self._is_attached = False
        self._adapters: tuple[Any, ...] | None = None  # as they are in training
        self.prepared: Any = None  # the batch whose loss is computed, which is prepared already
        self._labels: torch.Tensor | None = None  # [B, S] of the batch whose loss is computed

    # ---- the model

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Surround training or an evaluation, inside the engine's own `attached`; nothing happens
        in an evaluation while it trains."""
        if self._is_attached:
            yield
            return
        self._is_attached = True
        trainer = self._trainer
        policy = base_model(trainer.model)
        self._adapters = adapter_state(trainer.model)
        hooks = self._head.attach()
        try:
            with ExitStack() as attached:
                reference = getattr(trainer, "ref_model", None)
                attached.enter_context(attached_reference(reference, policy))
                if isinstance(self._head, Divergences):
                    attached.enter_context(
                        self._head.attached(self._executor, self._answer_of_policy)
                    )
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._is_attached = False
            self._iterator = None
            self._rows = iter(())
            self._drawn.clear()
            self._step = None
            self._batches.clear()
            self._results.clear()

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Surround the preparation of a batch: a trainer that makes its samples generates with
        the model's own attention."""
        if not rolls_out(self._trainer):
            yield
            return
        with self._pausing(True), self._executor.own_attention():
            yield

    @property
    def _executor(self) -> WholeModelExecutor:
        executor = self._engine.executor
        assert isinstance(executor, WholeModelExecutor), "pipelines were refused"
        return executor

    # ---- drawing

    def check_loader(self, dataloader: Any) -> None:
        """Raise ValueError, on all ranks, for a loader that gives them different numbers of
        batches: one would wait for the others in its loss. Collective over the world."""
        lengths = lengths_of(dataloader, self._engine.communicator)
        if len(set(lengths)) > 1:
            raise ValueError(self._uneven(f"{min(lengths)} to {max(lengths)}"))

    def _uneven(self, counts: str) -> str:
        """Return what is wrong where ranks draw so many batches."""
        return (
            f"ranks draw {counts} batches, and the loss of {type(self._trainer).__name__} is "
            "computed by all of them together: leave even_batches on, or set "
            "dataloader_drop_last=True"
        )

    def next_batches(
        self, iterator: Iterator[Any], num_batches: int, *, first_number: int
    ) -> list[Any]:
        """Return the batches of the next step, at most `num_batches`. Their sequences are planned
        ahead, unless the trainer makes its samples only when the step runs. Collective over the
        world.

        iterator: the trainer's, with its batches on the host.
        """
        self._batches.clear()
        if rolls_out(self._trainer):
            batches, state = drawn_batches(iterator, num_batches, self._trainer.accelerator)
        else:
            batches, state = self._next_planned(iterator, num_batches, first_number)
        self._loader_state = state
        self._expected = len(batches)
        return batches

    def _next_planned(
        self, iterator: Iterator[Any], num_batches: int, first_number: int
    ) -> tuple[list[Any], LoaderState]:
        """Return the batches of the next step, and the state of their loader, and keep the
        step."""
        if iterator is not self._iterator:
            self._iterator = iterator
            self._drawn.clear()
            self._rows = self._rows_of(iterator, num_batches)
        self._step = self._engine.next_passes(self._rows, 1, first_number=first_number)
        if self._step is None:
            return [], BEFORE_END
        if not self._drawn:
            raise ValueError(self._uneven("different numbers of"))
        return self._drawn.popleft()

    def _rows_of(self, iterator: Iterator[Any], num_batches: int) -> Iterator[dict[str, Any]]:
        """Yield the sequences of each step, and keep the batches that they come from."""
        while True:
            batches, state = drawn_batches(iterator, num_batches, self._trainer.accelerator)
            if not batches:
                return
            self._drawn.append((batches, state))
            calls = [foreseen(self._trainer, batch, self._head) for batch in batches]
            row = joined([own.policy for own in calls])
            assert row is not None, "a batch has a sequence at least"
            yield row

    def is_complete(self, batch: Any) -> bool:
        """Take the next batch of the step; tell if it was the last one."""
        self._batches.append(batch)
        return len(self._batches) >= self._expected

    # ---- a step

    def train(
        self, model: nn.Module, stock_step: StockStep, *, is_last: bool = False
    ) -> torch.Tensor:
        """Run the step whose batches have come, and return the sum of this rank's losses, a
        detached scalar. Collective over the world.

        model: as accelerate has wrapped it. is_last: whether no step comes after it.
        """
        trainer = self._trainer
        began = time.perf_counter()
        with in_training_mode(model), self._timed_since(began):
            # 1., 2. batches, and one plan for all of them
            batches = self._prepared_batches()
            calls = [foreseen(trainer, batch, self._head) for batch in batches]
            step, self._step = self._step, None
            if step is None:
                step = self._engine.passes_of(
                    joined([own.policy for own in calls]), number=trainer.state.global_step
                )
            # 3. whatever is asked without gradients, before the first pass keeps a graph
            with self._executor.planned_attention():
                self._foresee(step, model, calls)
                # 4. to 6.
                objective = _OfStep(self, model, batches, calls, stock_step)
                loss = self._engine.train_passes(
                    step, objective, model, weights=objective.weights(), is_last=is_last
                )
        self._results.clear()
        self._engine.finish(step)
        return loss

    @contextmanager
    def _timed_since(self, began: float) -> Iterator[None]:
        """Surround a step: where TRL logs its seconds, which it takes around the loss at home, put
        those of the whole step."""
        logged = len(self._logged_seconds())
        yield
        seconds = self._logged_seconds()
        if len(seconds) > logged:
            seconds[-1] = time.perf_counter() - began

    def _logged_seconds(self) -> list[float]:
        """Return the seconds of steps that TRL is to log, which may be changed."""
        of_training = getattr(self._trainer, "_metrics", {}).get("train", {})
        seconds: list[float] = of_training.get("step_time", [])
        return seconds

    def _prepared_batches(self) -> list[Any]:
        """Return the batches of the step as the trainer's loss gets them."""
        trainer = self._trainer
        batches = []
        drawn, self._batches = self._batches, []
        if not rolls_out(trainer):
            return [trainer._prepare_inputs(batch) for batch in drawn]
        # It counts batches, to know which slice of its samples is next.
        first = trainer._step
        for index, batch in enumerate(drawn):
            trainer._step = first + index
            batches.append(trainer._prepare_inputs(batch))
        trainer._step = first
        return batches

    def _foresee(self, step: PassStep, model: nn.Module, calls: Sequence[Foreseen]) -> None:
        """Compute what the loss will ask for without gradients. Collective over the world."""
        others = [own.others for own in calls if own.others is not None]
        others_step = None
        if others:
            others_step = self._engine.passes_of(
                joined(others), number=step.number, forward_only=True
            )
            self._run(others_step, model, POLICY, others)
        if not calls[0].wants_reference:
            return
        with reference_of(self._trainer, model) as reference:
            self._run(step, reference, REFERENCE, [own.policy for own in calls])
            if others_step is not None:
                self._run(others_step, reference, REFERENCE, others)

    def _run(self, step: PassStep, model: nn.Module, role: str, calls: Sequence[Call]) -> None:
        """Run a model forward, and keep what it gives for each of the calls."""
        figures = self._figures(step, model)
        for call, own in zip(calls, self.split(figures, calls), strict=True):
            self._results.append(_Result(role, call, own))

    def _figures(self, step: PassStep, model: nn.Module) -> Columns:
        """Run a model forward, and return the figures of this rank's tokens and totals."""
        return step.figures(lambda inputs: self._head.forward(model, inputs), self._head.totals)

    def split(self, figures: Columns, calls: Sequence[Call]) -> list[Columns]:
        """Return the figures of each call, and totals, which are those of all, on the model's
        device.

        figures: of the tokens of all calls, each [tokens, ...], and totals on the CPU.
        """
        device = self._trainer.accelerator.device
        sizes = [call.tokens for call in calls]
        parts: list[Columns] = [{} for _ in calls]
        for name, values in figures.items():
            is_total = name in self._head.totals
            owns = [values] * len(calls) if is_total else values.split(sizes)
            for part, own in zip(parts, owns, strict=True):
                part[name] = to_device(own, device)
        return parts

    def note(self, call: Call, figures: Columns) -> None:
        """Keep what the trained model gives for a call."""
        self._results.append(_Result(POLICY, call, figures))

    # ---- calls of the loss

    @contextmanager
    def answering(self, model: nn.Module) -> Iterator[None]:
        """Answer the trainer's calls of its models inside the block.

        model: the trained one, as accelerate has wrapped it.
        """
        if self._running is not None:
            with self._pausing(False):
                yield
            return
        self._running = model
        trainer = self._trainer
        with ExitStack() as answered:
            answered.callback(self._end_answering)
            answered.enter_context(self._pausing(False))
            answered.enter_context(
                answered_by(trainer.model, self._answer_of_policy, is_paused=self._paused)
            )
            reference = getattr(trainer, "ref_model", None)
            if reference is not None:
                answered.enter_context(
                    answered_by(reference, self._answer_of_reference, is_paused=self._paused)
                )
            yield

    @contextmanager
    def loss_of(self, batch: Any, *, is_last: bool) -> Iterator[None]:
        """Surround the loss of one prepared batch of a step. As with the plain Trainer, accelerate
        says of the last one alone that gradients are synchronised, and knows of the step's batches
        that they end the data: some losses ask."""
        accelerator = self._trainer.accelerator
        state = accelerator.gradient_state
        syncs = state.sync_gradients
        state._set_sync_gradients(syncs and is_last)
        self.prepared = batch
        try:
            with self.on_batch(batch), as_drawn(self._loader_state, accelerator):
                yield
        finally:
            self.prepared = None
            state._set_sync_gradients(syncs)

    @contextmanager
    def on_batch(self, batch: Any) -> Iterator[None]:
        """Surround the loss of one batch: the Trainer may take its labels out, and call the model
        without them."""
        former = self._labels
        if isinstance(self._head, TokenFigures):
            self._labels = batch.get("labels")
        try:
            yield
        finally:
            self._labels = former

    def _end_answering(self) -> None:
        self._running = None

    def _paused(self) -> bool:
        return self._is_paused

    @contextmanager
    def _pausing(self, is_paused: bool) -> Iterator[None]:
        """Leave calls to the models themselves inside the block, or answer them again."""
        former, self._is_paused = self._is_paused, is_paused
        try:
            yield
        finally:
            self._is_paused = former

    def _answer_of_policy(self, given: dict[str, Any]) -> Any:
        role = POLICY
        if adapter_state(self._trainer.model) != self._adapters:
            role = REFERENCE
        assert self._running is not None, "calls are answered while a loss is computed"
        return self._answer(role, self._running, given)

    def _answer_of_reference(self, given: dict[str, Any]) -> Any:
        return self._answer(REFERENCE, self._trainer.ref_model, given)

    def _answer(self, role: str, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """Return what a model would have returned. Collective over the world where the call was
        not foreseen, which is so on all ranks."""
        if isinstance(self._head, TokenFigures) and given.get("labels") is None:
            given = {**given, "labels": self._labels_for(given)}
        call = self._head.read(given)
        figures = self._taken(role, call)
        if figures is None:
            if torch.is_grad_enabled():
                raise NotImplementedError(
                    f"{type(self._trainer).__name__} computes a loss from tokens or labels that "
                    "are not those of its batch, or calls the model twice on them: hf_flexseq "
                    "computes gradients of one call for each batch"
                )
            step = self._engine.passes_of(
                joined([call]), number=self._trainer.state.global_step, forward_only=True
            )
            with self._executor.planned_attention():
                found = self._figures(step, model)
            (figures,) = self.split(found, [call])
        return self._head.answer(call, figures, given)

    def _labels_for(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the labels [B, S] of the batch for a call of the model without them."""
        ids, labels = given.get("input_ids"), self._labels
        if ids is not None and labels is not None and ids.shape != labels.shape:
            raise NotImplementedError(
                f"a loss calls the model on input_ids {tuple(ids.shape)} without labels, and "
                f"those of its batch are {tuple(labels.shape)}: give labels of the same tokens"
            )
        return labels

    def _taken(self, role: str, call: Call) -> Columns | None:
        """Return what is known of a call, once; None for nothing.

        What the trained model gave with gradients is for a call with gradients, and what it gave
        without for one without: KTO asks both of the same tokens, where all completions of a batch
        are alike.
        """
        for index, result in enumerate(self._results):
            has_gradients = result.figures[self._head.main].requires_grad
            if role == POLICY and has_gradients != torch.is_grad_enabled():
                continue
            if result.role == role and result.call.same_as(call):
                del self._results[index]
                return result.figures
        return None


class _OfStep:
    """The loss of one step's batches, as `PassStep` asks for it."""

    def __init__(
        self,
        planned: PlannedLoss,
        model: nn.Module,
        batches: Sequence[Any],
        calls: Sequence[Foreseen],
        stock_step: StockStep,
    ) -> None:
        self._planned = planned
        self._model = model
        self._batches = batches
        self._calls = [own.policy for own in calls]
        self._stock_step = stock_step
        self._trainer = planned._trainer
        self._head = planned._head
        self.totals = planned._head.totals

    def forward(self, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...]."""
        with self._trainer.compute_loss_context_manager():
            return self._head.forward(self._model, inputs)

    def weights(self) -> Columns | None:
        """Return the gradients of the loss, each [tokens, ...] on the CPU, where they are known
        before it is computed; None where they depend on figures."""
        if not isinstance(self._head, Divergences):
            return None
        return self._head.weights(self._batches, self._calls)

    def loss(self, figures: Columns) -> tuple[torch.Tensor, Columns]:
        """Return the sum of the losses of this rank's batches, and its gradients with respect to
        figures, each [tokens, ...] on the CPU."""
        # 1. the figures of each batch, at which its backward ends
        leaves = self._planned.split(figures, self._calls)
        for call, own in zip(self._calls, leaves, strict=True):
            for name in self._head.differentiable:
                if name in own:
                    own[name] = own[name].detach().requires_grad_()
            self._planned.note(call, own)

        # 2. the trainer's own steps
        total = torch.zeros((), device=self._trainer.args.device)
        last = len(self._batches) - 1
        with self._planned.answering(self._model), self._backward_at_home():
            for index, batch in enumerate(self._batches):
                with self._planned.loss_of(batch, is_last=index == last):
                    total = total + self._stock_step(self._trainer.model, batch)

        # 3. gradients, of all batches in a row
        gradients: Columns = {}
        for name in self._head.differentiable:
            if name not in figures:
                continue
            parts = [own[name].grad for own in leaves]
            if name in self.totals:
                found = [part.detach().cpu() for part in parts if part is not None]
                if found:
                    gradients[name] = torch.stack(found).sum(dim=0)
            elif name == self._head.main or any(part is not None for part in parts):
                gradients[name] = _in_a_row(parts, [own[name] for own in leaves])
        return total.detach(), gradients

    @contextmanager
    def _backward_at_home(self) -> Iterator[None]:
        """Let the trainer's backward end at the figures: nothing is scaled for fp16 or handed to
        DeepSpeed before the second pass."""
        accelerator = self._trainer.accelerator
        accelerator.backward = _plain_backward
        try:
            yield
        finally:
            del accelerator.backward

    def backward(self, weighted: torch.Tensor) -> None:
        """Run backward of a scalar, as the trainer does."""
        options = {"scale_wrt_gas": False} if self._trainer.is_deepspeed_enabled else {}
        self._trainer.accelerator.backward(weighted, **options)


def _plain_backward(loss: torch.Tensor, **options: Any) -> None:
    if loss.requires_grad:  # not so where a batch has nothing to learn
        loss.backward()


def _in_a_row(parts: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradients of all batches one behind the other, on the CPU; zeros for None.

    like: the figures that they are of, each [tokens, ...].
    """
    filled = []
    for part, own in zip(parts, like, strict=True):
        filled.append((torch.zeros_like(own) if part is None else part).detach().cpu())
    return torch.cat(filled)
