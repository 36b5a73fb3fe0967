"""What a loss asks of a model for every token, and how a padded call is answered with it.

LogProbabilities    of labels, with entropies and what else TRL's fused head gives
Classes             logits of a classification head
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.facts import is_classifier
from hf_flexseq.hf.model.router import (
    COUNTS,
    OPTION,
    PROBABILITIES,
    TOTALS,
    RouterSums,
    router_loss,
)
from hf_flexseq.hf.objectives.calls import Call
from hf_flexseq.steps.exchange import Columns
from hf_flexseq.steps.inputs import Inputs


class Head(Protocol):
    """Knows one kind of results."""

    main: str
    """The figure on which every loss depends."""

    differentiable: tuple[str, ...]
    """Figures that have gradients, `main` among them."""

    totals: tuple[str, ...]
    """Those that are sums over all tokens of a step."""

    def attach(self) -> list[Any]:
        """Prepare the model; return the hooks, which undo it when they are removed."""

    def read(self, given: Mapping[str, Any]) -> Call:
        """Return the call with these keyword arguments. Raises NotImplementedError for one that
        cannot be answered."""

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...], and sums over
        them."""

    def answer(self, call: Call, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return what the model would have returned.

        figures: of the call's tokens, each [tokens, ...], and totals of its step, on the model's
            device.
        """


def head_of(model: PreTrainedModel, *, has_router_loss: bool) -> Head:
    """Return the head of a transformers model.

    has_router_loss: whether the trainer's loss asks for the model's router loss, too.
    """
    if is_classifier(model):
        return Classes(model)
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
        """Count what a router loss needs, if there is one; return the hooks, which undo it when
        they are removed."""
        if not self._has_router_loss:
            return []
        self._router = RouterSums(self._model)
        return self._router.hooks

    def read(self, given: Mapping[str, Any]) -> Call:
        """Return the call with these keyword arguments. Raises NotImplementedError for one that
        wants logits."""
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
        return Call.read(given, of_tokens=True)

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens], and of the trained model
        what its routers add up to."""
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

    def answer(self, call: Call, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return TRL's output, whose fields are [B, S - 1]: of every token but the last."""
        from trl.trainer.utils import FusedCausalLMOutput

        mask = call.targets[:, :-1] != IGNORE_INDEX
        fields = {}
        for name, value in figures.items():
            if name in TOTALS:
                continue
            padded = call.padded(value)[:, :-1]
            fields[name] = padded.masked_fill(~mask, 0)
        items = given.get("num_items_in_batch")
        if items is None:
            items = mask.sum().clamp(min=1)
        loss = -fields["log_probs"].sum() / items
        aux_loss = None
        if given.get(OPTION):
            assert self._router is not None, "the head is attached while calls are answered"
            facts = self._router.facts
            aux_loss = router_loss(figures[COUNTS], figures[PROBABILITIES], facts.top_k)
            loss = loss + facts.coefficient * aux_loss
        return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


_FUSED = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Classes:
    """Logits of `AutoModelForSequenceClassification` and `AutoModelForTokenClassification`.

    The head runs on every token. Which token speaks for a sequence, and what the loss is, the
    model's own forward says: it is run on padded logits in place of hidden states, with a head
    that changes nothing.
    """

    main = "logits"
    differentiable: tuple[str, ...] = ("logits",)
    totals: tuple[str, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._scores: torch.Tensor | None = None  # [1, tokens, labels] of the call that runs

    def attach(self) -> list[Any]:
        """Make the model return the logits of all tokens where it is called on a micro-batch;
        return the hooks, which undo it when they are removed."""
        return [
            self._model.score.register_forward_hook(self._note),
            self._model.register_forward_hook(self._with_all_scores, with_kwargs=True),
        ]

    def _note(self, module: nn.Module, args: Any, scores: torch.Tensor) -> None:
        self._scores = scores

    def _with_all_scores(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any
    ) -> Any:
        scores, self._scores = self._scores, None
        if "seq_ctx" not in kwargs:
            return outputs
        return type(outputs)(**{**outputs, "logits": scores})

    def read(self, given: Mapping[str, Any]) -> Call:
        """Return the call with these keyword arguments, whose labels may be of sequences."""
        return Call.read(given, of_tokens=False)

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return the logits of its tokens, [tokens, labels]."""
        without = ("labels", "shift_labels")
        packed = {name: value for name, value in inputs.items() if name not in without}
        outputs = model(**packed, use_cache=False)
        return {"logits": outputs.logits.squeeze(0)}  # [1, tokens, labels] -> [tokens, labels]

    def answer(self, call: Call, figures: Columns, given: Mapping[str, Any]) -> Any:
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
        outputs = SimpleNamespace(
            last_hidden_state=logits, past_key_values=None, hidden_states=None, attentions=None
        )
        setattr(self, model.base_model_prefix, lambda *args, **kwargs: outputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
