"""Preference tuning on one rank, by TRL's DPOTrainer or with FlexSeqMixin in front of it; rank 0
writes tokens per second as JSON.

Pairs of long sequences, one pair a rank and step, full fine-tuning of the same small Llama with a
reference model. Stock computes a pair where it was drawn; flexseq has room for half of a sequence
on a rank, so that both ranks share each. The clock starts when the first step is over.
"""

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from peers.train import COMMON, SIZES, Clock, small_llama

PROMPT_SHARE = 7 / 8
WORDS = [f"word{number}" for number in range(SIZES["vocab_size"] - 2)]


class FlexSeqDPOTrainer(FlexSeqMixin, DPOTrainer):
    pass


def pairs(count: int, tokens: int) -> Dataset:
    """Return pairs whose sides have `tokens` tokens each, and share most of them."""
    numbers = random.Random(0)

    def some(size: int) -> str:
        """Return a text of so many words, each a token."""
        return "".join(f" {numbers.choice(WORDS)}" for _ in range(size))

    prompt = int(tokens * PROMPT_SHARE)
    answer = tokens - prompt - 1  # TRL adds the end of a sequence
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


def dpo_trainer(asked: argparse.Namespace, out: str) -> Trainer:
    """Return the trainer of a method."""
    world = int(os.environ["WORLD_SIZE"])
    args = DPOConfig(
        output_dir=out,
        max_steps=asked.steps,
        per_device_train_batch_size=1,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        **COMMON,
    )
    given: dict[str, Any] = {
        "model": small_llama(),
        "ref_model": small_llama(),
        "args": args,
        "train_dataset": pairs(world * asked.steps, asked.tokens),
        "processing_class": tokenizer(),
    }
    if asked.method == "plain":
        return DPOTrainer(**given)
    options = FlexSeqArguments(max_tokens_per_rank=asked.tokens // 2)
    return FlexSeqDPOTrainer(**given, flexseq_args=options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("flexseq", "plain"))
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    asked = parser.parse_args()
    trainer = dpo_trainer(asked, str(Path(asked.out).parent / "trainer"))
    clock = Clock()
    trainer.add_callback(clock)
    trainer.train()
    trained = 2 * asked.tokens * dist.get_world_size() * (asked.steps - 1)
    if dist.get_rank() == 0:
        Path(asked.out).write_text(json.dumps({"tokens_per_s": trained / clock.seconds}))


if __name__ == "__main__":
    main()
