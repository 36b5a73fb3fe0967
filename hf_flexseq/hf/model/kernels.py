"""Choose the attention kernel of a model, whose layers may need several."""

from typing import Any

import torch

from hf_flexseq.hf.model.layer_kinds import layer_kinds
from hf_flexseq.kernels import Kernel, kinds


def choose_layer_kernels(
    config: Any, device: torch.device, dtype: torch.dtype, *, repeatable_keys: int = 0
) -> Kernel:
    """Return a kernel that serves all layers of the model with this (text) configuration.

    repeatable_keys: keys of a sequence over which the backward must give the same bits every time;
    0 asks for none. Raises ValueError, naming the layer, where there is none.
    """
    layers = []
    for number, kind in enumerate(layer_kinds(config)):
        layers.append(
            kinds.LayerKind(
                name=f"layer {number}",
                head_dim=kind.width,
                window=kind.reach.window is not None,
                softcap=kind.softcap is not None,
            )
        )
    return kinds.choose_kernels(device, dtype, layers, repeatable_keys=repeatable_keys)
