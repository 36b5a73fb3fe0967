"""Answers to a loss's calls of its models, while the loss is computed on the source ranks.

The results that a loss will ask for have been computed before, for all batches of the step
together, and are noted here; each is used once, or as often as the user's own code asks for it, if
the model draws no noise. A call without gradients and without a noted result is planned and run
when it comes: so are all calls of an evaluation. A call with gradients is then refused.

Besides the trained model a loss may ask a reference, without gradients: another model, or the
trained one with its adapter off.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import PreTrainedModel, Trainer

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.loaders import LoaderState, as_drawn
from hf_flexseq.hf.losses.heads import BATCHES, Head
from hf_flexseq.hf.losses.outputs import PlannedOutput
from hf_flexseq.hf.model.attachments import on_micro_batches
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import adapter_states, base_model, layer_calls
from hf_flexseq.hf.model.loss_kinds import FIGURES
from hf_flexseq.hf.model.noise import dropout_in, noisy_option
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.steps.call_answers import answered_by
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.figure_passes import figures_of
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.source_row import Columns, SourceRow

# row that this rank has drawn, model as accelerate has wrapped it; refuses code of the user's
TryModel = Callable[[SourceRow, nn.Module], None]

POLICY = "policy"
REFERENCE = "reference"


@dataclass(slots=True)
class _Result:
    """Known result of a call."""

    role: str
    call: ModelCall
    figures: Columns
    """Figures of the call's tokens, each [tokens, ...] on the model's device."""


class Answers:
    """Answers calls of the trainer's models from noted results, and by planned passes."""

    def __init__(
        self, trainer: Trainer, engine: FlexSeqEngine, head: Head, try_model: TryModel
    ) -> None:
        """try_model: is called before a model runs forward."""
        self._try_model = try_model
        self._trainer: Any = trainer  # one of TRL's has more than a Trainer
        self._engine = engine
        self._head = head
        self._results: list[_Result] = []  # known, and not asked for yet
        self._running: nn.Module | None = None  # the wrapped model, while calls are answered
        self._is_paused = False
        self._reuses = False  # a result for equal calls, which are of one batch and without noise
        self._adapters: tuple[Any, ...] = ()  # their states in training
        self._labels: torch.Tensor | None = None  # [B, S] of the batch whose loss is computed
        self.check_weights: Callable[[], None] = lambda: None
        """Raises NotImplementedError if weights have changed since the first pass."""

    def begin(self) -> None:
        """Take the model as it is now for the trained one, whatever becomes of its adapters."""
        model = self._trainer.model
        self._adapters = self._adapter_states()
        settings = self._engine.settings
        option = noisy_option(base_model(model).config)
        draws_noise = dropout_in(model) or option or settings.noise
        self._reuses = self._head.is_own and not draws_noise

    def clear(self) -> None:
        """Forget all noted results."""
        self._results.clear()

    # ---- what is known

    def run(
        self, step: RankMicroBatches, model: nn.Module, role: str, calls: Sequence[ModelCall]
    ) -> None:
        """Run a model forward, and note its results for the calls. Collective over the world."""
        figures = self.figures(step, model)
        for call, own in zip(calls, self.split(figures, calls), strict=True):
            self.note(role, call, own)

    def note(self, role: str, call: ModelCall, figures: Columns) -> None:
        """Keep a model's result for a call; figures: of its tokens, each [tokens, ...]."""
        self._results.append(_Result(role, call, figures))

    def figures(self, step: RankMicroBatches, model: nn.Module) -> Columns:
        """Run a model forward, and return the figures of this rank's tokens and totals."""
        # without its adapters the policy answers as the reference
        if self._is_policy:
            with self.pausing(True):
                self._try_model(step.row, model)
        return figures_of(step, partial(self._head.forward, model), self._head.totals)

    def split(self, figures: Columns, calls: Sequence[ModelCall]) -> list[Columns]:
        """Return the figures of each call, with the totals over all calls, on the model's device.
        figures: of all calls' tokens, each [tokens, ...], and totals on the CPU."""
        device = self._trainer.accelerator.device
        sizes = [call.tokens for call in calls]
        parts: list[Columns] = [{} for _ in calls]
        for name, values in figures.items():
            is_total = name in self._head.totals
            owns = [values] * len(calls) if is_total else values.split(sizes)
            for part, own in zip(parts, owns, strict=True):
                part[name] = to_device(own, device)
        if self._head.totals:
            for part in parts:
                part[BATCHES] = torch.tensor(len(calls))
        return parts

    # ---- calls of the loss

    @contextmanager
    def answering(self, model: nn.Module) -> Iterator[None]:
        """Answer the trainer's calls inside the block. model: as accelerate has wrapped it."""
        if self._running is not None:
            with self.pausing(False):
                yield
            return
        asked = [(self._trainer.model, self.answer_of_policy)]
        reference = getattr(self._trainer, "ref_model", None)
        if reference is not None:
            asked.append((reference, partial(self._answer, REFERENCE, reference)))
        with ExitStack() as answered:
            answered.enter_context(Patch(self, _running=model, _is_paused=False))
            for one, answer in asked:
                paused = partial(getattr, self, "_is_paused")
                answered.enter_context(answered_by(one, answer, is_paused=paused))
            yield

    @contextmanager
    def loss_of(self, batch: Any, loader_state: LoaderState, *, is_last: bool) -> Iterator[None]:
        """Surround the loss of one prepared batch of a step. As with the plain Trainer, accelerate
        says of the last one alone that gradients are synchronised, and knows of the step's batches
        whether they end the data: some losses ask."""
        accelerator = self._trainer.accelerator
        state = accelerator.gradient_state
        syncs = Patch(state, sync_gradients=state.sync_gradients and is_last)
        with syncs, self.on_batch(batch), as_drawn(loader_state, accelerator):
            yield

    @contextmanager
    def on_batch(self, batch: Any) -> Iterator[None]:
        """Surround the loss of one batch, which is prepared already and is not prepared again, and
        whose labels the Trainer may withhold from the model and give to a function alone."""
        prepare = self._trainer._prepare_inputs
        patches: dict[str, Any] = {
            "_prepare_inputs": lambda given: given if given is batch else prepare(given)
        }
        function = getattr(self._trainer, "compute_loss_func", None)
        if function is not None:

            def on_labels(outputs: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if isinstance(outputs, PlannedOutput):
                    outputs = outputs.masked_by(labels)
                return function(outputs, labels, *args, **kwargs)

            patches["compute_loss_func"] = on_labels
        labels = batch.get("labels") if self._head.is_own else self._labels
        with Patch(self._trainer, **patches), Patch(self, _labels=labels):
            yield

    @property
    def _is_policy(self) -> bool:
        """True if the adapters of the trained model are on as in training."""
        return self._adapter_states() == self._adapters

    def _adapter_states(self) -> tuple[Any, ...]:
        """Return the states of the trained model's adapters; () without any."""
        model = self._trainer.model
        return adapter_states(model.modules()) if hasattr(model, "peft_config") else ()

    def pausing(self, is_paused: bool) -> Patch:
        """Leave calls to the models themselves inside a block, or answer them again."""
        return Patch(self, _is_paused=is_paused)

    def answer_of_policy(self, given: dict[str, Any]) -> Any:
        """Return the trained model's result for these keyword arguments, or the result of the
        reference, which may be the same model without its adapter. See `_answer`."""
        role = POLICY if self._is_policy else REFERENCE
        assert self._running is not None, "calls are answered while a loss is computed"
        return self._answer(role, self._running, given)

    def _answer(self, role: str, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """Return a model's result. Collective over the world if the call was not foreseen."""
        if self._head.is_own and given.get("labels") is None:
            given = {**given, "labels": self._labels_for(given)}
        call = self._head.read(given)
        figures = self._taken(role, call)
        if figures is not None and torch.is_grad_enabled():
            self.check_weights()
        if figures is None:
            if torch.is_grad_enabled():
                raise NotImplementedError(
                    f"{type(self._trainer).__name__} computes a loss from tokens or labels that "
                    "its batch does not have, or calls a model with dropout twice on them: "
                    "hf_flexseq computes gradients of one call for each batch; change batches in "
                    "_prepare_inputs, in the data_collator or in the dataset"
                )
            step = self._engine.step_of(
                self._engine.whole_model.rows_of([call]),
                number=self._trainer.state.global_step,
                forward_only=True,
            )
            with self._engine.whole_model.attention.planned():
                found = self.figures(step, model)
            (figures,) = self.split(found, [call])
        return self._head.answer(call, figures, given)

    def _labels_for(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the labels [B, S] of the batch for a call of the model without them."""
        ids, labels = given.get("input_ids"), self._labels
        if ids is not None and labels is not None and ids.shape != labels.shape:
            raise NotImplementedError(
                f"a loss calls the model on input_ids {tuple(ids.shape)} without labels, and "
                f"those of its batch are {tuple(labels.shape)}: give labels of the same tokens, "
                "and generate in a callback, such as on_step_end"
            )
        return labels

    def _taken(self, role: str, call: ModelCall) -> Columns | None:
        """Return the noted figures of a call, once unless `_reuses`; None without any. Figures
        with gradients answer a call with gradients, others one without: KTO may ask both of the
        same tokens. A loss of the user's may mask some labels before its call: figures are of
        single labels, but for those that the user makes."""
        ways = [ModelCall.same_as]
        if self._head.is_own and getattr(self._trainer, FIGURES, None) is None:
            ways.append(ModelCall.covers)
        for is_answered, (index, result) in product(ways, enumerate(self._results)):
            has_gradients = result.figures[self._head.main].requires_grad
            if role == POLICY and has_gradients != torch.is_grad_enabled():
                continue
            if result.role == role and is_answered(result.call, call):
                if not self._reuses:
                    del self._results[index]
                return result.figures
        return None


@contextmanager
def attached_reference(
    model: nn.Module | None, policy: PreTrainedModel, *, takes_images: bool
) -> Iterator[None]:
    """Give a reference model our attention, recurrent layers and positions inside the block, and
    features of its own tower; nothing happens for None.

    model: as accelerate has wrapped it. policy: the trained model, whose kernels serve both.
    takes_images: True if the trained model does.
    Raises NotImplementedError for a model that cannot be computed exactly, or whose layers are of
    other sizes than the policy's.
    """
    if model is None:
        yield
        return
    base = base_model(extract_model_from_parallel(model))
    check_model(base)
    if layer_calls(base.config) != layer_calls(policy.config):
        raise NotImplementedError(
            f"the reference model {type(base).__name__} has other attention layers than the "
            "trained one: give a reference of the same architecture and sizes"
        )
    with ExitStack() as attached:
        attached.enter_context(on_micro_batches(base))
        if takes_images:
            attached.enter_context(VisionModel(base).attached())
        yield


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Turn to the reference adapter inside the block, as TRL does: `ref`, or no adapter."""
    from trl.trainer.utils import use_adapter

    name = "ref" if "ref" in model.peft_config else None
    with use_adapter(model, adapter_name=name):
        yield


@contextmanager
def reference_of(trainer: Any, policy: nn.Module) -> Iterator[Any]:
    """Yield the trainer's reference. policy: the trained model as accelerate has wrapped it."""
    model = getattr(trainer, "ref_model", None)
    if model is not None:
        yield model
        return
    with adapter_off(trainer.accelerator.unwrap_model(trainer.model)):
        yield policy
