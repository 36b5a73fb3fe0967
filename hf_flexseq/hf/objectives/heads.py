"""What a loss asks of a model for every token, and how a padded call is answered with it.

LogProbabilities    of labels, with entropies and what else TRL's fused head gives
TokenFigures        log-probabilities of labels and entropies, from the model's own head
Classes             logits of a classification head
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.facts import is_classifier
from hf_flexseq.hf.model.loss import ChunkedLoss, attach_chunked_loss
from hf_flexseq.hf.model.router import (
    COUNTS,
    OPTION,
    PROBABILITIES,
    TOTALS,
    RouterSums,
    router_loss,
)
from hf_flexseq.hf.objectives.outputs import PlannedOutput
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.inputs import Inputs, without_labels
from hf_flexseq.steps.source_row import Columns


class Head(Protocol):
    """Knows one kind of results."""

    main: str
    """The figure on which every loss depends."""

    differentiable: tuple[str, ...]
    """Figures that have gradients, `main` among them."""

    totals: tuple[str, ...]
    """Figures that are sums over all tokens of a step."""

    def attach(self) -> list[Any]:
        """Prepare the model; return the hooks, which undo it when they are removed."""

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these arguments. Raises NotImplementedError if it has no answer."""

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of tokens, each [tokens, ...], and sums over them."""

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return the model's result from figures of the call's tokens, each [tokens, ...], and
        totals of its step, on the model's device."""


def head_of(model: PreTrainedModel, *, has_router_loss: bool, reads_figures: bool) -> Head:
    """Return the head of a transformers model. reads_figures: True if a loss of the user's reads
    log-probabilities. has_router_loss: True if the trainer's loss includes a router loss."""
    if is_classifier(model):
        return Classes(model)
    if reads_figures:
        return TokenFigures(model)
    return LogProbabilities(model, has_router_loss=has_router_loss)


class LogProbabilities:
    """Figures of the head that TRL puts on a model (`add_fused_lm_head`), which computes them tile
    by tile, with the trainer's temperature and the model's own scale and cap of logits."""

    main = "log_probs"
    differentiable: tuple[str, ...] = ("log_probs", "entropy", PROBABILITIES)
    totals: tuple[str, ...] = TOTALS

    def __init__(self, model: PreTrainedModel, *, has_router_loss: bool) -> None:
        self._model = model
        self._has_router_loss = has_router_loss
        self._router: RouterSums | None = None  # while the head is attached

    def attach(self) -> list[Any]:
        """Attach counters for a router loss, if there is one; return the hooks to remove later."""
        if not self._has_router_loss:
            return []
        self._router = RouterSums(self._model)
        return self._router.hooks

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these arguments. Raises NotImplementedError for logits."""
        if not given.get("fused_lm_head"):
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

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures, each [tokens], and sums of the trained routers."""
        packed = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**packed, fused_lm_head=True, use_cache=False)
        figures = {}
        for name in _FUSED:
            value = getattr(outputs, name)
            if value is not None:
                figures[name] = value.squeeze(0)  # [1, tokens] -> [tokens]
        if self._router is not None:
            figures.update(self._router.take() or {})  # none of a reference model
        return figures

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return TRL's output, whose fields are [B, S - 1]: of every token but the last."""
        from trl.trainer.utils import FusedCausalLMOutput

        of_tokens = {name: value for name, value in figures.items() if name not in TOTALS}
        fields = _fields(call, of_tokens, given)
        if given.get(OPTION):
            assert self._router is not None, "the head is attached while calls are answered"
            facts = self._router.facts
            aux_loss = router_loss(figures[COUNTS], figures[PROBABILITIES], facts.top_k)
            fields["aux_loss"] = aux_loss
            fields["loss"] = fields["loss"] + facts.coefficient * aux_loss
        return FusedCausalLMOutput(**fields)


_FUSED = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class TokenFigures:
    """Log-probabilities of labels, and entropies, of a causal language model as it is: chunk by
    chunk inside its own head (`model/loss.py`), or from whole logits if the model scales or caps
    them."""

    main = "log_probs"
    differentiable: tuple[str, ...] = ("log_probs", "entropy")
    totals: tuple[str, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._chunked: ChunkedLoss | None = None

    def attach(self) -> list[Any]:
        """Find the chunked loss that the engine has attached to the model; return no hooks."""
        self._chunked = attach_chunked_loss(self._model)
        return []

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these keyword arguments."""
        if given.get("labels") is None:
            raise NotImplementedError("a loss asks for log-probabilities without labels")
        call = ModelCall.read(given, of_tokens=True)
        check_labels_of(call, given["labels"])
        return call

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens]."""
        if self._chunked is not None:
            with self._chunked.giving_figures() as given:
                outputs = model(**inputs, use_cache=False)
            assert given.value is not None, "a call with labels runs the head"
            # [1, tokens, 2] -> [tokens, 2]
            found = outputs.logits.squeeze(0).to(given.value.dtype)
            found = found + (given.value - found.detach())  # without what casts have rounded
            return {"log_probs": found[:, 0], "entropy": found[:, 1]}
        outputs = model(**without_labels(inputs), use_cache=False)
        return figures_of_logits(outputs.logits.squeeze(0), inputs["labels"].squeeze(0))

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return an output whose fields are [B, S - 1]: of every token but the last."""
        return PlannedOutput(**_fields(call, figures, given))


def _fields(call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> Columns:
    """Return what an output says of labels: figures of every token but the last, each [B, S - 1],
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
    """Return log-probabilities of targets [tokens] and entropies, 0 for IGNORE_INDEX; logits
    [tokens, V]."""
    if logits.dtype.itemsize == 2:
        logits = logits.float()
    none = targets == IGNORE_INDEX
    log_p = F.log_softmax(logits, dim=-1)  # [tokens, V]
    picked = log_p.gather(1, targets.masked_fill(none, 0).unsqueeze(1)).squeeze(1)  # [tokens]
    entropy = -(log_p.exp() * log_p).sum(dim=1)  # [tokens]
    return {"log_probs": picked.masked_fill(none, 0), "entropy": entropy.masked_fill(none, 0)}


def check_labels_of(call: ModelCall, labels: torch.Tensor) -> None:
    """Raise ValueError for labels [B, S] that predict padding or are predicted from it."""
    of_padding = (labels[:, 1:] != IGNORE_INDEX) & ~(call.mask[:, 1:] & call.mask[:, :-1])
    wrong = of_padding.any(dim=1).nonzero().flatten()
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

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._scores: torch.Tensor | None = None  # [1, tokens, labels] of the call that runs

    def attach(self) -> list[Any]:
        """Make the model return all tokens' logits on micro-batches; return the hooks."""
        return [self._model.register_forward_hook(self._with_all_scores, with_kwargs=True)]

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

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return the logits of its tokens, [tokens, labels]."""
        # after the hooks of ZeRO-3, which puts what its backward needs into the head's output
        noting = self._model.score.register_forward_hook(self._note)
        try:
            outputs = model(**without_labels(inputs), use_cache=False)
        finally:
            noting.remove()
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
