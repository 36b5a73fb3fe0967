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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from hf_flexseq.hf.model.mlp_trial import holds_experts
from hf_flexseq.hf.model.sharding import unsharded_class

logger = logging.getLogger(__name__)

LOSSES = ("fused_linear_cross_entropy", "cross_entropy")
"""What Liger would put in the place of head and loss."""
_PRODUCTS = ("swiglu", "geglu")  # of MLPs and of experts alike

_MISSING: Any = object()


@contextmanager
def liger_kernels(model: PreTrainedModel, options: Mapping[str, Any]) -> Iterator[None]:
    """Give a model Liger's norms, MLPs and rotary embeddings inside the block.

    options: as in `liger_kernel_config`. Log a line for a model that Liger does not know, which
    stays as it is.
    """
    left_out: tuple[str, ...] = LOSSES
    if holds_experts(model):
        left_out += _PRODUCTS
    of_modules = [vars(module) for module in model.modules()]
    of_transformers = [vars(sys.modules[name]) for name in _modeling_modules(model)]
    places = of_modules + of_transformers
    before = [dict(place) for place in places]
    apply_liger_kernel(model, {**options, **dict.fromkeys(left_out, False)})
    changed = _changed(places, before)
    name = type(model).__name__
    if not changed:
        logger.warning(
            "use_liger_kernel=True: Liger has no kernels for %s, which stays as it is", name
        )
    else:
        kept = "; its experts and MLPs stay as they are" if holds_experts(model) else ""
        logger.info("use_liger_kernel=True: Liger's kernels are in %s%s", name, kept)
    lasting = []
    for change in changed:
        if isinstance(change.own, type):
            change.undo()
        else:
            lasting.append(change)
    functions = [one for one in lasting if any(one.place is place for place in of_transformers)]
    _functions.extend(functions)
    try:
        yield
    finally:
        for change in lasting:
            change.undo()
        for change in functions:
            _functions.remove(change)


@contextmanager
def without_liger() -> Iterator[None]:
    """Give transformers its own functions inside the block."""
    replaced = [change for change in _functions if change.undo()]
    try:
        yield
    finally:
        for change in replaced:
            change.redo()


class _Change:
    """An attribute of a module that Liger has replaced or added."""

    def __init__(self, place: dict[str, Any], name: str, own: Any) -> None:
        """place: the attributes, by name. own: the former value, _MISSING without one."""
        self.own = own
        self.place = place
        self._name = name
        self._new = place[name]

    def undo(self) -> bool:
        """Restore the former value, and return True, unless something else stands there by
        now."""
        if self.place.get(self._name) is not self._new:
            return False
        if self.own is _MISSING:
            del self.place[self._name]
        else:
            self.place[self._name] = self.own
        return True

    def redo(self) -> None:
        """Put Liger's value there again."""
        self.place[self._name] = self._new


_functions: list[_Change] = []  # of transformers, in whose place are Liger's now


def _changed(places: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[_Change]:
    """Return what differs in `places` from what they were `before`."""
    changes = []
    for place, former in zip(places, before, strict=True):
        for name, value in place.items():
            if former.get(name, _MISSING) is not value:
                changes.append(_Change(place, name, former.get(name, _MISSING)))
    return changes


def _modeling_modules(model: nn.Module) -> set[str]:
    """Return the names of the files of transformers that define the modules of a model."""
    names = {unsharded_class(module).__module__ for module in model.modules()}
    return {name for name in names if name.startswith("transformers.")}
