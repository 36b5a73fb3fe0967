"""Find the random number generators that a user's dataset has for itself: in its attributes, in
the datasets inside it, and in the functions that make its examples.

A check that reads examples gives them their states back, and the run draws the numbers that it
would have drawn without the check.
"""

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_flexseq.steps.users_code import is_librarys

# Attributes in which datasets and collators of libraries keep others, and functions of the user's.
_INNER = ("dataset", "datasets", "_format_kwargs", "example_collator")

_MOST_PARTS = 100  # of a list or a dict that is looked through
_MOST_OBJECTS = 10_000  # that are looked through


def restoring(owner: Any) -> list[Callable[[], None]]:
    """Return for each generator of `owner` a function that gives it its present state back."""
    return [_restoring(one) for one in _generators_in(owner)]


def _restoring(generator: Any) -> Callable[[], None]:
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return partial(generator.set_state, generator.get_state())


def _generators_in(owner: Any) -> Iterator[Any]:
    """Yield the generators in an object, each once."""
    known = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    seen: set[int] = set()
    parts = [owner]
    while parts and len(seen) < _MOST_OBJECTS:
        part = parts.pop()
        if id(part) in seen or isinstance(part, type | random.SystemRandom):
            continue
        seen.add(id(part))
        if isinstance(part, known):
            yield part
        else:
            with suppress(Exception):  # whatever the user's objects do when they are looked at
                parts += _inside(part)


def _inside(part: Any) -> list[Any]:
    """Return the objects in an object among which generators may be."""
    if inspect.ismethod(part):
        return [part.__self__, part.__func__]
    if isinstance(part, partial):
        return [part.func, *part.args, *part.keywords.values()]
    if inspect.isfunction(part) and not is_librarys(part):
        seen = inspect.getclosurevars(part)
        return [*seen.nonlocals.values(), *seen.globals.values()]
    if isinstance(part, dict | list | tuple):
        values = part.values() if isinstance(part, dict) else part
        return list(values) if len(part) <= _MOST_PARTS else []
    own = getattr(part, "__dict__", {})
    if inspect.ismodule(part) or isinstance(part, torch.nn.Module):
        return []
    if is_librarys(type(part)):
        return [own[name] for name in _INNER if name in own]
    return [*own.values(), *_methods(part)]


def _methods(part: Any) -> list[Any]:
    """Return the function that makes the examples of a user's dataset."""
    makes = getattr(type(part), "__getitem__", None)
    return [makes] if inspect.isfunction(makes) else []
