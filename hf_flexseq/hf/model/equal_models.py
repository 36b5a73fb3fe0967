"""Trials of equal models run once in a process.

A trial runs a copy that is made from class and configuration. It is made when a trainer is
constructed, when the model is attached, and for every evaluation; each takes a tenth of a second
or more. A second trial of an equal model would find the same, unless somebody has put other
functions into transformers since: into the files that define a model's modules and their base
classes, or the one that makes masks. Other files are not watched.
"""

import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from hf_flexseq.hf.model.noise import dropout_held_by
from hf_flexseq.hf.model.rehearsal import NOT_COPIED
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.steps.users_code import NEUTRAL_PACKAGES, is_known, package, users_modules

Found = TypeVar("Found")

MOST_MODELS = 16
"""Results that are kept of one trial; those of more models are found anew."""

_OTHER_OPTIONS = ("bos_token_id", "eos_token_id", "use_cache")
"""Entries of configurations that change no trial: no forward reads the first two, and a trial sets
the last. Trainers set them after the first trial, to those of their tokenizer and arguments."""

_NOTED_ON_CLASSES = "_cached_value"
"""How names of attributes end in which transformers notes what a class can do, when a model of it
is first given another attention: no code of a model."""


class _Kept(NamedTuple):
    """A result, with the code that it came from."""

    result: Any
    code: tuple[Any, ...]
    """Functions and classes; while they are kept here, no other object has their identity."""


def once_for_equal_models(trial: Callable[..., Found]) -> Callable[..., Found]:
    """Let `trial` run once for equal models in a process: its result depends on a model's class,
    configuration, code and dropout, and on its other arguments alone. It runs every time for a
    model with modules of the user's, or whose configuration cannot be written as JSON. Callers
    share the results and must not change them."""
    kept: dict[object, _Kept] = {}
    lock = threading.RLock()  # threads that are ranks wait for the one that tries

    @wraps(trial)
    def found(model: PreTrainedModel, *others: object) -> Found:
        kinds = {name: unsharded_class(module) for name, module in model.named_modules()}
        options = _options_of(model)
        if options is None or any(package(kind) not in NOT_COPIED for kind in kinds.values()):
            return trial(model, *others)
        code = tuple(code for _, _, code in _named_code(set(kinds.values())))
        dropout = [list(dropout_held_by(module).items()) for module in model.modules()]
        key = (tuple(kinds.items()), options, tuple(map(id, code)), str(dropout), others)
        with lock:
            if key not in kept:
                if len(kept) >= MOST_MODELS:
                    kept.clear()
                kept[key] = _Kept(trial(model, *others), code)
            result: Found = kept[key].result
        return result

    return found


def _options_of(model: PreTrainedModel) -> object:
    """Return what a copy takes from its model's configuration; None if that cannot be written as
    JSON."""
    try:
        text = text_of(model.config)
    except TypeError:  # such as a function: plain trainers ask for JSON only when they save
        return None
    return text, getattr(model.config, "_experts_implementation", None)


def text_of(config: PreTrainedConfig) -> str:
    """Return the options of a configuration that may change a trial. Raises TypeError where they
    cannot be written as JSON."""
    return json.dumps(json.loads(config.to_json_string(), object_hook=_without_others))


def _without_others(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration, or of one inside it, that may change a trial."""
    return {name: value for name, value in entries.items() if name not in _OTHER_OPTIONS}


def code_of_model(model: PreTrainedModel) -> list[str]:
    """Return descriptions of the user's modules in a model, and of the user's functions in place
    of the library's that its modules run, without duplicates."""
    found = [*users_modules(model)]
    kinds = {unsharded_class(module) for module in model.modules()}
    for file, name, code in _named_code(kinds):
        is_of_family = file.startswith("transformers.models.") or file == masking_utils.__name__
        is_code = inspect.isroutine(code) or inspect.isclass(code)
        is_librarys = package(code) in NEUTRAL_PACKAGES or is_known(code)
        if is_of_family and is_code and not is_librarys:
            found.append(name)
    return list(dict.fromkeys(found))


def _named_code(kinds: set[type[Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield (file, name, code) of the functions and classes that models with these modules run, in
    one order: those in the files of transformers that define the modules and their base classes,
    those of their classes, and those that make masks."""
    bases = {base for kind in kinds for base in kind.__mro__}
    files = {base.__module__ for base in bases if package(base) == "transformers"}
    for file in sorted({*files, masking_utils.__name__}):
        for name, value in vars(sys.modules[file]).items():
            if callable(value):
                yield file, name, value
            if isinstance(value, type) and value.__module__ == file:
                for attribute, own in vars(value).items():
                    if not attribute.endswith(_NOTED_ON_CLASSES):
                        yield file, f"{name}.{attribute}", own
