"""Walk over the objects that an object refers to, without running code of the user's: no property,
no `__getattr__`, no `__getitem__`.

Followed are attributes, containers, closures, bound methods, partials and weak references, up to a
number of objects. Not followed are globals of functions, attributes of classes, and models.
"""

import enum
import functools
import logging
import pathlib
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainingArguments,
)

from hf_flexseq.steps.users_code import is_known, package

# Objects that are looked at from one starting point, and of one container, at most.
MOST_OBJECTS = 100_000
MOST_OF_CONTAINER = 1_000

# Objects without anything in them that data and training could exchange.
_PLAIN = (
    types.NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.ModuleType,
    enum.Enum,
    pathlib.PurePath,
    re.Pattern,
    np.dtype,
    np.generic,
    torch.device,
    torch.dtype,
    logging.Logger,
    # described once, and then only read
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainingArguments,
    # of the machine
    Accelerator,
    AcceleratorState,
    GradientState,
    PartialState,
)


_SERIES: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


class Reached(NamedTuple):
    """An object, and how it is reached."""

    value: Any
    path: str


def reachable(
    root: Any,
    name: str,
    *,
    ends: Callable[[Any], bool],
    without: AbstractSet[int] = frozenset(),
) -> Iterator[Reached]:
    """Yield the objects that are reached from `root`, itself among them, nearest first.

    name: of the root. ends: True if an object is yielded without what it refers to. without: ids
    of objects that are left out. Other modules of torch are left out, too.
    """
    seen = set(without)
    waiting = deque([Reached(root, name)])
    looked_at = 0
    while waiting:
        reached = waiting.popleft()
        value = reached.value
        if id(value) in seen or _is_plain(value):
            continue
        seen.add(id(value))
        if ends(value):
            yield reached
            continue
        if issubclass(type(value), nn.Module):
            continue
        yield reached
        for step, inner in _references(value):
            looked_at += 1
            if looked_at > MOST_OBJECTS:
                return
            if not _is_plain(inner):
                waiting.append(Reached(inner, reached.path + step))


def _is_plain(value: Any) -> bool:
    return issubclass(type(value), _PLAIN)


def _references(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that `value` refers to, with their paths, without running users' code."""
    kind = type(value)
    if issubclass(kind, dict):
        for key, inner in islice(dict.items(value), MOST_OF_CONTAINER):
            yield f"[{key!r}]" if isinstance(key, str | int) else "[...]", inner
    elif issubclass(kind, _SERIES):
        builtin = next(cls for cls in _SERIES if issubclass(kind, cls))
        inside = list(islice(builtin.__iter__(value), MOST_OF_CONTAINER))
        # Tokens are not looked at one by one.
        if inside and not (_is_plain(inside[0]) and _is_plain(inside[-1])):
            for inner in inside:
                yield "[...]", inner
    elif issubclass(kind, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif issubclass(kind, types.MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif issubclass(kind, types.BuiltinFunctionType):
        yield "", value.__self__
    elif issubclass(kind, types.FunctionType):
        yield from _references_of_function(value)
    elif issubclass(kind, weakref.ReferenceType):
        yield "", weakref.ReferenceType.__call__(value)
    yield from _attributes(value)


def _references_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function has closed over, and its defaults."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        contents = _contents(cell)
        yield f".{name}", contents
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object keeps in its dictionary and its slots."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = {}
    is_table = type(value).__name__ == "Dataset" and package(type(value)) == "datasets"
    # Libraries keep the model to ask it for facts, as DataCollatorForSeq2Seq does.
    asks_model = is_known(type(value))
    for name, inner in islice(dict.items(attributes), MOST_OF_CONTAINER):
        if asks_model and issubclass(type(inner), nn.Module):
            continue
        if not is_table or name == "_format_kwargs":  # the rest is rows, which stay as they are
            yield f".{name}", inner
    for cls in type(value).__mro__:
        if "__slots__" not in vars(cls):
            continue
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                yield f".{name}", _slot(member, value)


def _slot(member: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:  # not assigned yet
        return None
