"""What a model answers to held-out questions, before its training and after it.

It answers greedily, by the `generate` of transformers, and finds the written answers more or less
likely, by its plain forward: a run ends with a figure that owes nothing to hf_flexseq. The first
process does this alone, with a model that it has whole.
"""

from textwrap import indent

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from hf_flexseq.config import IGNORE_INDEX

NEW_TOKENS = 48  # most of an answer that is shown


class Answers:
    """The answers to the questions of some held-out sequences: all that comes before the first
    trained token is a question."""

    def __init__(
        self, held_out: Dataset | None, shown: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """shown: how many questions are answered; with 0 nothing is done at all."""
        self._rows = [row for row in held_out or () if prompt_length(row)] if shown else []
        if shown and not self._rows:
            raise ValueError(
                f"show_answers={shown}: no held-out sequence begins with a question, that is with "
                "tokens that are not trained; set it to 0"
            )
        self._shown = shown
        self._tokenizer = tokenizer
        self._said: list[list[str]] = []  # before, and after
        self._likely: list[torch.Tensor] = []  # log-likelihoods of all written answers

    def ask(self, trainer: Trainer) -> None:
        """Have the model answer. Raises ValueError where a process has but a part of it."""
        if not self._rows:
            return
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or is_divided(trainer):
            raise ValueError(
                f"show_answers={self._shown} needs the whole model on a process: set it to 0, or "
                "train with recipes/accelerate_configs/ddp.yaml"
            )
        if not trainer.is_world_process_zero():
            return
        model = trainer.model.eval()
        self._likely.append(torch.stack([log_likelihood(model, row) for row in self._rows]))
        self._said.append([self._answer(model, row) for row in self._rows[: self._shown]])

    def lines(self) -> list[str]:
        """Return what changed, as lines."""
        if not self._rows:
            return []
        before, after = self._likely
        lines = [
            f"log-likelihood of the held-out answers: {before.sum():,.0f} -> {after.sum():,.0f}, "
            f"{(after > before).sum()} of {len(before)} rise"
        ]
        for row, *said in zip(self._rows, *self._said, strict=False):
            lines.append(f"question:      {self._question(row)}")
            for when, text in zip(("before", "after"), said, strict=True):
                lines += [f"answer {when}:", indent(text, "    ")]
        return lines

    def _answer(self, model: PreTrainedModel, row: dict) -> str:
        prompt = torch.tensor([row["input_ids"][: prompt_length(row)]], device=model.device)
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=self._tokenizer.eos_token_id,
        )
        return self._tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)

    def _question(self, row: dict) -> str:
        """Return the last words before the answer: those between special tokens, of which the
        very last open the answer. The user's role is left out."""
        parts: list[list[int]] = [[]]
        for token in row["input_ids"][: prompt_length(row)]:
            if token in self._tokenizer.all_special_ids:
                parts.append([])
            else:
                parts[-1].append(token)
        words = [text for text in map(self._tokenizer.decode, parts) if text.strip()]
        return " ".join(words[-2 if len(words) > 1 else -1].split()).removeprefix("user ")


def is_divided(trainer: Trainer) -> bool:
    """Tell if transformers or a pipeline has divided the model among the ranks."""
    return trainer.args.pipeline_parallel_size > 1 or any(
        hasattr(parameter, "device_mesh") for parameter in trainer.model.parameters()
    )


def prompt_length(row: dict) -> int:
    """Return how many tokens come before the first that is trained."""
    return next(i for i, label in enumerate(row["labels"]) if label != IGNORE_INDEX)


@torch.no_grad()
def log_likelihood(model: PreTrainedModel, row: dict) -> torch.Tensor:
    """Return the sum of the log-probabilities of a row's trained tokens, a scalar on the CPU."""
    ids, labels = (
        torch.tensor([row[name]], device=model.device) for name in ("input_ids", "labels")
    )
    loss = model(ids, labels=labels, use_cache=False).loss
    return -loss.float().cpu() * (labels[:, 1:] != IGNORE_INDEX).sum().cpu()
