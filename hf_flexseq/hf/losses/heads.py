"""The figures that a loss asks of a model for every token, and the answer to a padded call.

LogProbabilities    of labels, with entropies and the other figures of TRL's fused head
TokenFigures        log-probabilities of labels and entropies, from the model's own head, and
                    figures that the user's `flexseq_figures` makes of the model's outputs
Classes             logits of a classification head
Divergences         of a student from a teacher (`divergences.py`)
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.losses.divergences import Answer, Divergences
from hf_flexseq.hf.losses.outputs import MEANS, PlannedOutput, PlannedSmoother
from hf_flexseq.hf.model.facts import base_model, is_classifier
from hf_flexseq.hf.model.loss import ChunkedLoss
from hf_flexseq.hf.model.loss_kinds import FIGURES, distills, has_fused_head, has_own_loss
from hf_flexseq.hf.model.router import (
    OPTION,
    PROBABILITIES,
    TOTALS,
    RouterSums,
    asks_for_router_loss,
)
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.inputs import Inputs, without_labels
from hf_flexseq.steps.source_row import Columns

BATCHES = "batches_of_step"
"""Name, besides the names of totals, of the number of a rank's batches in the step."""
OF_STEP = (*TOTALS, BATCHES)

# outputs of the model with logits [1, tokens, V] and hidden states, and inputs of a micro-batch
# -> figures of its tokens, each [tokens, ...], by name
OwnFigures = Callable[[Any, Inputs], Columns]


class Head(Protocol):
    """Knows one kind of results."""

    main: str
    """The figure on which every loss depends."""
    differentiable: tuple[str, ...]
    """Figures that have gradients, `main` among them."""
    totals: tuple[str, ...]
    """Figures that are sums over all tokens of a step."""
    is_own: bool
    """True if code of the user's takes part in the loss."""

    def attached(self, whole_model: WholeModel, answer: Answer) -> AbstractContextManager[Any]:
        """Prepare the model for planned calls inside a block. Collective over the world. answer:
        answers padded calls of the model."""

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these arguments. Raises NotImplementedError if it has no answer."""

    def forward(self, model: nn.Module, inputs: Inputs, weights: Columns | None = None) -> Columns:
        """Run a micro-batch: return figures of tokens, each [tokens, ...], and sums over them.
        weights: see `Objective.forward`; a head may do without."""

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return the model's result from figures of the call's tokens, each [tokens, ...], and
        totals of its step with BATCHES, on the model's device."""


def head_of(trainer: Any) -> Head:
    """Return the head of a trainer whose loss is computed on samples."""
    model = base_model(trainer.model)
    if distills(trainer):
        return Divergences(trainer)
    if is_classifier(model):
        return Classes(model)
    if has_fused_head(trainer):
        return LogProbabilities(
            model,
            has_router_loss=getattr(trainer, "aux_loss_enabled", False),
            is_own=has_own_loss(trainer),
        )
    smooths = isinstance(trainer.label_smoother, PlannedSmoother)
    ranks = trainer.accelerator.num_processes
    return TokenFigures(model, getattr(trainer, FIGURES, None), smooths=smooths, ranks=ranks)


class LabelHead:
    """The part that heads of causal language models share: sums of routers for a router loss."""

    def __init__(self, model: PreTrainedModel, *, has_router_loss: bool) -> None:
        self._model = model
        self._has_router_loss = has_router_loss
        self._router: RouterSums | None = None  # while the head is attached

    def attached(self, whole_model: WholeModel, answer: Answer) -> AbstractContextManager[Any]:
        """Count for a router loss inside a block, if there is one."""
        if not self._has_router_loss:
            return nullcontext()
        if whole_model.router is not None:
            self._router = whole_model.router.of_calls
            return nullcontext()
        self._router = RouterSums(self._model)
        return self._router.attached

    def _sums(self) -> Columns:
        """Return the sums of the routers in the last call; none of a reference model."""
        return {} if self._router is None else self._router.take() or {}


class LogProbabilities(LabelHead):
    """Figures of the head that TRL puts on a model (`add_fused_lm_head`), which computes them tile
    by tile, with the trainer's temperature and the model's own scale and cap of logits."""

    main = "log_probs"
    differentiable: tuple[str, ...] = ("log_probs", "entropy", PROBABILITIES)
    totals: tuple[str, ...] = TOTALS

    def __init__(
        self, model: PreTrainedModel, *, has_router_loss: bool, is_own: bool = False
    ) -> None:
        """has_router_loss: True if the trainer's loss includes a router loss. is_own: True if code
        of the user's takes part in the loss, which may call the model without TRL's head."""
        super().__init__(model, has_router_loss=has_router_loss)
        self.is_own = is_own

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these arguments. Raises NotImplementedError for logits."""
        if not given.get("fused_lm_head") and not self.is_own:
            raise NotImplementedError(
                "a loss asks the model for logits, a whole vocabulary for every token, which stay "
                "where the plan has put them: read log-probabilities instead, as TRL's trainers "
                "do with fused_lm_head=True"
            )
        if given.get("labels") is None:
            raise NotImplementedError("a loss asks for log-probabilities without labels")
        if self._has_router_loss:
            given = {name: value for name, value in given.items() if name != OPTION}
        return ModelCall.read(given, of_tokens=True)

    def forward(self, model: nn.Module, inputs: Inputs, weights: Columns | None = None) -> Columns:
        """Run a micro-batch: return figures, each [tokens], and sums of the trained routers."""
        packed = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**packed, fused_lm_head=True, use_cache=False)
        figures = {}
        for name in _FUSED:
            value = getattr(outputs, name)
            if value is not None:
                figures[name] = value.squeeze(0)  # [1, tokens] -> [tokens]
        return figures | self._sums()

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return TRL's output, or ours for a call without TRL's head, whose fields are [B, S - 1]:
        of every token but the last."""
        from trl.trainer.utils import FusedCausalLMOutput

        of_tokens = {name: value for name, value in figures.items() if name not in OF_STEP}
        fields = _fields(call, of_tokens, given)
        if self.is_own and not given.get("fused_lm_head"):
            names = ("loss", "log_probs", "entropy", "label_mask")
            return PlannedOutput.of(call, **{name: fields[name] for name in names})
        if given.get(OPTION):
            assert self._router is not None, "the head is attached while calls are answered"
            fields["aux_loss"] = aux_loss = self._router.loss(figures)
            fields["loss"] = fields["loss"] + self._router.facts.coefficient * aux_loss
        return FusedCausalLMOutput(**fields)


_FUSED = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class TokenFigures(LabelHead):
    """Log-probabilities of labels, and entropies, of a causal language model as it is: chunk by
    chunk inside its own head (`model/loss.py`), or from whole logits if the model scales or caps
    them, or if the user makes further figures of them."""

    main = "log_probs"
    is_own = True

    def __init__(
        self,
        model: PreTrainedModel,
        own: OwnFigures | None = None,
        *,
        smooths: bool = False,
        ranks: int = 1,
    ) -> None:
        """own: makes the user's figures of a micro-batch, if there are any. smooths: True if the
        loss smooths labels. ranks: of the job."""
        super().__init__(model, has_router_loss=asks_for_router_loss(model))
        self._ranks = ranks
        self._own = own
        self._chunked: ChunkedLoss | None = None
        self._of_labels = ("log_probs", "entropy", *((MEANS,) if smooths else ()))
        self.totals: tuple[str, ...] = TOTALS if self._has_router_loss else ()
        self._always = (*self._of_labels, *((PROBABILITIES,) if self._has_router_loss else ()))
        self.differentiable: tuple[str, ...] = self._always

    def attached(self, whole_model: WholeModel, answer: Answer) -> AbstractContextManager[Any]:
        """Find the model's loss in chunks, too."""
        self._chunked = whole_model.chunked_loss
        return super().attached(whole_model, answer)

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these keyword arguments."""
        if given.get("labels") is None:
            raise NotImplementedError("a loss asks for log-probabilities without labels")
        call = ModelCall.read(given, of_tokens=True)
        check_labels_of(call, given["labels"])
        return call

    def forward(self, model: nn.Module, inputs: Inputs, weights: Columns | None = None) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens], and the user's, and sums
        of the routers. If log-probabilities alone have weights, the head finishes its gradients in
        the forward."""
        known = weights.get(self.main) if weights is not None and len(weights) == 1 else None
        return self._of_tokens(model, inputs, known) | self._sums()

    def _of_tokens(
        self, model: nn.Module, inputs: Inputs, d_log_probs: torch.Tensor | None
    ) -> Columns:
        if self._chunked is not None and self._own is None:
            means = MEANS in self._of_labels
            with self._chunked.giving_figures(with_means=means, d_log_probs=d_log_probs) as given:
                outputs = model(**inputs, use_cache=False)
            assert given.value is not None, "a call with labels runs the head"
            # [1, tokens, 2 or 3] -> [tokens, 2 or 3]
            found = outputs.logits.squeeze(0).to(given.value.dtype)
            found = found + (given.value - found.detach())  # without what casts have rounded
            return dict(zip(self._of_labels, found.unbind(1), strict=True))
        options = {} if self._own is None else {"output_hidden_states": True}
        outputs = model(**without_labels(inputs), use_cache=False, **options)
        found = figures_of_logits(outputs.logits.squeeze(0), inputs["labels"].squeeze(0))
        figures = {name: found[name] for name in self._of_labels}
        if self._own is not None:
            figures |= self._figures_of(outputs, inputs)
        return figures

    def _figures_of(self, outputs: Any, inputs: Inputs) -> Columns:
        """Return the user's figures of a micro-batch, each [tokens, ...]. Raises ValueError for
        other shapes and for names that have a meaning already."""
        assert self._own is not None, "the user makes figures"
        own = {name: value for name, value in inputs.items() if name != "seq_ctx"}
        tokens = inputs["input_ids"].shape[1]
        found = self._own(outputs, own)
        for name, value in found.items():
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (tokens,):
                raise ValueError(
                    f"flexseq_figures gives {name!r} as {shape}: give a tensor with a value, or a "
                    f"row of values, for each of the {tokens} tokens of inputs['input_ids']"
                )
            if name in PlannedOutput.__dataclass_fields__ or name == MEANS:
                raise ValueError(f"flexseq_figures gives {name!r}, which outputs have already")
        names = [name for name, value in found.items() if value.is_floating_point()]
        self.differentiable = (*self._always, *names)
        return dict(found)

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return an output whose fields are [B, S - 1]: of every token but the last. The user's
        figures are of all tokens, [B, S, ...]."""
        of_labels = {name: figures[name] for name in self._of_labels}
        fields = _fields(call, of_labels, given)
        means = fields.pop(MEANS, None)
        if self._router is not None:
            fields["loss"] = fields["loss"] + self._share(figures, given)
        output = PlannedOutput.of(call, **fields)
        if means is not None:
            output[MEANS] = means
        for name in figures.keys() - {*of_labels, *OF_STEP}:
            output[name] = call.padded(figures[name])
        return output

    def _share(self, figures: Columns, given: Mapping[str, Any]) -> torch.Tensor:
        """Return the router loss of a step as a part of a batch's loss, a scalar. Where losses are
        divided by the step's tokens, all parts together count once in the mean over ranks."""
        assert self._router is not None, "the model has a router loss"
        loss = self._router.facts.coefficient * self._router.loss(figures)
        if given.get("num_items_in_batch") is None:
            return loss
        return loss / (figures[BATCHES] * self._ranks)


def _fields(call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Columns:
    """Return an output's fields for labels: figures of every token but the last, each [B, S - 1],
    0 where it predicts none; `label_mask`, where it predicts one; and `loss`, a scalar.

    figures: each [tokens], log_probs among them. given: the arguments of the call.
    """
    mask = call.targets[:, :-1] != IGNORE_INDEX
    fields = {}
    for name, value in figures.items():
        fields[name] = call.padded(value)[:, :-1].masked_fill(~mask, 0)
    items = given.get("num_items_in_batch")
    if items is None:
        items = mask.sum().clamp(min=1)
    fields["loss"] = -fields["log_probs"].sum() / items
    fields["label_mask"] = mask
    return fields


def figures_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> Columns:
    """Return log-probabilities of targets [tokens], entropies, and means of all log-probabilities,
    0 for IGNORE_INDEX; logits [tokens, V]."""
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    none = targets == IGNORE_INDEX
    log_p = F.log_softmax(logits, dim=-1)  # [tokens, V]
    picked = log_p.gather(1, targets.masked_fill(none, 0).unsqueeze(1)).squeeze(1)  # [tokens]
    entropy = -(log_p.exp() * log_p).sum(dim=1)  # [tokens]
    figures = {"log_probs": picked, "entropy": entropy, MEANS: log_p.mean(dim=1)}
    return {name: value.masked_fill(none, 0) for name, value in figures.items()}


def labels_of_padding(call: ModelCall, labels: torch.Tensor) -> torch.Tensor:
    """Return which labels [B, S] of a call predict padding or are predicted from it, [B, S - 1]:
    of every token but the first."""
    return (labels[:, 1:] != IGNORE_INDEX) & ~(call.mask[:, 1:] & call.mask[:, :-1])


def check_labels_of(call: ModelCall, labels: torch.Tensor) -> None:
    """Raise ValueError for labels [B, S] that predict padding or are predicted from it."""
    wrong = labels_of_padding(call, labels).any(dim=1).nonzero().flatten()
    if len(wrong):
        raise ValueError(
            f"row {int(wrong[0])} of a batch has labels where its attention_mask has padding, or "
            f"at its first token after padding: make them {IGNORE_INDEX}"
        )


class Classes:
    """Logits of `AutoModelForSequenceClassification` and `AutoModelForTokenClassification`. The
    head runs on every token; then the model's own forward pools padded logits and computes the
    loss."""

    main = "logits"
    differentiable: tuple[str, ...] = ("logits",)
    totals: tuple[str, ...] = ()
    is_own = False

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._scores: torch.Tensor | None = None  # [1, tokens, labels] of the call that runs

    def attached(self, whole_model: WholeModel, answer: Answer) -> AbstractContextManager[Any]:
        """Make the model return all tokens' logits on micro-batches inside a block."""
        return self._model.register_forward_hook(self._with_all_scores, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, scores: torch.Tensor) -> None:
        self._scores = scores

    def _with_all_scores(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        scores, self._scores = self._scores, None
        if "seq_ctx" not in kwargs:
            return outputs
        assert scores is not None, "a call on a micro-batch runs the head"
        # accelerate has made float32 of what mixed precision computes in 16 bits
        return type(outputs)(**{**outputs, "logits": scores.to(outputs.logits.dtype)})

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these keyword arguments, whose labels may be of sequences."""
        return ModelCall.read(given, of_tokens=False)

    def forward(self, model: nn.Module, inputs: Inputs, weights: Columns | None = None) -> Columns:
        """Run a micro-batch: return the logits of its tokens, [tokens, labels]."""
        # after the hooks of ZeRO-3, which puts what its backward needs into the head's output
        with self._model.score.register_forward_hook(self._note):
            outputs = model(**without_labels(inputs), use_cache=False)
        return {"logits": outputs.logits.squeeze(0)}  # [1, tokens, labels] -> [tokens, labels]

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return the model's output for padded logits [B, S, labels]."""
        stand_in = _WithLogits(self._model, call.padded(figures["logits"]))
        passed = {name: given[name] for name in ("attention_mask", "labels") if name in given}
        return type(self._model).forward(stand_in, input_ids=call.ids, **passed)


class _WithLogits:
    """A classifier whose hidden states are its logits: only pooling and loss are left to do."""

    def __init__(self, model: PreTrainedModel, logits: torch.Tensor) -> None:
        self._model = model
        self.score = nn.Identity()
        self.dropout = nn.Identity()
        # transformers calls its cache `past_key_values` before 5.24
        nothing = dict.fromkeys(("cache", "past_key_values", "hidden_states", "attentions"))
        outputs = SimpleNamespace(last_hidden_state=logits, **nothing)
        setattr(self, model.base_model_prefix, lambda *args, **kwargs: outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
