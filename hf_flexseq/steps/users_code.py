"""Find code of the user's own where the Trainer, the model and its parameters let a user put some.

    a method         a subclass, a function put on one trainer, or on a library's class
    a hook           on a module, a parameter, or all modules
    a module         whose class is not of a known library

Code is distinguished by the package that its function or class was defined in. A decorator counts
as code, too: `functools.wraps` gives a function the name of another one, but not its globals.
"""

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as all_modules

# Packages whose code does to a model, and to a Trainer, what hf_flexseq expects of it. Trackers of
# experiments register hooks that only read.
_KNOWN_PACKAGES = frozenset(
    {
        "accelerate",
        "axolotl",
        "bitsandbytes",
        "causal_conv1d",
        "comet_ml",
        "datasets",
        "deepspeed",
        "fla",
        "hf_flexseq",
        "kernels",
        "liger_kernel",
        "mamba_ssm",
        "peft",
        "torch",
        "torchao",
        "transformers",
        "trl",
        "wandb",
    }
)

NEUTRAL_PACKAGES = frozenset({*sys.stdlib_module_names, "numpy"})
"""Packages whose code is none of the user's, though it knows nothing of models and trainers."""

# Functions on modules: the first one above, the second one as the loss of a trainer.
_SEEN_ELSEWHERE = ("forward", "_loss_function")

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def is_known(code: Any) -> bool:
    """Tell if a function or class was defined by a library, and not by the user, and so was all
    that decorates it."""
    while isinstance(code, partial):
        code = code.func
    code = getattr(code, "__func__", code)  # of a bound method
    while inspect.isfunction(code) and hasattr(code, "__wrapped__"):
        home = code.__globals__.get("__name__", "").partition(".")[0]
        if home not in _KNOWN_PACKAGES | NEUTRAL_PACKAGES:
            return False
        code = code.__wrapped__
    if callable(code) and not isinstance(code, type):
        code = inspect.unwrap(code)
    return package(code) in _KNOWN_PACKAGES


def is_librarys(code: Any) -> bool:
    """Tell if a library or Python itself defines a function or class."""
    function = code.func if isinstance(code, partial) else code
    return package(function) in NEUTRAL_PACKAGES or is_known(function)


def package(code: Any) -> str:
    """Return the package that a function, a class, or the class of an object is defined in."""
    module = getattr(code, "__module__", None)
    return str(module or type(code).__module__).partition(".")[0]


# ---- methods


def users_method(trainer: Any, name: str) -> str | None:
    """Return where the user has overridden a method, such as `MyTrainer.log`, or None."""
    own = vars(trainer).get(name)
    if own is not None and not is_known(own):
        return f"{name} of this {type(trainer).__name__}"
    return _in_classes(type(trainer).__mro__, name)


def users_method_behind(trainer: Any, name: str) -> str | None:
    """Return where the user has overridden a method in a class behind hf_flexseq's own classes,
    which call it only by `super()`, or None."""
    classes = type(trainer).__mro__
    ours = [index for index, cls in enumerate(classes) if package(cls) == "hf_flexseq"]
    return _in_classes(classes[max(ours, default=-1) + 1 :], name)


def _in_classes(classes: Sequence[type], name: str) -> str | None:
    """Return in which of some classes, the first one in front, the user has defined a method."""
    for index, cls in enumerate(classes):
        method = vars(cls).get(name)
        if method is None:
            continue
        if not is_known(_function(method)):
            return f"{cls.__name__}.{name}"
        if any(vars(behind).get(name) is method for behind in classes[index + 1 :]):
            return None  # it is the method of a class behind, so those between are not called
    return None


def users_methods(trainer: Any, names: Iterable[str]) -> list[str]:
    """Return where the user has overridden any of some methods of the trainer."""
    found = [users_method(trainer, name) for name in names]
    return [where for where in found if where is not None]


def _function(member: Any) -> Any:
    """Return the function behind a member of a class."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member


# ---- modules and hooks


def users_modules(model: nn.Module) -> Iterator[str]:
    """Yield a description, such as `layers.0 (MyLayer)`, of each module of the user's, and of each
    forward or other function that the user has put on a module or on a library's class."""
    classes: dict[type, bool] = {}  # True if forward is a library's
    for name, module in model.named_modules():
        kind = type(module)
        own_forward = vars(module).get("forward")
        if not is_known(kind):
            yield f"{name or 'the model'} ({kind.__name__})"
        elif own_forward is not None and not is_known(own_forward):
            yield f"forward of {name or 'the model'}"
        elif kind not in classes:
            classes[kind] = is_known(kind.forward)
            if not classes[kind]:
                yield f"{kind.__name__}.forward"
        for attribute, own in vars(module).items():
            is_function = isinstance(own, types.FunctionType | types.MethodType | partial)
            if is_function and attribute not in _SEEN_ELSEWHERE and not is_known(own):
                yield f"{attribute} of {name or 'the model'}"


def users_forward_hooks(model: nn.Module) -> Iterator[str]:
    """Yield a description of each hook of the user's that sees a forward."""
    yield from _hooks_on_modules(model, FORWARD_HOOKS)
    for hooks in (all_modules._global_forward_hooks, all_modules._global_forward_pre_hooks):
        for hook in _of_user(hooks):
            yield f"{_name(hook)} on all modules"


def has_output_hook(module: nn.Module) -> bool:
    """Tell if a hook of the user's sees the output of a module, or its gradient."""
    kinds = [module._forward_hooks, *(getattr(module, kind) for kind in _BACKWARD_HOOKS)]
    kinds += [all_modules._global_forward_hooks, all_modules._global_backward_hooks]
    return any(_of_user(hooks) for hooks in kinds)


def nonlinear_gradient_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[str]:
    """Yield a description of each of the user's hooks on named parameters that is not linear,
    tried on random gradients: its result depends on how gradients are added up."""
    for name, parameter in parameters:
        whole = getattr(parameter, "ds_shape", parameter.shape)  # of shards under ZeRO-3, too
        for hook in _of_user(parameter._backward_hooks):
            if not _is_linear(hook, parameter.new_empty(whole)):
                yield f"{_name(hook)} on {name}"


def _is_linear(hook: Callable[[torch.Tensor], torch.Tensor | None], like: torch.Tensor) -> bool:
    """Tell if a hook on gradients of the form of `like` keeps their sums."""
    with torch.no_grad(), torch.random.fork_rng():
        first, second = torch.randn_like(like), torch.randn_like(like)
        results = []
        for gradient in (first, second, first + second):
            changed = hook(gradient.clone())
            results.append(gradient if changed is None else changed)
        error = results[0] + results[1] - results[2]
        bound = 1e-2 if like.dtype.itemsize == 2 else 1e-5
        return bool(error.norm() <= bound * (results[0].norm() + results[1].norm()))


def users_backward_hooks(model: nn.Module) -> Iterator[str]:
    """Yield a description of each hook of the user's that sees the backward of a module."""
    yield from _hooks_on_modules(model, _BACKWARD_HOOKS)


def _hooks_on_modules(model: nn.Module, kinds: Iterable[str]) -> Iterator[str]:
    """Yield a description of each hook of the user's, of some kinds, on a module."""
    for name, module in model.named_modules():
        for kind in kinds:
            for hook in _of_user(getattr(module, kind)):
                yield f"{_name(hook)} on {name or 'the model'}"


def users_accumulation_hooks(model: nn.Module) -> Iterator[str]:
    """Yield a description of each of the user's hooks after a parameter's gradient is added."""
    for name, parameter in model.named_parameters():
        for hook in _of_user(getattr(parameter, "_post_accumulate_grad_hooks", None)):
            yield f"{_name(hook)} on {name}"


def _of_user(hooks: Mapping[int, Any] | None) -> list[Any]:
    """Return the hooks that no library has registered."""
    return [hook for hook in (hooks or {}).values() if not is_known(hook)]


def _name(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
