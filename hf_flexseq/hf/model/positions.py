"""Positions that depend on more than `position_ids`: which are refused, and how a model gets
the others right while it is attached.

1. longrope takes the short or the long table of frequencies by the longest position of its call.
   Under hf_flexseq a row has parts of several sequences: every token is given the table that its
   own sequence would have alone (`LENGTHS`).
2. Llama 4's layers without rotary embeddings scale queries by the token's index, which they count
   from the first token of their call. They are given the indices in the sequence (`INDICES`).

Both come as columns (`steps/token_columns.py`), and so reach decoder and layers as keyword
arguments of the call, also in the replay of a checkpointed layer. Whatever else counts positions
(`trial.py`) is refused.

Rejected: other rotary modules instead of the model's. Its own are called, twice, so that every
number is theirs.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.model.facts import is_classifier
from hf_flexseq.hf.model.trial import Count
from hf_flexseq.steps.forward_hooks import around_forward
from hf_flexseq.steps.token_columns import INDICES, LENGTHS
from hf_flexseq.steps.users_code import is_known

# Modules that count positions with the help of a cache, which can tell them where they are:
# `torch.arange(tokens) + cache.get_seq_length(layer)`.
_TOLD_BY_CACHE = ("transformers.models.llama4.modeling_llama4.Llama4TextAttention",)

# Modules with a table of positions, whose rows they number with `arange` and find by
# `position_ids`.
_TABLES = ("transformers.models.xglm.modeling_xglm.XGLMSinusoidalPositionalEmbedding",)

# A method of position embeddings that begin after their `padding_idx`, as fairseq's do.
_FROM_PADDING = "create_position_ids_from_input_ids"

# ---- what is refused


def unsuitable_positions(model: PreTrainedModel, config: Any) -> str | None:
    """Return why `model`, with text configuration `config`, would not know positions, or None."""
    return _unsuitable_rotary(model, config) or _unsuitable_embeddings(model)


def _unsuitable_rotary(model: PreTrainedModel, config: Any) -> str | None:
    # one set of parameters, or a set for each kind of layer
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    kinds = {str(value.get("rope_type")) for value in by_layer or [parameters]}
    for kind in sorted(kinds):
        if "dynamic" in kind:
            return (
                f"rope_type={kind!r} takes its frequencies from the longest position it has seen, "
                "so that parts of a sequence would disagree; set config.rope_parameters to "
                "another type, such as 'yarn'"
            )
    if "longrope" not in kinds:
        return None
    names = [name for name, _ in _longrope_modules(model)]
    if not names:
        return (
            "rope_type='longrope' without a rotary module of transformers' kind, which would have "
            "`rope_type` and `config`; set config.rope_parameters to another type, such as 'yarn'"
        )
    for name in names:
        if any(part.isdigit() for part in name.split(".")):
            return (
                f"{name} is a rotary module inside a layer, with rope_type='longrope', and is not "
                "told the lengths of sequences; set config.rope_parameters to another type, such "
                "as 'yarn'"
            )
    return None


def _unsuitable_embeddings(model: PreTrainedModel) -> str | None:
    for name, module in model.named_modules():
        padding_index = getattr(module, "padding_idx", None)
        counts = name.endswith("position_embeddings") or hasattr(module, _FROM_PADDING)
        if counts and padding_index is not None:
            return (
                f"{name} counts positions from its padding_idx={padding_index}; "
                "hf_flexseq counts from 0"
            )
    return None


def unsuitable_count(counts: Sequence[Count]) -> str | None:
    """Return the first of a trial's `counts` that would be wrong in a row; None without one."""
    for count in counts:
        if _is_one_of((*_TOLD_BY_CACHE, *_TABLES), count.module):
            continue
        if is_classifier(count.module):  # it looks for the last token, which we give it
            continue
        kind = type(count.module)
        packed = ""
        if not is_known(kind):
            packed = "; packed rows with cu_seqlens or seq_lengths need no module of their own"
        return (
            f"{count.name or 'the model'} ({kind.__name__}) counts positions itself, in "
            f"{count.where}: {count.text}; part of a sequence would begin at 0, so take them from "
            f"position_ids{packed}"
        )
    return None


# ---- what is made right


def needed_columns(model: nn.Module) -> tuple[str, ...]:
    """Return which of the columns LENGTHS and INDICES the modules of `model` have to be given."""
    names = []
    if any(_longrope_modules(model)):
        names.append(LENGTHS)
    if any(_is_one_of(_TOLD_BY_CACHE, module) for module in model.modules()):
        names.append(INDICES)
    return tuple(names)


def attach_positions(model: nn.Module) -> ExitStack:
    """Make modules of `model`, accepted by `unsuitable_positions`, take positions from the columns
    `needed_columns`, until the returned stack is closed."""
    attached = ExitStack()
    for name, module in list(_longrope_modules(model)):
        decoder = model.get_submodule(name.rpartition(".")[0])
        rotary = _RowRotary(module)
        attached.enter_context(Patch(module, forward=rotary))
        attached.enter_context(around_forward(decoder, rotary.begin, rotary.end))
    for module in model.modules():
        if _is_one_of(_TOLD_BY_CACHE, module):
            attached.enter_context(Patch(module, forward=_ToldAttention(module)))
    return attached


def _longrope_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of rotary embeddings that have a short and a long table."""
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        of_layers = kinds.values() if isinstance(kinds, dict) else [kinds]
        if "longrope" in of_layers and hasattr(module, "config"):
            yield name, module


def _is_one_of(names: Sequence[str], module: nn.Module) -> bool:
    """Tell whether the class of a module, or one that it is made from, is named here."""
    kinds = type(module).__mro__  # FSDP2 makes classes of its own
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in kinds)


def _missing_column(module: nn.Module, name: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__} is given seq_ctx without {name!r}: add the columns "
        "needed_columns(model) to the rows before they are dispatched"
    )


class _OtherForward:
    """Stands for a module's forward, on the instance: an object, so that `copy.deepcopy` makes the
    copied module call its own forward, with its own parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own: Callable[..., Any] = module.forward
        functools.update_wrapper(self, self.own)  # for callers that inspect its signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        return self.own(*args, **kwargs)


# ---- 1. longrope


class _RowRotary(_OtherForward):
    """The forward of a rotary embedding that gives every token the table of its sequence, by the
    lengths of the decoder's running call."""

    lengths: torch.Tensor | None = None
    """[1, tokens], while the decoder runs on a row."""

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Note the lengths of a call of the decoder."""
        self.lengths = kwargs.get(LENGTHS)
        if self.lengths is None and kwargs.get("seq_ctx") is not None:
            raise _missing_column(self.module, LENGTHS)

    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Forget them."""
        self.lengths = None

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        """Return the rotary embedding's result, cos and sin [1, tokens, D] or a tensor of both."""
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        parameters = self.module.config.rope_parameters
        if layer_type is not None:
            parameters = parameters[layer_type]
        if self.lengths is None or parameters["rope_type"] != "longrope":
            return self.own(x, position_ids, **of_layer)

        # 1. the short table for all tokens: no position is beyond what it is for
        limit = parameters["original_max_position_embeddings"]
        short = self.own(x, position_ids.clamp(max=limit - 1), **of_layer)

        # 2. the long one: a token is added whose position is
        beyond = position_ids.new_full((*position_ids.shape[:-1], 1), limit)  # [1, 1]
        positions = torch.cat([position_ids, beyond], dim=-1)  # [1, tokens + 1]
        long = self.own(x, positions, **of_layer)  # [1, tokens + 1, D]

        # 3. of each token its own
        is_long = (self.lengths > limit).unsqueeze(-1)  # [1, tokens, 1]
        if isinstance(short, torch.Tensor):
            return torch.where(is_long, long[..., :-1, :], short)
        chosen = []
        for of_short, of_long in zip(short, long, strict=True):
            chosen.append(torch.where(is_long, of_long[..., :-1, :], of_short))
        return tuple(chosen)


# ---- 2. layers that count


_CACHE_KEYWORDS = ("cache", "past_key_values")  # the second before transformers 5.24


class _ToldAttention(_OtherForward):
    """The forward of an attention layer that gets its tokens' indices from a cache."""

    def __init__(self, attention: nn.Module) -> None:
        """Raises NotImplementedError for a layer that takes a cache under no name known here."""
        super().__init__(attention)
        taken = inspect.signature(self.own).parameters
        names = [name for name in _CACHE_KEYWORDS if name in taken]
        if not names:
            raise NotImplementedError(
                f"{type(attention).__name__} takes none of {', '.join(_CACHE_KEYWORDS)}, so it "
                "cannot be told the positions that it counts"
            )
        self._keyword = names[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's forward with a cache of no keys, which knows the indices."""
        indices = kwargs.pop(INDICES, None)  # [1, tokens]
        if indices is not None:
            kwargs[self._keyword] = _IndexCache(indices[0])
        elif kwargs.get("seq_ctx") is not None:
            raise _missing_column(self.module, INDICES)
        return self.own(*args, **kwargs)


class _IndexCache:
    """Stands where a layer expects its cache: it has no keys, and says of every token how many
    tokens of its sequence come before the row that the layer sees."""

    __slots__ = ("_before",)

    def __init__(self, indices: torch.Tensor) -> None:
        """indices: [tokens] of each token in its sequence."""
        row = torch.arange(indices.shape[0], device=indices.device)  # what the layer counts
        self._before = indices - row

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return what the layer has to add to its own count, [tokens]."""
        return self._before

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the row, each [1, kv_heads, tokens, D]."""
        return keys, values
