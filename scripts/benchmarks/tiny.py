"""A model and documents that make a training step take milliseconds, for benchmarks that ask what
becomes of a job and not how fast it is."""

import random

from transformers import LlamaConfig

VOCABULARY = 61


def tiny_llama_config() -> LlamaConfig:
    """Return the configuration of a Llama of two layers, with fewer heads for keys than for
    queries."""
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )


def documents(count: int, most_tokens: int) -> list[dict[str, list[int]]]:
    """Return examples of 2 to `most_tokens` tokens, most of them short, the same every time."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        length = min(most_tokens, max(2, int(draw.lognormvariate(3, 1))))
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        found.append({"input_ids": tokens, "labels": tokens})
    return found
