"""Run one forward of an empty copy of a model (`rehearsal.py`), and note the calls of its layers.

attention    Its attention returns empty tensors, and so do its recurrent functions
             (`recurrent.py`) and its experts, whose routing would need numbers.
masks        In some models only the mask shows which keys a layer reads. So the meta model has a
             mask function, too. It reads the rule that transformers would have made a mask of,
             and compares it with what would be computed of the same call (`attention.py`).
positions    The model is given `position_ids`, as in training. A range over as many numbers as
             there are tokens, or a running sum over a mask, counts positions nevertheless:

                 positions = torch.arange(hidden_states.shape[1])
                 positions = torch.cumsum(attention_mask, dim=1)

             A rank's row begins anywhere in a sequence and continues with another one, so such a
             count is wrong. transformers makes its masks so; no mask is made in training.
"""

import inspect
import linecache
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape
from hf_flexseq.hf.model.attention import Asked, UnsupportedAttention, number_of, read_call
from hf_flexseq.hf.model.liger import without_liger
from hf_flexseq.hf.model.noise import dropout_held_by
from hf_flexseq.hf.model.recurrent import (
    UnsupportedRecurrence,
    attach_recurrent,
    mixers,
)
from hf_flexseq.hf.model.rehearsal import (
    FAULTS,
    TOKENS,
    class_copy,
    in_one_line,
    once_for_equal_models,
    rehearse,
    row_of,
    take_users_modules,
)
from hf_flexseq.hf.model.sharding import is_experts, unsharded_class
from hf_flexseq.steps.images import TYPES

logger = logging.getLogger(__name__)

_TRIAL = "flexseq-trial"  # name of the meta model's implementation of attention and masks

# Families whose trial ends early, and that are known to be exact all the same: by model_type of
# the text configuration, where it ends. Such a trial has seen some of the layers, or none; the
# rest might ask for anything. A family stands here once tests/hf/test_reach.py has trained it
# against one process, with windows and lengths that would show a difference.
PROBED_FAMILIES: dict[str, str] = {
    "gemma3n_text": "sparse activations read a quantile of the normal distribution",
    "jetmoe": "experts are cut by how many tokens each has",
}

CUT, WHOLE = "cut by its window", "whole"
"""Which keys of its own image a token sees in a layer that shows images both ways: those after it
and those in its window, or all of them."""

_RULE = "flexseq_rule"  # attribute of such a mask: the function it would be made with


class Call(NamedTuple):
    """Request of a layer in one call."""

    module: str
    """Class of the layer."""
    asked: Asked
    """Its reach and scores."""
    width: int
    """Size of a head, of queries and keys or of values, whichever is larger."""
    dropout: float
    """Probability with which it drops weights of attention."""
    blocks: str | None = None
    """How its mask shows the tokens of an image to each other: CUT or WHOLE; None for a causal
    mask."""


@dataclass(slots=True)
class MixerRun:
    """Calls of a recurrent mixer in one run."""

    module: str
    """Class of the mixer."""
    layer: int | None
    """Its number in the model."""
    calls: list[RecurrentShape] = field(default_factory=list)
    """Calls of recurrent functions, in their order; [] where it has hidden them."""

    @property
    def shape(self) -> RecurrentShape | None:
        """The sizes of the calls, convolutions of one width and at most one scan; None for
        others."""
        convolutions = [call for call in self.calls if call.kind == "convolution"]
        scans = [call for call in self.calls if call.kind != "convolution"]
        widths = {call.width for call in convolutions}
        if len(scans) > 1 or len(widths) != 1:
            return None
        channels = sum(call.channels for call in convolutions)
        return replace((scans or convolutions)[0], width=widths.pop(), channels=channels)


class Count(NamedTuple):
    """A line that counts positions."""

    name: str
    """Name of the module that counts, "" for the model."""
    module: nn.Module
    """The module, in the empty copy."""
    where: str
    """File and line, such as `modeling_llama4.py:361`."""
    text: str
    """The line."""


@dataclass(slots=True)
class Trial:
    """Observations of a model."""

    calls: list[Call] = field(default_factory=list)
    """Calls of attention, in their order."""
    mixers: list[MixerRun] = field(default_factory=list)
    """Runs of recurrent mixers, in their order."""
    functions: dict[int | None, set[str]] = field(default_factory=dict)
    """Names of the recurrent functions in the code of each layer's mixer."""
    counts: list[Count] = field(default_factory=list)
    """Lines that count positions, in their order."""
    refusal: str | None = None
    """Reason why a layer's attention cannot be computed, in one line."""
    fault: str | None = None
    """Reason why the meta model stopped early; layers up to there have been seen."""
    allows_blocks: bool = False
    """True if masks may show the tokens of an image both ways."""
    types: list[str] = field(default_factory=list)
    """Columns of types that the forward was given."""

    def note_recurrent(self, call: RecurrentShape) -> None:
        """Take note of a call of the mixer that runs; `recurrent.py` calls this."""
        if not self.mixers:
            raise UnsupportedRecurrence("a recurrent function is called outside of its mixer")
        self.mixers[-1].calls.append(call)


@once_for_equal_models
def try_model(model: PreTrainedModel) -> Trial:
    """Run one forward of an empty copy of `model`, and return the trial's findings."""
    # Without images no token is in a block, whatever a mask would do with types.
    has_towers = model.config.get_text_config() is not model.config
    seen = Trial(allows_blocks=has_towers)
    has_users_modules = _run(model, seen)
    if seen.fault is None or not has_users_modules:
        return seen
    # A module of the user's may need numbers: the layers of the class are tried without it.
    of_class = Trial(counts=seen.counts, allows_blocks=has_towers)
    _run(model, of_class, copies_users_modules=False)
    return of_class


@once_for_equal_models
def try_types(model: PreTrainedModel) -> Trial:
    """Run one forward of an empty copy of `model` on tokens some of which stand for an image,
    without its features, and return the trial's findings: its masks may show images both ways."""
    taken = inspect.signature(unsharded_class(model).forward).parameters
    seen = Trial(allows_blocks=True, types=[name for name in TYPES if name in taken])
    values = torch.zeros(1, TOKENS, dtype=torch.int64)
    values[:, 3:7] = 1
    types = dict.fromkeys(seen.types, values)
    _run(model, seen, copies_users_modules=False, types=types)
    return seen


def _run(
    model: PreTrainedModel,
    seen: Trial,
    *,
    copies_users_modules: bool = True,
    types: Mapping[str, torch.Tensor] | None = None,
) -> bool:
    """Run one forward of an empty copy of `model`, and note its calls in `seen`. Returns True if
    the copy had modules of the user's. types: columns that say which tokens are of images."""
    has_users_modules = False
    try:
        tried = class_copy(model, attention=_TRIAL)
        if copies_users_modules:
            has_users_modules = take_users_modules(model, tried)
        _copy_dropout(model, tried)
        tried.config.get_text_config().output_router_logits = False  # it needs numbers
        tried.config.get_text_config().use_cache = False
        for module in tried.modules():
            if is_experts(module):
                module.forward = _trial_experts
        for mixer in mixers(tried):
            names = {name for _, name in mixer.functions}
            seen.functions.setdefault(number_of(mixer.module), set()).update(names)
            mixer.module.register_forward_pre_hook(partial(_begin_mixer, seen))
        given = {**row_of("input_ids", "position_ids"), **(types or {}), "seq_ctx": seen}
        # With a mask that hides nothing, transformers does not look for documents in the row. It
        # reads the mask's numbers for recurrent layers, so these are on the CPU.
        given["attention_mask"] = torch.ones(1, TOKENS, dtype=torch.int64, device="cpu")
        attach_recurrent(tried)
        rehearse(tried, given, without_liger(), _Counting(tried, seen))
    except (UnsupportedAttention, UnsupportedRecurrence) as reason:
        seen.refusal = str(reason)
    except FAULTS as error:  # The meta model itself may be at fault, while the model is fine.
        # A model's own table of attention classes does not have this one.
        if not isinstance(error, KeyError) or error.args != (_TRIAL,):
            seen.fault = _fault(error)
            logger.debug("the trial of %s ended early: %s", type(model).__name__, seen.fault)
    return has_users_modules


def _copy_dropout(model: nn.Module, tried: nn.Module) -> None:
    """Give the modules of a copy the dropout that the modules of `model` hold, which later changes
    of the configuration do not reach; no layer is left out, which would need numbers."""
    own = dict(model.named_modules())
    for name, module in tried.named_modules():
        vars(module).update(dropout_held_by(own.get(name, module)))
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0


def _fault(error: BaseException) -> str:
    """Return an exception in one line, with the file and line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_one_line(error)}, in {Path(place.filename).name}:{place.lineno}"


class _Counting(TorchFunctionMode):
    """Notes which modules of a meta model count positions."""

    def __init__(self, tried: nn.Module, seen: Trial) -> None:
        super().__init__()
        self._names = {module: name for name, module in tried.named_modules()}
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and note it if it counts."""
        result = func(*args, **(kwargs or {}))
        if _counts(func, args, result):
            self._note()
        return result

    def _note(self) -> None:
        """Note the innermost module that runs, and its line."""
        caller: FrameType | None = sys._getframe(1)
        frames = []
        while caller is not None:
            package = caller.f_globals.get("__name__", "").partition(".")[0]
            if package not in ("torch", "hf_flexseq"):
                frames.append(caller)
            caller = caller.f_back
        for frame in frames:
            if frame.f_globals.get("__name__") == masking_utils.__name__:
                return
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in self._names:
                path, line = frames[0].f_code.co_filename, frames[0].f_lineno
                where = f"{Path(path).name}:{line}"
                text = linecache.getline(path, line).strip()
                self._seen.counts.append(Count(self._names[module], module, where, text))
                return


def _counts(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Tell if a function of torch has numbered the tokens of a row, by its arguments and
    result."""
    if func in (torch.arange, torch.range, torch.linspace):
        return bool(result.numel() == TOKENS)
    if func in (torch.cumsum, torch.Tensor.cumsum):
        return not args[0].is_floating_point() and TOKENS in result.shape
    return False


def _begin_mixer(seen: Trial, module: nn.Module, args: Any) -> None:
    """Note that a recurrent mixer begins to run."""
    seen.mixers.append(MixerRun(type(module).__name__, number_of(module)))


# ---- stand-ins for attention, masks and experts


def _trial_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    seq_ctx: Trial | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Replace `flexseq_attention`, and note the layer's call in `seq_ctx`: query [1, heads,
    tokens, D], key and value [1, kv_heads, tokens, D or V] -> an empty [1, tokens, heads, V]."""
    name = type(module).__name__
    if seq_ctx is None:
        raise UnsupportedAttention(f"{name} is not given the keyword arguments of the model")
    dropout = kwargs.pop("dropout", None) or 0.0
    is_masked = attention_mask is not None and attention_mask.ndim > 2  # else it is of padding
    asked = read_call(module, None, kwargs, is_masked=is_masked and seq_ctx.allows_blocks)
    blocks = None
    if attention_mask is not None and is_masked:
        blocks = _compare_with_mask(name, asked, attention_mask, seq_ctx)
    elif not asked.reach.is_full and kwargs.get("sliding_window") is None:
        raise UnsupportedAttention(
            f"{name}{asked.where}: its configuration says {asked.reach}, but it is called without "
            "a window and without a mask"
        )
    if key.shape[-2] != query.shape[-2]:
        raise UnsupportedAttention(
            f"{name} has {query.shape[-2]} queries and {key.shape[-2]} keys; hf_flexseq computes "
            "attention of a sequence over itself"
        )
    rows, heads, tokens, head_dim = query.shape
    width = max(head_dim, value.shape[-1])
    seq_ctx.calls.append(Call(name, asked, width, dropout, blocks))
    return query.new_empty(rows, tokens, heads, value.shape[-1]), None


def _trial_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **kwargs: Any
) -> torch.Tensor:
    """Return an empty mask [1, 1, q_length, kv_length] that knows its rule."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    setattr(mask, _RULE, mask_function)
    return mask


def _trial_experts(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand for experts: return an empty tensor like hidden_states [tokens, hidden]."""
    return torch.empty_like(hidden_states)


AttentionInterface.register(_TRIAL, _trial_attention)
AttentionMaskInterface.register(_TRIAL, _trial_mask)


# ---- masks


def _compare_with_mask(name: str, asked: Asked, mask: torch.Tensor, seen: Trial) -> str | None:
    """Raise UnsupportedAttention unless the mask of a layer of class `name` shows the keys that
    `asked` reads. Returns how it shows images both ways, as in `Call.blocks`."""
    # Gemma 4 cuts masks to the last queries, which in training are all of them: a view.
    whole = mask if mask._base is None else mask._base
    rule = getattr(whole, _RULE, None)
    if rule is None or whole.shape != mask.shape:
        raise UnsupportedAttention(
            f"{name} asks for a mask of its own; hf_flexseq computes causal attention"
        )
    blocks = None
    if seen.allows_blocks:
        rule, blocks = _without_blocks(rule)
    shown = _reach_of(name, rule)
    if shown != asked.reach:
        raise UnsupportedAttention(
            f"{name}{asked.where}: its mask shows {shown} attention, but its call and "
            f"configuration say {asked.reach}"
        )
    return blocks


def _without_blocks(rule: Callable[..., Any]) -> tuple[Callable[..., Any], str | None]:
    """Return the causal part of a rule, and how the rule shows images both ways."""
    closure = inspect.getclosurevars(rule).nonlocals
    if _is_made_by(rule, masking_utils.or_masks):
        base, *overlays = closure["mask_functions"]
        if all(_is_made_by(one, masking_utils.blockwise_overlay) for one in overlays):
            return base, WHOLE
    if _is_made_by(rule, masking_utils.and_masks):
        parts = []
        found = None
        for part in closure["mask_functions"]:
            base, blocks = _without_blocks(part)
            parts.append(base)
            found = CUT if blocks else found
        if found:
            return masking_utils.and_masks(*parts), found
    return rule, None


def _reach_of(name: str, rule: Callable[..., Any]) -> Reach:
    """Return which keys a causal mask shows that transformers would make with `rule`."""
    reach = FULL
    is_causal = False
    unknown = set()
    for part in _parts_of(rule):
        shown = _reach_of_part(part)
        if part is masking_utils.causal_mask_function:
            is_causal = True
        elif shown is None:
            unknown.add(part.__qualname__.split(".")[0])
        elif not shown.is_full:
            reach = shown
    if is_causal and not unknown:
        return reach
    what = ", ".join(sorted(unknown)) or "no causal rule"
    raise UnsupportedAttention(
        f"{name} asks for a mask made with {what}; hf_flexseq computes causal attention, with a "
        "window or in chunks"
    )


def _reach_of_part(part: Callable[..., Any]) -> Reach | None:
    """Return which keys a part of a rule shows; None if the part is unknown."""
    closure = inspect.getclosurevars(part).nonlocals
    if _is_made_by(part, masking_utils.sliding_window_overlay):
        return Reach(window=closure["sliding_window"])
    if _is_made_by(part, masking_utils.chunked_overlay):
        return Reach(chunk=closure["chunk_size"])
    # Documents are kept apart by seq_ctx.
    if _is_made_by(part, masking_utils.packed_sequence_mask_function):
        return FULL
    return None


def _parts_of(rule: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the rules that must all hold for a key to be shown."""
    closure = inspect.getclosurevars(rule).nonlocals
    if _is_made_by(rule, masking_utils.and_masks):
        parts = []
        for part in closure["mask_functions"]:
            parts += _parts_of(part)
        return parts
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # newer than 5.17
    if remap is not None and _is_made_by(rule, remap):
        return _parts_of(closure["mask_function"])
    return [rule]


def _is_made_by(rule: Callable[..., Any], maker: Callable[..., Any]) -> bool:
    """Tell whether `rule` was defined inside `maker`."""
    return (
        rule.__module__ == maker.__module__
        and rule.__qualname__.split(".")[0] == maker.__qualname__
    )
