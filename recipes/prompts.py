"""Prompts of reinforcement learning: loaded, or made, and those that are short enough.

A row has `prompt`, as text or as messages; its other columns go to the reward functions.

The made ones ask to count on from their last digit: `2718` to be followed by `9012345678901234`.
The digits before that one mean nothing; they make most prompts short and a few of them long. A
model without any training gets one place in twenty right by chance, and can learn the rest one
digit at a time.
"""

import math
import random
from collections.abc import Iterable, Iterator

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from arguments import PromptArguments
from rows import check_longer

COUNTING = "count-on"

PROMPTS = 4000
PLACES = 16  # digits that are asked for
# of the digits of a prompt: the logarithm is normal
MEDIAN = 16
SIGMA = 1.2
MOST = 240


def load_counting() -> Dataset:
    """Return the made prompts, and how many places are asked for."""
    return Dataset.from_list(list(counting_prompts(PROMPTS)))


# Corpora that are made here, by their names.
MADE = {COUNTING: load_counting}


def counting_prompts(count: int) -> Iterator[dict[str, str | int]]:
    """Yield prompts of digits, and how many are asked for, always the same."""
    draw = random.Random(0)
    for _ in range(count):
        digits = min(max(round(draw.lognormvariate(math.log(MEDIAN), SIGMA)), 1), MOST)
        prompt = "".join(draw.choice("0123456789") for _ in range(digits))
        yield {"prompt": prompt, "places": PLACES}


def texts_of(prompts: Dataset) -> Iterable[str] | None:
    """Return all prompts; None where they are conversations."""
    if not len(prompts) or not isinstance(prompts[0]["prompt"], str):
        return None
    return prompts["prompt"]


def to_prompts(
    prompts: Dataset, tokenizer: PreTrainedTokenizerBase, args: PromptArguments
) -> tuple[Dataset, str]:
    """Return the prompts that are trained on, with all their columns, and one line about them."""
    options = {"tokenizer": tokenizer, "most": args.max_prompt_length}
    fitting = prompts.filter(_fits, fn_kwargs=options, num_proc=args.preprocessing_workers)
    longer = len(prompts) - len(fitting)
    limit, advice = f"max_prompt_length={args.max_prompt_length:,}", "long_prompts to drop"
    check_longer(longer, len(prompts), "prompts", limit, args.long_prompts, advice)
    if not len(fitting):
        raise ValueError(f"no prompt is left of {len(prompts):,} of {args.dataset}")
    became = f" ({longer:,} longer ones dropped)" if longer else ""
    return fitting, (
        f"{len(fitting):,} prompts of at most {args.max_prompt_length:,} tokens{became}"
    )


def tokens_of(prompt: str | list, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens a prompt is."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt).input_ids)
    encoded = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return len(encoded["input_ids"])


def _fits(row: dict, tokenizer: PreTrainedTokenizerBase, most: int) -> bool:
    return tokens_of(row["prompt"], tokenizer) <= most
