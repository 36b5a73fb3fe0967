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
from hf_flexseq.hf.objectives.calls import Call
from hf_flexseq.steps.exchange import Columns
from hf_flexseq.steps.inputs import Inputs


class Head(Protocol):
    """Knows one kind of results."""

    main: str
    """The figure on which every loss depends."""

    differentiable: tuple[str, ...]
    """Figures that have gradients, `main` among them."""

    def read(self, given: Mapping[str, Any]) -> Call:
        """Return the call with these keyword arguments. Raises NotImplementedError for one that
        cannot be answered."""

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens, ...]."""

    def answer(self, call: Call, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return what the model would have returned.

        figures: of the call's tokens, each [tokens, ...], on the model's device.
        """


def head_of(model: PreTrainedModel) -> Head:
    """Return the head of a transformers model."""
    if is_classifier(model):
        return Classes(model)
    return LogProbabilities()


class LogProbabilities:
    """Figures of the head that TRL puts on a model (`add_fused_lm_head`), which computes them tile
    by tile, with the trainer's temperature and the model's own scale and cap of logits."""

    main = "log_probs"
    differentiable = ("log_probs", "entropy")

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
        return Call.read(given, of_tokens=True)

    def forward(self, model: nn.Module, inputs: Inputs) -> Columns:
        """Run a micro-batch: return figures of its tokens, each [tokens]."""
        packed = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**packed, fused_lm_head=True, use_cache=False)
        figures = {}
        for name in _FUSED:
            value = getattr(outputs, name)
            if value is not None:
                figures[name] = value.squeeze(0)  # [1, tokens] -> [tokens]
        return figures

    def answer(self, call: Call, figures: Columns, given: Mapping[str, Any]) -> Any:
        """Return TRL's output, whose fields are [B, S - 1]: of every token but the last."""
        from trl.trainer.utils import FusedCausalLMOutput

        mask = call.targets[:, :-1] != IGNORE_INDEX
        fields = {}
        for name, value in figures.items():
            padded = call.padded(value)[:, :-1]
            fields[name] = padded.masked_fill(~mask, 0)
        items = given.get("num_items_in_batch")
        if items is None:
            items = mask.sum().clamp(min=1)
        return FusedCausalLMOutput(
            loss=-fields["log_probs"].sum() / items, label_mask=mask, **fields
        )


_FUSED = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class Classes:
    """Logits of `AutoModelForSequenceClassification` and `AutoModelForTokenClassification`.

    The head runs on every token. Which token speaks for a sequence, and what the loss is, the
    model's own forward says: it is run on padded logits in place of hidden states, with a head
    that changes nothing.
    """

    main = "logits"
    differentiable = ("logits",)

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
        return type(self._model).forward(stand_in, input_ids=call.ids, **passed)  # type: ignore[arg-type]


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
