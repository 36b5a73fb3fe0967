"""Rehearse a model: run a copy of it whose tensors have shapes, but neither numbers nor memory.

    copied = class_copy(model, attention="eager")
    outputs = rehearse(copied, row_of("input_ids", "position_ids"), *listeners)

A rehearsal takes a tenth of a second or so for every size of model. Its listeners, context
managers that see functions of torch or modules, ask one question each:

    trial.py           which attention and recurrence do layers ask for? who counts positions?
    head_trial.py      how does the forward treat logits and labels?
    tower_trial.py     which arguments does the forward give its tower, and which features does it
                       read?
    layer_trial.py     how many bytes do layers keep for their backward? (in hf/engine)

A copy is made in one of two ways:

    class_copy   from class and configuration, on the meta device: whole also for a pipeline
                 stage. Modules that the user has put into the model can be taken over. Adapters
                 and quantized layers are not: they work on each token by itself, and may need
                 numbers.
    fake_copy    of the model's own modules, on fake tensors, which know dtypes under autocast:
                 with adapters, frozen weights and replaced modules, and stand-ins for quantized
                 layers

A copy is in training mode, and has no hooks.

Trials of equal models run once in a process (`once_for_equal_models`): a trial is made when a
trainer is constructed, when the model is attached, and for every evaluation. A second trial of an
equal model would find the same, unless somebody has put other functions into transformers since:
into the files that define a model's modules and their base classes, or the one that makes masks.
Other files are not watched.

Rejected: to compare a small twin of each model with one process before training, as the probe does
(`probe.py`). It takes many times as long, a twin must be made for every family, and a small model
may ask for less than the large one.
"""

import copy
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import deepspeed

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.model.noise import dropout_held_by
from hf_flexseq.hf.model.quantized_layers import StandIn, is_quantized
from hf_flexseq.hf.model.recurrent import without_dispatcher
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.hf.model.towers import attention_of_text
from hf_flexseq.steps.users_code import is_librarys, package, users_modules

Copied = TypeVar("Copied", bound=nn.Module)

TOKENS = 53
"""Length of a row on the meta device: a prime unlike any size of features."""

CPU = torch.device("cpu")
"""Device that fake tensors say they are on: autocast knows it, and kernels are not asked for."""

# What a forward raises that needs numbers, or another kind of machine.
FAULTS: tuple[type[Exception], ...] = (
    *(RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError),
    *(NotImplementedError, ImportError, AssertionError),
)

# Packages whose modules a copy made from the class does not take over: adapters, also ours,
# quantization, and what every model has.
NOT_COPIED = ("torch", "transformers", "peft", "hf_flexseq", "bitsandbytes")

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks"),
)


def rehearse(
    forward: Callable[..., Any],
    given: dict[str, Any],
    *listeners: AbstractContextManager[Any],
    mode: FakeTensorMode | None = None,
    grad: bool = False,
    autocast: torch.dtype | None = None,
    trains: bool = False,
) -> Any:
    """Run a forward of a copy inside of `listeners`, the first one outermost, and return the
    outputs.

    Args:
        forward: The copy, or another callable instead.
        given: Arguments.
        listeners: Context managers.
        mode: The mode of the copy's fake tensors; None on the meta device.
        grad: Whether the forward keeps tensors for a backward.
        autocast: Dtype of autocast in the forward; None without.
        trains: Whether the backward of the outputs' loss runs, too.
    """
    with ExitStack() as inside:
        inside.enter_context(mode or torch.device("meta"))
        inside.enter_context(torch.set_grad_enabled(grad or trains))
        for listener in listeners:
            inside.enter_context(listener)
        with torch.autocast(CPU.type, autocast) if autocast else nullcontext():
            outputs = forward(**given, use_cache=False)
        if trains:
            outputs.loss.backward()
    return outputs


def row_of(*names: str) -> dict[str, torch.Tensor]:
    """Return a row of tokens for each argument of a forward on the meta device, int64 [1,
    TOKENS]."""
    return {name: torch.zeros(1, TOKENS, dtype=torch.int64, device="meta") for name in names}


def in_one_line(error: BaseException) -> str:
    """Return the first line of a rehearsal's error, after the name of its class."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


# ---- copies of class and configuration


def class_copy(
    model: PreTrainedModel,
    attention: str | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """Return an empty model of the class and configuration of `model`, on the meta device.
    attention: name of its text model's attention implementation; None to keep `model`'s."""
    config = copy.deepcopy(model.config)
    if attention is not None:
        config._attn_implementation = attention_of_text(model, attention)
    with torch.device("meta"), without_sharding():
        result: PreTrainedModel = unsharded_class(model)(config)
    return result.to(dtype).train()


def take_users_modules(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Copy the user's modules in `model` into its `class_copy`, whose configuration they read if
    they read the model's; True if there were any."""
    expected = {name: type(module) for name, module in target.named_modules()}
    configs = {
        id(model.config): target.config,
        id(model.config.get_text_config()): target.config.get_text_config(),
    }
    copied: list[str] = []
    for name, module in model.named_modules():
        kind = unsharded_class(module)
        package = kind.__module__.partition(".")[0]
        is_inside = any(name.startswith(f"{outer}.") for outer in copied)
        has_place = name.rpartition(".")[0] in expected  # not inside of an adapter
        if is_inside or not has_place or package in NOT_COPIED or kind is expected.get(name):
            continue
        target.set_submodule(name, _copied(module, _on_meta, configs).to(torch.bfloat16))
        copied.append(name)
    return bool(copied)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def without_sharding() -> Patch:
    """Let models that are made inside a block be whole, also under ZeRO-3: DeepSpeed would take
    the weights of a model inside a model, such as a classifier's, off the meta device."""
    return Patch(deepspeed, _hf_deepspeed_config_weak_ref=None)


# ---- copies of a model's own modules


def fake_copy(model: PreTrainedModel, dtype: torch.dtype, mode: FakeTensorMode) -> PreTrainedModel:
    """Return a copy of the modules of a model, without checkpointing and without wrapped forwards,
    made of fake tensors of a mode. dtype: that its weights are computed with."""
    casts = dtype != model.dtype

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        of_dtype = dtype if casts and is_weight else tensor.dtype
        return torch.empty(tensor.shape, dtype=of_dtype, device=CPU)

    with mode:
        quantized = (module for module in model.modules() if is_quantized(module))
        made = _copied(model, empty, {id(module): StandIn(module) for module in quantized})
    for module in made.modules():
        if not inspect.ismethod(vars(module).get("forward")):
            vars(module).pop("forward", None)  # a wrapper, of accelerate or TRL, calls the model
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    made.config.get_text_config().output_router_logits = False
    return made.train()


def _copied(
    module: Copied, empty: Callable[[torch.Tensor], torch.Tensor], instead: dict[int, Any]
) -> Copied:
    """Return a deep copy of a module without hooks, whose parameters and buffers `empty` makes.
    instead: by identity, what else a copy has in place of the module's own."""
    memo = dict(instead)
    for one in module.modules():
        for name in _HOOKS:
            hooks = getattr(one, name)
            memo[id(hooks)] = type(hooks)()
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(empty(parameter), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = empty(buffer)
    return copy.deepcopy(module, memo)


# ---- once for equal models


Found = TypeVar("Found")

MOST_MODELS = 16
"""Results kept per trial; further models are tried anew."""

_OTHER_OPTIONS = ("bos_token_id", "eos_token_id", "use_cache")
"""Entries of configurations that change no trial: no forward reads the first two, and a trial sets
the last. Trainers set them after the first trial, to the values of their tokenizer and
arguments."""

_NOTED_ON_CLASSES = "_cached_value"
"""How names of attributes end in which transformers notes a class's abilities, when a model of it
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
    """Return the options that a copy takes from its model's configuration; None if they cannot be
    written as JSON."""
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
        if is_of_family and is_code and not is_librarys(code):
            found.append(name)
    return list(dict.fromkeys(found))


def _named_code(kinds: set[type[Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield (file, name, code) of the functions and classes that models with these modules run, in
    one order: from the files of transformers that define the modules and their base classes, with
    the attributes of these classes, and from the file that makes masks."""
    bases = {base for kind in kinds for base in kind.__mro__}
    files = {base.__module__ for base in bases if package(base) == "transformers"}
    for file in sorted({*files, masking_utils.__name__}):
        for name, value in vars(sys.modules[file]).items():
            if callable(value) and not name.startswith("__"):  # where torch.compile puts its own
                yield file, name, without_dispatcher(value)
            if isinstance(value, type) and value.__module__ == file:
                for attribute, own in vars(value).items():
                    if not attribute.endswith(_NOTED_ON_CLASSES):
                        yield file, f"{name}.{attribute}", own
