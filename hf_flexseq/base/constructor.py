"""The arguments, by name, of the constructor of a class behind another one in the MRO."""

import inspect
from typing import Any


def arguments_by_name(
    cls: type, mixin: type, given: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of the constructor after `mixin` in `cls`, by name."""
    names = _positional_names(cls, after=mixin)
    return dict(zip(names, given, strict=False)) | named


def with_argument(
    cls: type, mixin: type, given: tuple[Any, ...], named: dict[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of the constructor after `mixin` in `cls`, with
    another value for one of them."""
    if name in named:
        return given, named | {name: value}
    index = _positional_names(cls, after=mixin).index(name)
    return (*given[:index], value, *given[index + 1 :]), named


def _positional_names(cls: type, *, after: type) -> list[str]:
    """Return the names of the positional parameters of the constructor that comes `after` a class
    in the MRO of `cls`.

    Positions differ from trainer to trainer: `args` is the second of Trainer and the third of
    TRL's DPOTrainer. A constructor with `*args` hands them on, so that the names of the next one
    follow its own.
    """
    names: list[str] = []
    for base in cls.__mro__[cls.__mro__.index(after) + 1 :]:
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        parameters = list(inspect.signature(constructor).parameters.values())[1:]  # without self
        for parameter in parameters:
            is_positional = parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            )
            if is_positional and parameter.name not in names:
                names.append(parameter.name)
        if not any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
            break
    return names
