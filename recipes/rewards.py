"""What completions are worth, by rules that a program can check.

A reward function gets the completions of a batch and the columns of the dataset, by
name, and returns a number for each completion. A completion is text, or, where the prompts are
conversations, a list of messages.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

Completion = str | list[dict[str, Any]]
Reward = Callable[..., Sequence[float | None]]

SUCCESSIVE = frozenset(f"{digit}{(digit + 1) % 10}" for digit in range(10))


def counts_on(
    prompts: list[Completion], completions: list[Completion], places: list[int], **columns: Any
) -> list[float]:
    """Return for each completion the share of places with the digit after the one before, 0 to 1.

    The first place comes after the last digit of the prompt; after 9 comes 0.

    places: how many there are, for each completion. Missing ones and those beyond count as wrong.
    """
    shares = []
    for prompt, completion, count in zip(prompts, completions, places, strict=True):
        said = text_of(completion)
        row = text_of(prompt)[-1:] + said[:count]
        right = sum(before + after in SUCCESSIVE for before, after in pairwise(row))
        shares.append(right / max(len(said), count))
    return shares


def exact(completions: list[Completion], answer: list[str], **columns: Any) -> list[float]:
    """Return for each completion 1 where it is the answer, whitespace around it aside, or 0."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        rewards.append(float(text_of(completion).strip() == wanted.strip()))
    return rewards


# What TRL gives to every reward function, and columns that it does not hand on.
GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
NOT_GIVEN = {"prompt", "completion", "completion_ids"}
OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

REWARDS: dict[str, Reward] = {"counts_on": counts_on, "exact": exact}


def text_of(completion: Completion) -> str:
    """Return what a completion says."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def load_rewards(names: Sequence[str]) -> list[Reward]:
    """Return the functions of these names: of REWARDS, or `module:function`, or
    `file.py:function`. Raises ValueError for one that is not there."""
    return [_load(name) for name in names]


def check_columns(names: Sequence[str], rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Raise ValueError for a reward function that needs what neither TRL nor a column gives it.

    columns: those of the dataset.
    """
    given = GIVEN | (set(columns) - NOT_GIVEN)
    for name, reward in zip(names, rewards, strict=True):
        for parameter in inspect.signature(reward).parameters.values():
            is_needed = parameter.default is parameter.empty and parameter.kind not in OPTIONAL
            if is_needed and parameter.name not in given:
                raise ValueError(
                    f"reward function {name!r} needs a column {parameter.name!r}: the dataset has "
                    f"{', '.join(columns)}; add it, or take another function (reward_functions)"
                )


def _load(name: str) -> Reward:
    if name in REWARDS:
        return REWARDS[name]
    source, colon, function = name.rpartition(":")
    if not (colon and source and function):
        raise ValueError(
            f"unknown reward function {name!r}: take one of {', '.join(REWARDS)}, or give "
            "your own as module:function or file.py:function"
        )
    module = _module_of_file(source) if source.endswith(".py") else _module(source)
    reward = getattr(module, function, None)
    if not callable(reward):
        raise ValueError(f"reward function {name!r}: {source} has no function {function!r}")
    return reward


def _module(name: str) -> ModuleType:
    """Return a module that is installed, or lies in the folder in which the run was started."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"reward functions of {name!r}: {error}") from error


def _module_of_file(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise ValueError(f"reward functions of {path!r}: no such file")
    name = f"rewards_of_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
