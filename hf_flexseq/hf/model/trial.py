"""Run one forward of an empty twin of a model, and note what its attention layers and its
recurrent ones ask for.

The twin lives on the meta device, in training mode: it takes a tenth of a second and no memory.
Its attention returns empty tensors, and so do its recurrent functions (`recurrent.py`) and its
experts, whose routing would need numbers.

Which keys a layer may read stands in its mask, and in some models nowhere else. So the twin gets
a mask function, too, as transformers' own attention has: it reads the rule from which transformers
would have made a mask, part by part, and knows the parts listed in `_rule_of`. A mask is compared
with what would be computed of the same call (`calls.py`).
"""

import copy
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.integrations import deepspeed
from transformers.masking_utils import AttentionMaskInterface

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.hf.model.calls import Asked, UnsupportedAttention, number_of, read_call
from hf_flexseq.hf.model.recurrent import (
    RecurrentCall,
    UnsupportedRecurrence,
    attach_recurrent,
    mixers,
)
from hf_flexseq.hf.model.router import asks_for_router_loss

logger = logging.getLogger(__name__)

_TRIAL = "flexseq-trial"  # name of the twin's implementation of attention and masks
TOKENS = 2

# Families whose trial ends early, and that are known to be exact all the same: by model_type of
# the text configuration, where it ends. Such a trial has seen some of the layers, or none; the
# rest might ask for anything. A family stands here once tests/hf/test_reach.py has trained it
# against one process, with windows and lengths that would show a difference.
PROBED_FAMILIES: dict[str, str] = {
    "gemma3n_text": "sparse activations read a quantile of the normal distribution",
    "jetmoe": "experts are cut by how many tokens each has",
}

_RULE = "flexseq_rule"  # attribute of the twin's masks: the function they would be made with


class Call(NamedTuple):
    """What a layer has asked for in one call."""

    module: str
    """Class of the layer."""
    asked: Asked
    """Its reach and scores."""
    query_heads: int
    kv_heads: int
    head_dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    """Size of a head of values."""
    keys_of: int
    """Index of the first call that was given the same keys: its own where they are new."""


@dataclass(slots=True)
class MixerRun:
    """What a recurrent mixer has called in one run."""

    module: str
    """Class of the mixer."""
    layer: int | None
    """Its number in the model."""
    calls: list[RecurrentCall] = field(default_factory=list)
    """Calls of recurrent functions, in their order; [] where it has hidden them."""


@dataclass(slots=True)
class Trial:
    """What was seen of a model."""

    calls: list[Call] = field(default_factory=list)
    """Calls of attention, in their order."""
    mixers: list[MixerRun] = field(default_factory=list)
    """Runs of recurrent mixers, in their order."""
    refusal: str | None = None
    """Why a layer's attention is not ours to compute, in one line."""
    fault: str | None = None
    """Why the twin could not go on to its end; the layers up to there have been seen."""
    keys: list[torch.Tensor] = field(default_factory=list)
    """Keys of the calls, which tell shared ones apart from equal ones."""

    def note_recurrent(self, call: RecurrentCall) -> None:
        """Take note of a call of the mixer that runs; `recurrent.py` calls this."""
        if not self.mixers:
            raise UnsupportedRecurrence("a recurrent function is called outside of its mixer")
        self.mixers[-1].calls.append(call)


def try_model(model: PreTrainedModel) -> Trial:
    """Run one forward of an empty twin of `model`, and return what was seen."""
    seen = Trial()
    config = copy.deepcopy(model.config)
    config._attn_implementation = _TRIAL
    if asks_for_router_loss(model):  # which counts, and the twin has no numbers
        config.get_text_config().output_router_logits = False
    attached = None
    try:
        with torch.device("meta"), torch.no_grad(), _without_sharding():
            twin = type(model)(config).to(torch.bfloat16).train()
            for module in twin.modules():
                if type(module).__name__.endswith("Experts"):
                    module.forward = _trial_experts
            for mixer in mixers(twin):
                mixer.module.register_forward_pre_hook(partial(_begin_mixer, seen))
            attached = attach_recurrent(twin)
            tokens = torch.zeros(1, TOKENS, dtype=torch.int64)  # [rows, tokens]
            # Told that nothing is padding, transformers does not look for documents in a row. It
            # reads the numbers of this where it makes masks of recurrent layers.
            shown = torch.ones(1, TOKENS, dtype=torch.int64, device="cpu")
            twin(input_ids=tokens, attention_mask=shown, use_cache=False, seq_ctx=seen)
    except (UnsupportedAttention, UnsupportedRecurrence) as reason:
        seen.refusal = str(reason)
    except KeyError as error:
        # A table of its own classes of attention, which has no row for the twin's.
        if error.args != (_TRIAL,):
            seen.fault = f"KeyError: {error}"
    # The twin itself may be at fault, while the model is fine.
    except (
        *(RuntimeError, TypeError, ValueError, AttributeError, IndexError),
        *(NotImplementedError, ImportError, AssertionError),
    ) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        seen.fault = f"{what}, in {Path(place.filename).name}:{place.lineno}"
        logger.debug("the trial of %s ended early: %s", type(model).__name__, seen.fault)
    finally:
        if attached is not None:
            attached.detach()
    seen.keys.clear()
    return seen


@contextmanager
def _without_sharding() -> Iterator[None]:
    """Let models that are made inside the block be whole, also under ZeRO-3: DeepSpeed would take
    the weights of a model inside a model, such as a classifier's, off the meta device."""
    former = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = former


def _begin_mixer(seen: Trial, module: nn.Module, args: Any) -> None:
    """Note that a recurrent mixer begins to run."""
    seen.mixers.append(MixerRun(type(module).__name__, number_of(module)))


# ---- what stands in the twin for attention, masks and experts


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
    """Stand where `flexseq_attention` would, and note in `seq_ctx` what the layer asks for.

    query [1, heads, tokens, D], key [1, kv_heads, tokens, D] and value [1, kv_heads, tokens, V]
    -> [1, tokens, heads, V], without numbers.
    """
    name = type(module).__name__
    if seq_ctx is None:
        raise UnsupportedAttention(f"{name} is not given the keyword arguments of the model")
    asked = read_call(module, None, kwargs)
    if attention_mask is not None and attention_mask.ndim > 2:  # else it says what is padding
        _compare_with_mask(name, asked, attention_mask)
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
    keys_of = len(seq_ctx.calls)
    for index, earlier in enumerate(seq_ctx.keys):
        if earlier is key:
            keys_of = index
            break
    seq_ctx.keys.append(key)
    seq_ctx.calls.append(
        Call(name, asked, heads, key.shape[1], head_dim, value.shape[-1], keys_of)
    )
    return query.new_empty(rows, tokens, heads, value.shape[-1]), None


def _trial_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **kwargs: Any
) -> torch.Tensor:
    """Return an empty mask [1, 1, q_length, kv_length] that knows its rule."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    setattr(mask, _RULE, mask_function)
    return mask


def _trial_experts(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand where experts would, whose routing needs numbers: return an empty tensor shaped as
    hidden_states [tokens, hidden] is."""
    return torch.empty_like(hidden_states)


AttentionInterface.register(_TRIAL, _trial_attention)
AttentionMaskInterface.register(_TRIAL, _trial_mask)


# ---- masks


def _compare_with_mask(name: str, asked: Asked, mask: torch.Tensor) -> None:
    """Raise UnsupportedAttention unless a layer's mask shows what would be computed.

    name: class of the layer.
    """
    # Gemma 4 cuts masks to the last queries, which in training are all of them: a view.
    whole = mask if mask._base is None else mask._base
    rule = getattr(whole, _RULE, None)
    if rule is None or whole.shape != mask.shape:
        raise UnsupportedAttention(
            f"{name} asks for a mask of its own; hf_flexseq computes causal attention"
        )
    shown = _reach_of(name, rule)
    if shown != asked.reach:
        raise UnsupportedAttention(
            f"{name}{asked.where}: its mask shows {shown} attention, but its call and "
            f"configuration say {asked.reach}"
        )


def _reach_of(name: str, rule: Callable[..., Any]) -> Reach:
    """Return which keys a causal mask shows that transformers would make with `rule`."""
    parts = list(_parts_of(rule))
    unknown = []
    reach = FULL
    is_causal = False
    for part in parts:
        closure = inspect.getclosurevars(part).nonlocals
        if part is masking_utils.causal_mask_function:
            is_causal = True
        elif _is_made_by(part, masking_utils.sliding_window_overlay):
            reach = Reach(window=closure["sliding_window"])
        elif _is_made_by(part, masking_utils.chunked_overlay):
            reach = Reach(chunk=closure["chunk_size"])
        # Documents are kept apart by seq_ctx.
        elif not _is_made_by(part, masking_utils.packed_sequence_mask_function):
            unknown.append(part.__qualname__.split(".")[0])
    if unknown or not is_causal:
        what = ", ".join(sorted(set(unknown))) or "no causal rule"
        raise UnsupportedAttention(
            f"{name} asks for a mask made with {what}; hf_flexseq computes causal attention, "
            "with a window or in chunks"
        )
    return reach


def _parts_of(rule: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the rules that must all hold for a key to be shown."""
    closure = inspect.getclosurevars(rule).nonlocals
    if _is_made_by(rule, masking_utils.and_masks):
        parts = []
        for part in closure["mask_functions"]:
            parts += _parts_of(part)
        return parts
    if _is_made_by(rule, masking_utils.remap_positions_for_packed_sequence):
        return _parts_of(closure["mask_function"])
    return [rule]


def _is_made_by(rule: Callable[..., Any], maker: Callable[..., Any]) -> bool:
    """Tell whether `rule` was defined inside `maker`."""
    return (
        rule.__module__ == maker.__module__
        and rule.__qualname__.split(".")[0] == maker.__qualname__
    )
