"""Liger's norms, MLPs and rotary embeddings in an attached model, for `use_liger_kernel=True`.

transformers puts Liger's kernels into a model for good, when training begins. Here they are in the
model while it is attached:

1. The model is tried without them, since Liger's kernels need numbers, and a trial has none.
2. They are put in by transformers' own function. Head and loss stay those of hf_flexseq, and so do
   experts: these group tokens by themselves.
3. Classes of transformers that Liger has replaced are restored at once, for small models that are
   made in trials. Functions, and what modules have of their own, are restored at the end. A trial
   of another model, such as a reference, has transformers' own functions (`without_liger`).

Liger's kernels write over what they are given: gradients behind norms and rotary embeddings, and
both inputs of an MLP's product. Nothing of this is saved by another part of a layer.
"""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from hf_flexseq.base.patches import Patch
from hf_flexseq.hf.model.mlp_trial import holds_experts
from hf_flexseq.hf.model.sharding import unsharded_class

logger = logging.getLogger(__name__)

LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
"""What Liger would put in the place of head and loss."""
_PRODUCTS = ("swiglu", "geglu")  # of MLPs and of experts alike


@contextmanager
def liger_kernels(model: PreTrainedModel, options: Mapping[str, Any]) -> Iterator[None]:
    """Give a model Liger's norms, MLPs and rotary embeddings inside the block.

    options: as in `liger_kernel_config`. Log a line for a model that Liger does not know, which
    stays as it is.
    """
    left_out: tuple[str, ...] = LOSSES
    if holds_experts(model):
        left_out += _PRODUCTS
    owners = [*model.modules(), *(sys.modules[name] for name in _modeling_modules(model))]
    before = [dict(vars(owner)) for owner in owners]
    apply_liger_kernel(model, {**options, **dict.fromkeys(left_out, False)})
    changed = _taken_back(owners, before)
    name = type(model).__name__
    if not changed:
        logger.warning(
            "use_liger_kernel=True: Liger has no kernels for %s, which stays as it is", name
        )
    else:
        kept = "; its experts and MLPs stay as they are" if holds_experts(model) else ""
        logger.info("use_liger_kernel=True: Liger's kernels are in %s%s", name, kept)
    with ExitStack() as attached:
        for change in changed:
            if isinstance(change.own, type):
                continue
            attached.enter_context(Patch(change.owner, **{change.name: change.new}))
            if isinstance(change.owner, ModuleType):
                _functions.append(change)
                attached.callback(_functions.remove, change)
        yield


@contextmanager
def without_liger() -> Iterator[None]:
    """Give transformers its own functions inside the block."""
    with ExitStack() as restored:
        for owner, name, own, new in _functions:
            if vars(owner).get(name) is new:
                restored.enter_context(Patch(owner, **{name: own}))
        yield


class _Change(NamedTuple):
    """An attribute that Liger has replaced or added."""

    owner: Any
    """A module of the model, or a file of transformers."""
    name: str
    own: Any
    """The former value; None without one."""
    new: Any


_functions: list[_Change] = []  # of transformers, in whose place are Liger's now


def _taken_back(owners: Sequence[Any], before: Sequence[dict[str, Any]]) -> list[_Change]:
    """Give objects back the attributes that they had `before`; return what was different."""
    changes = []
    for owner, former in zip(owners, before, strict=True):
        for name, value in list(vars(owner).items()):
            if name in former and former[name] is value:
                continue
            changes.append(_Change(owner, name, former.get(name), value))
            if name in former:
                setattr(owner, name, former[name])
            else:
                delattr(owner, name)
    return changes


def _modeling_modules(model: nn.Module) -> set[str]:
    """Return the names of the files of transformers that define the modules of a model."""
    names = {unsharded_class(module).__module__ for module in model.modules()}
    return {name for name in names if name.startswith("transformers.")}
