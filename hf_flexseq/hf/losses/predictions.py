"""Predictions of causal language models: results of `preprocess_logits_for_metrics`, gathered
on the source ranks.

The plain Trainer has logits [B, S, V] of a padded batch on the rank that drew it. Here

1. a batch        is collated as the plain Trainer would, with its padding
2. its tokens     are planned and dispatched, with its labels
3. the head       shows its logits a chunk of tokens at a time; the user's function gets logits
                  [1, chunk, V] and labels [1, chunk], and returns a few values for each token
4. these values   are gathered into the places of the batch's tokens; padding is -100

and everything after that is the Trainer's own loop. Whole vocabularies of logits, above all, are
refused before (`prediction_checks.py`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.patches import Patch
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine.engine import FlexSeqEngine
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.losses.heads import labels_of_padding
from hf_flexseq.hf.losses.prediction_checks import as_given, value_parts
from hf_flexseq.hf.model.loss import ChunkedLoss
from hf_flexseq.hf.model.loss_kinds import has_own_loss
from hf_flexseq.hf.model.router import TOTALS
from hf_flexseq.kernels.token_outputs import chunk_rows
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.steps.calls import READ, ModelCall, images_in, types_in
from hf_flexseq.steps.figure_passes import figures_of
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.source_row import Columns, SourceRow

logger = logging.getLogger(__name__)

# Runs the model on a micro-batch of a step, and returns further figures of its tokens, each
# [tokens, ...], and sums over them.
Forward = Callable[[Inputs, RankMicroBatches], Columns]

# Columns besides the shifted labels: labels as the batch has them, and the targets of all samples.
_LABELS = "labels_for_metrics_"
_TARGETS = "targets_for_metrics"
_LOSS = "loss"
_PREDICTION = "prediction_"


class TokenPredictions:
    """Predicts the batches of one evaluation."""

    def __init__(self, trainer: Any, engine: FlexSeqEngine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._function = trainer.preprocess_logits_for_metrics
        # The Trainer's own step computes a loss of the user's, on all of a batch's samples.
        self._has_own_loss = has_own_loss(trainer)
        self._with_loss = "loss" in trainer.args.include_for_metrics and not self._has_own_loss
        self._has_noted_padding = False

    def in_loop(self) -> Patch:
        """Surround the Trainer's own loop, which is not to call the user's function again."""
        return Patch(self._trainer, preprocess_logits_for_metrics=None)

    def predict(
        self, batch: Mapping[str, Any], forward: Forward
    ) -> tuple["PredictedBatch", Columns, RankMicroBatches]:
        """Return the predictions of a padded batch, the figures of its tokens, each [tokens, ...]
        on the CPU, with totals of the step, and the step. Collective over the world."""
        predicted = PredictedBatch(self._trainer, self._engine.whole_model, batch)
        self._note_padding(predicted.call, batch.get("labels"))
        if not self._has_own_loss:
            predicted.leave_out_repeats()
        step = self._engine.step_of(
            predicted.rows(with_loss=self._with_loss),
            number=self._trainer.state.global_step,
            forward_only=True,
        )
        return predicted, self._run(predicted, step, forward), step

    def _note_padding(self, call: ModelCall, labels: torch.Tensor | None) -> None:
        """Warn once about labels with which a metric may compare predictions for padding."""
        if labels is None or self._has_noted_padding:
            return
        count = int(labels_of_padding(call, labels).sum())
        if count:
            self._has_noted_padding = True
            logger.warning(
                "%d labels of an evaluation batch are targets beside padding, of padding or of a "
                "first token behind it: predictions are %d there, where the plain Trainer's have "
                "a value, and the loss leaves these labels out; make them %d",
                *(count, IGNORE_INDEX, IGNORE_INDEX),
            )

    def _run(
        self, predicted: "PredictedBatch", step: RankMicroBatches, forward: Forward
    ) -> Columns:
        """Run a step's micro-batches; return the figures of this rank's tokens, and totals."""
        whole_model = self._engine.whole_model
        router = whole_model.router
        several = []

        def read(inputs: Inputs) -> Columns:
            inputs, labels = _without_labels(inputs)
            targets_for_loss = inputs.pop(_TARGETS) if self._with_loss else None
            reader = _Reader(self._function, labels, targets_for_loss)
            sums: Columns = {}
            with ExitStack() as surrounded:
                surrounded.enter_context(reader.of(whole_model.base, whole_model.chunked_loss))
                if router is not None:
                    sums = surrounded.enter_context(router.noting())
                others = forward(inputs, step)
            several.append(reader.is_several)
            return reader.figures(inputs["input_ids"].shape[1]) | sums | others

        figures = figures_of(step, read, TOTALS)
        predicted.take(figures, is_several=several[0])
        return {name: own for name, own in figures.items() if not name.startswith(_PREDICTION)}


def _without_labels(inputs: Inputs) -> tuple[Inputs, list[torch.Tensor]]:
    """Return the model's arguments, and the labels [1, tokens] for the user's function."""
    own, labels = {}, []
    for name, value in inputs.items():
        if name.startswith(_LABELS):
            labels.append(value)
        else:
            own[name] = value
    return own, labels


def without_metrics(row: SourceRow) -> SourceRow:
    """Return a row of `PredictedBatch` with the columns alone that a model is called with."""
    columns, _ = _without_labels(row.columns)
    columns.pop(_TARGETS, None)
    return replace(row, columns=columns)


class PredictedBatch:
    """A padded batch, and the predictions for its tokens."""

    def __init__(self, trainer: Any, whole_model: WholeModel, batch: Mapping[str, Any]) -> None:
        """Raises ValueError for an unpadded batch, or columns without one value per token that are
        not of images."""
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or "lengths" in batch:
            raise ValueError(
                "compute_metrics and predict() want padded batches [batch, tokens] with "
                "input_ids: leave get_eval_dataloader and get_test_dataloader to the Trainer"
            )
        images = images_in(batch)
        for name, value in batch.items():
            if value is None or name in images:
                continue
            if getattr(value, "shape", None) != ids.shape:
                raise ValueError(
                    f"column {name!r} of a batch is not one value for each of its tokens "
                    f"{tuple(ids.shape)}: drop the column, or set remove_unused_columns=True"
                )
        self._trainer = trainer
        self._whole_model = whole_model
        self._batch = {name: value for name, value in batch.items() if value is not None}
        self.call = ModelCall(
            ids,
            self._batch.get("attention_mask"),
            self._batch.get("labels"),
            shift_labels=self._batch.get("shift_labels"),
            positions=self._batch.get("position_ids"),
            images=images,
            types=None if whole_model.vision is None else types_in(batch),
        )
        """The model's call on the batch."""
        self._all_targets = self.call.in_row(self.call.targets)  # [tokens]
        names = trainer.label_names
        self.has_labels = bool(names) and all(name in self._batch for name in names)
        self.predictions: Any = None
        """[B, S] or [B, S, few], or several such, on the trainer's device."""
        self.loss: torch.Tensor | None = None
        """The loss of this rank's samples as the Trainer has it, where a metric wants that."""

    @property
    def labels(self) -> Any:
        """The labels as the Trainer passes them on, or None."""
        if not self.has_labels:
            return None
        device = self._trainer.args.device
        names = self._trainer.label_names
        return as_given([to_device(self._batch[name], device) for name in names])

    def leave_out_repeats(self) -> None:
        """Leave out the targets of samples that were drawn already."""
        self.call.targets[self._own_samples() :] = IGNORE_INDEX

    def rows(self, *, with_loss: bool) -> Iterator[dict[str, Any]]:
        """Yield the sequences of the batch as the engine takes them, with other columns. Raises as
        `AttachedModel.rows_of`. with_loss: True if the loss of all samples is wanted."""
        call = self.call
        known = {*READ, *call.images, *call.types}
        for row in self._whole_model.rows_of([call]):
            for name, value in self._batch.items():
                if name not in known:
                    row[name] = call.in_row(value).unsqueeze(0)
            if with_loss:
                row[_TARGETS] = self._all_targets.unsqueeze(0)
            if self.has_labels:
                for index, name in enumerate(self._trainer.label_names):
                    row[f"{_LABELS}{index}"] = call.in_row(self._batch[name]).unsqueeze(0)
            yield row

    def _own_samples(self) -> int:
        """Return how many samples of the batch count: those after them were drawn already."""
        samples = len(self.call.ids)
        accelerator = self._trainer.accelerator
        state = accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return samples
        left = state.remainder - accelerator.process_index * samples
        return int(min(max(left, 0), samples))

    def take(self, figures: Columns, *, is_several: bool) -> None:
        """Put figures of the tokens, each [tokens, ...] on the CPU, where the batch has these
        tokens. Collective over the world where a metric wants the loss."""
        device = self._trainer.args.device
        found = []
        for index in range(sum(name.startswith(_PREDICTION) for name in figures)):
            values = to_device(figures[f"{_PREDICTION}{index}"], device)
            found.append(self._padded(values))
        self.predictions = tuple(found) if is_several else found[0]
        if _LOSS in figures and self.has_labels:
            items = self._trainer._get_num_items_in_batch([self._batch], device)
            world_size = self._trainer.accelerator.num_processes
            self.loss = figures[_LOSS].sum().to(device) / items * world_size

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        """Put values where the batch has their tokens, [tokens, ...] -> [B, S, ...]."""
        mask = to_device(self.call.mask, values.device)
        padding = IGNORE_INDEX if values.dtype.is_signed else 0
        padded = values.new_full((*mask.shape, *values.shape[1:]), padding)
        padded[mask] = values
        return padded


class _Reader:
    """Sees the logits of one micro-batch, chunk by chunk, and keeps the figures made from them."""

    def __init__(
        self,
        function: Callable[..., Any],
        labels: Sequence[torch.Tensor],
        targets: torch.Tensor | None,
    ) -> None:
        """labels: each [1, tokens]. targets: [1, tokens], shifted, if losses are wanted."""
        self._function = function
        self._labels = labels
        self._targets = targets
        self._chunks: list[Columns] = []  # each [rows, ...]
        self._seen = 0  # tokens
        self.is_several = False

    @contextmanager
    def of(self, model: PreTrainedModel, chunked: ChunkedLoss | None) -> Iterator[None]:
        """Read logits of a model's call inside the block: chunk by chunk inside its chunked loss,
        if it has one that computes the call, or else those that the model returns."""
        reading = nullcontext() if chunked is None else chunked.reading(self.see)
        with model.register_forward_hook(self._see_outputs), reading:
            yield

    def _see_outputs(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._seen:
            return
        logits = outputs.logits[0]  # [tokens, V]
        for chunk in logits.split(chunk_rows(1, logits.shape[1], logits.dtype.itemsize)):
            self.see(chunk)

    def see(self, logits: torch.Tensor) -> None:
        """Take the next logits [rows, V]."""
        if torch.is_autocast_enabled(logits.device.type) and logits.dtype.itemsize == 2:
            logits = logits.float()  # as accelerate casts what the model returns
        chunk = slice(self._seen, self._seen + len(logits))
        labels = [own[:, chunk] for own in self._labels]  # each [1, rows]
        result = self._function(logits.unsqueeze(0), as_given(labels))
        parts, self.is_several = value_parts(result, tokens=len(logits))
        figures = {}
        for index, part in enumerate(parts):
            figures[f"{_PREDICTION}{index}"] = part.squeeze(0)  # [1, rows, ...] -> [rows, ...]
        if self._targets is not None:
            targets = self._targets[0, chunk]
            wide = logits.float() if logits.dtype.itemsize == 2 else logits
            figures[_LOSS] = F.cross_entropy(
                wide, targets, ignore_index=IGNORE_INDEX, reduction="none"
            )
        self._chunks.append(figures)
        self._seen += len(logits)

    def figures(self, tokens: int) -> Columns:
        """Return the figures of all tokens, each [tokens, ...]."""
        if self._seen != tokens:
            raise NotImplementedError(
                f"compute_loss showed logits of {self._seen} tokens where a micro-batch has "
                f"{tokens}: with compute_metrics or predict() it must call the model once"
            )
        found = {}
        for name in self._chunks[0]:
            found[name] = torch.cat([own[name] for own in self._chunks])
        return found
