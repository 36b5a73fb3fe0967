"""Preference tuning on one rank, by TRL's DPOTrainer or with FlexSeqMixin in front of it.

Pairs of long sequences, one pair a rank and step, full fine-tuning of a small Llama with a
reference model. Stock computes a pair on the rank that drew it; flexseq has room on a rank for
half of the tokens of a pair whose sides share their prompt, so that both ranks work on each.
"""

import random
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from peers.corpus import VOCABULARY

SIDE_TOKENS = 4096  # of each side of a pair
PROMPT_SHARE = 7 / 8
CAP = 2305  # tokens per rank and micro-batch: half of 3,583 + 2 x 513
WORDS = [f"word{number}" for number in range(VOCABULARY - 2)]


class FlexSeqDPOTrainer(FlexSeqMixin, DPOTrainer):
    pass


def pairs(count: int) -> Dataset:
    """Return pairs whose sides share most of their tokens."""
    numbers = random.Random(0)

    def some(size: int) -> str:
        """Return a text of so many words, each a token."""
        return "".join(f" {numbers.choice(WORDS)}" for _ in range(size))

    prompt = int(SIDE_TOKENS * PROMPT_SHARE)
    answer = SIDE_TOKENS - prompt - 1  # TRL adds the end of a sequence
    rows = []
    for _ in range(count):
        rows.append({"prompt": some(prompt), "chosen": some(answer), "rejected": some(answer)})
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words."""
    names = ["<pad>", "<eos>", *WORDS]
    numbers = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def dpo_trainer(
    method: str,
    model: PreTrainedModel,
    reference: PreTrainedModel,
    world: int,
    steps: int,
    out: str,
    **common: Any,
) -> Trainer:
    """Return the trainer of a method, with a pair for each rank and step."""
    args = DPOConfig(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=1,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        **common,
    )
    given: dict[str, Any] = {
        "model": model,
        "ref_model": reference,
        "args": args,
        "train_dataset": pairs(world * steps),
        "processing_class": tokenizer(),
    }
    if method == "plain":
        return DPOTrainer(**given)
    options = FlexSeqArguments(max_tokens_per_rank=CAP)
    return FlexSeqDPOTrainer(**given, flexseq_args=options)
