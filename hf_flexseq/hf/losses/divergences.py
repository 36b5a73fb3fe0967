"""The divergences that TRL's DistillationTrainer asks of a student and a teacher: how far their
distributions of the next token are apart, for every token.

Its loss computes divergences and entropies, tile by tile, from one token's hidden states and the
heads of both models. So it runs where the plan has put the token, and two numbers are gathered on
the source rank. The trainer's own `_compute_loss` serves on both sides:

    it asks for           on a micro-batch                    on the source rank
    hidden states         of a row, student and teacher       the figures, as if they were the
                          one after the other                 student's; none of the teacher
    divergences of them   TRL's own, which are noted          the figures themselves
    their sum             left out                            the loss

So TRL alone reads scales and caps of logits, heads, masks and the number of items. Three names of
TRL are replaced while a step may run: the trainer's `_get_last_hidden_state` and
`_forward_redirection`, and its module's `ChunkedDivergenceFunction`. Rejected: gathering hidden
states, thousands of numbers for every token.

The loss is the sum of all divergences over the number of items, which is known before any forward:
one pass suffices.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.patches import Patch
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.engine.whole_model import WholeModel
from hf_flexseq.hf.model.attachments import on_micro_batches
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import base_model
from hf_flexseq.hf.model.positions import needed_columns
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.plan.images import VIDEO
from hf_flexseq.plan.shard import Shard
from hf_flexseq.steps.calls import ModelCall
from hf_flexseq.steps.images import UnsupportedImages
from hf_flexseq.steps.inputs import Inputs
from hf_flexseq.steps.source_row import Columns
from hf_flexseq.steps.token_columns import INDICES, LENGTHS

# Answers a padded call of the student, by its keyword arguments.
Answer = Callable[[dict[str, Any]], torch.Tensor]


class Divergences:
    """Divergences of a student's tokens from a teacher, and the student's entropies."""

    main = "divergence"
    differentiable: tuple[str, ...] = ("divergence",)
    totals: tuple[str, ...] = ()
    is_own = False

    def __init__(self, trainer: Any) -> None:
        """Raises NotImplementedError for an inexact teacher or another version of TRL."""
        _check_version()
        self._trainer = trainer
        check_model(self._teacher)
        self._needed = {  # columns, by whether they are the teacher's
            False: needed_columns(base_model(trainer.model)),
            True: needed_columns(self._teacher),
        }
        self._context_of: Callable[[Shard], SequenceContext] | None = None  # the teacher's
        self._answer: Answer | None = None
        self._vision: VisionModel | None = None  # the teacher's, where both models take images
        self._redirect = trainer._forward_redirection

        # of the micro-batch that runs
        self._row: Inputs | None = None
        self._targets: torch.Tensor | None = None  # [tokens] True where a token predicts one
        self._found: Columns = {}
        # of the call on the source rank: True if it has got figures instead of hidden states
        self._is_answered = False

    @property
    def _teacher(self) -> PreTrainedModel:
        return base_model(self._unwrapped_teacher())

    def _unwrapped_teacher(self) -> nn.Module:
        trainer = self._trainer
        return trainer.accelerator.unwrap_model(trainer.teacher_model)

    @contextmanager
    def attached(self, whole_model: WholeModel, answer: Answer) -> Iterator[None]:
        """Let the trainer compute its loss on micro-batches, and on figures on the source rank,
        inside the block. Collective over the world. answer: answers padded calls of the
        student."""
        from trl.trainer import distillation_trainer as module

        contexts = whole_model.beside(self._teacher)
        divergences = partial(self._divergences, module.ChunkedDivergenceFunction.apply)
        self._vision = None
        with ExitStack() as attached:
            attached.enter_context(on_micro_batches(self._teacher))
            if whole_model.vision is not None:
                with suppress(UnsupportedImages):  # it distills text
                    self._vision = VisionModel(self._teacher)
                    attached.enter_context(self._vision.attached())
            for patch in (
                Patch(self, _context_of=contexts, _answer=answer),
                Patch(self._trainer, _get_last_hidden_state=self._hidden_states),
                Patch(self._trainer, _forward_redirection=self._redirected),
                Patch(module, ChunkedDivergenceFunction=SimpleNamespace(apply=divergences)),
            ):
                attached.enter_context(patch)
            yield

    # ---- what TRL's `_compute_loss` gets

    def _redirected(
        self,
        wrapper: nn.Module,
        model: nn.Module,
        method: Callable[..., Any],
        *args: Any,
        **images: Any,
    ) -> Any:
        """Return a method's result, called inside the wrapper's forward if a model runs."""
        if self._row is None:
            return method(*args, **images)
        return self._redirect(wrapper, model, method, *args, **images)

    def _hidden_states(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        **images: Any,
    ) -> torch.Tensor:
        """Return hidden states for the last `logits_to_keep` tokens, [B, kept, width], each of the
        token before; on a micro-batch, of its own tokens, [1, tokens, width]."""
        is_teacher = model is self._unwrapped_teacher()
        if self._row is not None:
            return self._run(model, self._row, is_teacher=is_teacher)
        if is_teacher:
            return torch.zeros(len(input_ids), logits_to_keep, 1, device=input_ids.device)
        assert self._answer is not None, "a loss is computed while the model is attached"
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        figures = self._answer({**given, "logits_to_keep": logits_to_keep, **images})
        self._is_answered = True
        return figures

    def _run(self, model: nn.Module, row: Inputs, *, is_teacher: bool) -> torch.Tensor:
        """Run a model without its head on a micro-batch -> [1, tokens, width]."""
        inputs: dict[str, Any] = {}
        for name, value in row.items():
            if name not in (LENGTHS, INDICES) or name in self._needed[is_teacher]:
                inputs[name] = value
        if is_teacher:
            inputs["seq_ctx"] = self._context_of_teacher(row["seq_ctx"])
        inputs["use_cache"] = False
        backbone = base_model(model).base_model
        return backbone(**inputs).last_hidden_state

    def _context_of_teacher(self, of_student: SequenceContext) -> SequenceContext:
        """Return the teacher's context of a micro-batch. Raises NotImplementedError in a step with
        images of which the teacher knows nothing, or which its layers show both ways, and with
        videos for a teacher of another class: they are divided as the student allows."""
        assert self._context_of is not None, "a micro-batch runs while the model is attached"
        context = self._context_of(of_student.shard)
        if of_student.images is not None:
            name = unsharded_class(self._teacher).__name__
            if self._vision is None or self._vision.both_ways:
                raise NotImplementedError(
                    f"hf_flexseq distills no images from a {name}: it takes none here, or shows "
                    "their tokens both ways; distill text"
                )
            student = base_model(self._trainer.model)
            if VIDEO in of_student.images.counts and unsharded_class(student).__name__ != name:
                raise NotImplementedError(
                    f"hf_flexseq distills no videos from a {name} to another model: distill images"
                )
            context.images = of_student.images.beside()
        return context

    def _divergences(
        self, own: Callable[..., tuple[torch.Tensor, torch.Tensor]], *given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return divergences and entropies, each [positions], instead of TRL's function `own`.
        given: its arguments; first hidden states [positions, width], or figures [positions, 2]."""
        if self._row is not None:
            divergence, entropy = own(*given)
            self._found["divergence"] = self._of_tokens(divergence)
            self._found["entropy"] = self._of_tokens(entropy)
            return divergence, entropy
        if self._is_answered:
            self._is_answered = False
            divergence, entropy = given[0].unbind(dim=1)
            return divergence, entropy
        return own(*given)  # another trainer's

    def _of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of all tokens of a micro-batch, [tokens], zeros where TRL has left tokens
        out that predict nothing; [tokens or those that predict] -> [tokens]."""
        assert self._targets is not None, "a micro-batch runs"
        if len(values) == len(self._targets):
            return values
        (positions,) = self._targets.nonzero(as_tuple=True)
        return values.new_zeros(len(self._targets)).index_put((positions,), values)

    # ---- as any head

    def read(self, given: Mapping[str, Any]) -> ModelCall:
        """Return the call with these keyword arguments, of `_get_last_hidden_state`."""
        if "logits_to_keep" not in given:
            raise NotImplementedError(
                f"{type(self._trainer).__name__} calls the model itself: hf_flexseq computes "
                "divergences, as DistillationTrainer's own compute_loss asks for them"
            )
        ids, mask = given["input_ids"], given["attention_mask"]
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        labels[:, : ids.shape[1] - given["logits_to_keep"]] = IGNORE_INDEX
        return ModelCall.read({**given, "labels": labels}, of_tokens=True)

    def forward(self, model: nn.Module, inputs: Inputs, weights: Columns | None = None) -> Columns:
        """Run a micro-batch through student and teacher: return figures, each [tokens]."""
        student = self._trainer.accelerator.unwrap_model(model)
        packed = {name: value for name, value in inputs.items() if name != "shift_labels"}
        packed["targets"] = packed.pop("labels") != IGNORE_INDEX  # labels ask for a loss
        method = partial(self._figures_of, student)
        return self._redirect(model, student, method, **packed)

    def _figures_of(self, student: nn.Module, *, targets: torch.Tensor, **row: Any) -> Columns:
        """Return the figures that TRL's loss computes of a micro-batch, inside the forward of the
        student's wrapper. targets: [1, tokens] True where a token predicts one."""
        ids = row["input_ids"]
        batch = {
            "prompt_ids": ids[:, :0],  # the whole row as a completion
            "prompt_mask": ids[:, :0],
            "completion_ids": ids,
            "completion_mask": targets.to(ids.dtype),
        }
        with Patch(self, _row=row, _targets=targets.squeeze(0)), Patch(self, _found={}):
            self._trainer._compute_loss(student, batch, None)
            return self._found

    def answer(self, call: ModelCall, figures: Columns, given: Mapping[str, Any]) -> torch.Tensor:
        """Return figures instead of hidden states: [B, kept, 2], divergences and entropies."""
        both = torch.stack([figures["divergence"], figures["entropy"]], dim=1)  # [tokens, 2]
        padded = call.padded(both)  # -> [B, S, 2]
        return padded[:, :-1][:, -given["logits_to_keep"] :]

    # ---- the loss's gradients, before it is computed

    def weights(
        self, batches: Sequence[Mapping[str, Any]], calls: Sequence[ModelCall]
    ) -> Columns | None:
        """Return this rank's loss gradients [tokens] by divergence, or None for another loss."""
        from trl import DistillationTrainer

        kind = type(self._trainer)
        for name in ("compute_loss", "_compute_loss"):
            if getattr(kind, name) is not getattr(DistillationTrainer, name):
                return None
        parts = []
        for batch, call in zip(batches, calls, strict=True):
            mask = batch["completion_mask"]  # [B, completion]
            if "tool_mask" in batch:
                mask = mask * batch["tool_mask"]
            # gradients are averaged over ranks
            processes = self._trainer.accelerator.num_processes
            items = batch["num_items_in_batch"].clamp(min=1.0) / processes
            weight = torch.zeros_like(call.ids, dtype=torch.float32)  # [B, S]
            weight[:, -mask.shape[1] - 1 : -1] = mask / items
            parts.append(call.in_row(weight).cpu())
        return {"divergence": torch.cat(parts)}


def _check_version() -> None:
    """Raise NotImplementedError for a version of TRL without the names that are replaced."""
    import trl
    from trl.trainer import distillation_trainer as module

    methods = ("_compute_loss", "_get_last_hidden_state")
    is_known = hasattr(module, "ChunkedDivergenceFunction") and all(
        hasattr(module.DistillationTrainer, name) for name in methods
    )
    if not is_known:
        raise NotImplementedError(
            f"DistillationTrainer of TRL {trl.__version__} computes its loss in another way than "
            "that of TRL 1.16: use that version"
        )
