"""Models, datasets and collators of the draws."""

import copy
import random
from functools import partial

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaForCausalLM,
)

from tests.hf.objectives import word_tokenizer, words_of
from tests.hf.plain import Stream, padded
from tests.hf.tiny import VOCAB, documents, tiny_gpt2, tiny_llama, tiny_model

TARGETS = 6  # of each sequence that is evaluated, so that a mean of batches is one over all tokens


# ---- models: each made with a dtype

TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


class RenamedLlama(LlamaForCausalLM):
    """A subclass whose name no list has."""


def renamed(dtype):
    model = tiny_llama(dtype)
    model.__class__ = RenamedLlama
    return model


def biased(dtype):
    """Biases in attention and MLP, and an embedding that is not trained."""
    model = tiny_llama(dtype, attention_bias=True, mlp_bias=True)
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def lora(dtype):
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(tiny_llama(dtype), config)


def gemma2(dtype):
    """Softcaps of scores and logits. Its windows are too long to matter: in float64 a row of
    padding that sees nothing else would be NaN."""
    model = tiny_model("Gemma2", dtype, head_dim=8, **TOKENS, sliding_window=64)
    model.set_attn_implementation("eager")  # sdpa has no softcap
    return model


# windows, sinks and a mixture of experts
_OSS = {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}

# By name: how each is made, and its weight in the draw.
MODELS = {
    "llama": (tiny_llama, 10),
    "tied": (partial(tiny_llama, tie_word_embeddings=True), 2),
    "renamed": (renamed, 1),
    "biased": (biased, 1),
    "lora": (lora, 2),
    "gpt2": (tiny_gpt2, 1),
    "gemma2": (gemma2, 1),
    "mistral": (partial(tiny_model, "Mistral", **TOKENS, sliding_window=9), 1),
    "qwen3": (partial(tiny_model, "Qwen3", head_dim=8, **TOKENS), 1),
    "gpt_oss": (partial(tiny_model, "GptOss", head_dim=8, **TOKENS, **_OSS), 0.5),
}


# ---- datasets of a causal language model


def training_rows(count):
    """Sequences of 1 to 60 tokens, parts of them without labels."""
    return documents([1 + (i * i * 7) % 60 for i in range(count)])


def evaluation_rows(collator="right", count=8):
    """Sequences of 7 to 42 tokens with as many targets each; of one length for a collator that
    makes labels of all tokens or cuts some off."""
    lengths = [7 + 5 * i for i in range(count)]
    if collator in RELABELLING:
        lengths = [12] * count
    rows = documents(lengths, seed=1)
    for row in rows:
        row["input_ids"] = [max(token, 1) for token in row["input_ids"]]  # 0 is padding
        without = len(row["input_ids"]) - TARGETS
        row["labels"] = [-100] * without + row["input_ids"][without:]
    return rows


def prompts_and_completions(count, *, even):
    """Texts for SFTTrainer. even: all of one length."""
    rng = random.Random(4)
    rows = []
    for _ in range(count):
        prompt = words_of(rng, 6 if even else rng.randrange(1, 20))
        completion = " " + words_of(rng, 6 if even else rng.randrange(1, 30))
        rows.append({"prompt": prompt, "completion": completion})
    return Dataset.from_list(rows)


class Rows(torch.utils.data.Dataset):
    """Examples that are changed when they are read."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        row = copy.deepcopy(self._rows[index])
        self.change(row)
        return row


class Augmented(Rows):
    """Examples of which one token is replaced at random whenever they are read."""

    def change(self, row):
        place = int(torch.randint(len(row["input_ids"]), ()))
        row["input_ids"][place] = int(torch.randint(VOCAB, ()))


def lazily_transformed(rows):
    """A table whose rows are changed when they are read."""

    def double(batch):
        doubled = [[2 * token % VOCAB for token in row] for row in batch["input_ids"]]
        return {**batch, "input_ids": doubled}

    return Dataset.from_list(rows).with_transform(double)


def with_columns(rows):
    """A table with columns that no model takes, of text and of tokens."""
    return Dataset.from_list(
        [{**row, "text": "words", "weights": [0.5] * len(row["input_ids"])} for row in rows]
    )


# By name: how each is made of rows, and its weight in the draw.
DATASETS = {
    "list": (list, 8),
    "table": (Dataset.from_list, 4),
    "table of more": (with_columns, 1),
    "transformed": (lazily_transformed, 1),
    "stream": (Stream, 2),
    "iterable table": (lambda rows: Dataset.from_list(rows).to_iterable_dataset(), 2),
    "augmented": (Augmented, 1),
}
STREAMS = ("stream", "iterable table")


# ---- collators of a causal language model


def padded_left(examples):
    """Padding on the left, and positions that begin behind it."""
    batch = padded(examples)
    lengths = batch["attention_mask"].sum(1)
    width = batch["attention_mask"].shape[1]
    for name, value in batch.items():
        rows = [row.roll(width - int(length)) for row, length in zip(value, lengths, strict=True)]
        batch[name] = torch.stack(rows)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


def labelled_padding(examples):
    """Labels on the padding, too."""
    batch = padded(examples)
    return {**batch, "labels": batch["labels"].where(batch["attention_mask"] == 1, 0)}


def with_multiples(examples):
    tokenizer = word_tokenizer()
    return DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8)(copy.deepcopy(examples))


def language_modeling(examples):
    rows = [{"input_ids": example["input_ids"]} for example in examples]
    return DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)(rows)


class Flattened(DataCollatorWithFlattening):
    """Leaves the examples as they are, for the other trainer of a case."""

    def __call__(self, features, **given):
        return super().__call__(copy.deepcopy(features), **given)


def longest_masked(examples):
    """The longest row of each batch of several has no targets."""
    batch = padded(examples)
    if len(examples) > 1:
        batch["labels"][int(batch["attention_mask"].sum(1).argmax())] = -100
    return batch


def shuffled_labels(examples):
    """Some labels are masked at random."""
    batch = padded(examples)
    drops = torch.rand(batch["labels"].shape) < 0.3
    return {**batch, "labels": batch["labels"].masked_fill(drops, -100)}


def with_positions(examples):
    """Positions that begin at 3."""
    batch = padded(examples)
    positions = torch.arange(3, 3 + batch["input_ids"].shape[1])
    return {**batch, "position_ids": positions.expand_as(batch["input_ids"])}


def without_mask(examples):
    """Padding that only its labels tell."""
    batch = padded(examples)
    del batch["attention_mask"]
    return batch


def truncated(examples):
    """All rows cut to the length of 16."""
    return {name: value[:, :16] for name, value in padded(examples).items()}


def truncated_to_shortest(examples):
    """All rows of a batch cut to the length of its shortest."""
    batch = padded(examples)
    width = int(batch["attention_mask"].sum(1).min())
    return {name: value[:, :width] for name, value in batch.items()}


# By name: the collator, and its weight in the draw.
COLLATORS = {
    "right": (padded, 12),
    "left": (padded_left, 0.7),
    "labelled padding": (labelled_padding, 0.7),
    "multiples of 8": (with_multiples, 1),
    "language modeling": (language_modeling, 1),
    "longest masked": (longest_masked, 0.7),
    "random labels": (shuffled_labels, 0.7),
    "positions": (with_positions, 1),
    "no mask": (without_mask, 1),
    "flattened": (Flattened(), 1),
    "truncated": (truncated, 1),
    "truncated to shortest": (truncated_to_shortest, 0.5),
}

# Collators under which rows with as many labels may have more or fewer targets.
RELABELLING = ("language modeling", "flattened", "truncated", "truncated to shortest")
