"""Activation checkpointing as the user has set it, on layers and in training arguments.

transformers keeps two attributes on a layer, FLAG and FUNCTION, and binds the options of torch's
checkpoint to the function. With the option `offload` that is one of its own, which brings inputs
of layers to the host.

Reentrant checkpointing, which is torch's default as soon as options are given, runs the backward
of a layer inside another backward: exchanges between ranks lose the order that autograd gives
them, and attention that was kept for the second run is not found. The non-reentrant one has the
same results, so layers get it while a model is attached (`NonReentrant`). The Trainer, a callback
or a loop may set a layer's function at any time. So it is looked at before every planned call, and
the former function comes back with `restore`. A function of the user's own that is told to be
reentrant cannot be replaced, and is refused.

Where the plan of a micro-batch chooses instead, `layer_memory.py` applies its choice.
"""

import logging
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Trainer

from hf_flexseq.base.patches import Patch
from hf_flexseq.base.versions import (
    OFFLOAD_FROM,
    checkpointing_name,
    checkpointing_options,
    is_older,
    needs,
)

logger = logging.getLogger(__name__)


FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
CHECKPOINT = partial(checkpoint, use_reentrant=False)


def offloads(module: nn.Module) -> bool:
    """Tell whether transformers brings the inputs of a checkpointed layer to the host. It binds
    options to a function of its own for that, instead of torch's `checkpoint`."""
    function = getattr(getattr(module, FUNCTION, None), "func", None)
    code = getattr(function, "__code__", None)
    is_its_own = getattr(function, "__module__", None) == "transformers.modeling_utils"
    return is_its_own and code is not None and "save_on_cpu" in code.co_names


def options_of(layer: nn.Module) -> dict[str, Any]:
    """Return the user's options for torch's checkpoint, or ours without any."""
    options = getattr(getattr(layer, FUNCTION, None), "keywords", None)
    return dict(options or CHECKPOINT.keywords)


# ---- reentrant checkpointing


def unsuitable_checkpointing(model: PreTrainedModel) -> str | None:
    """Return why the checkpointed layers of a model cannot run again the non-reentrant way; None
    if they can."""
    for module in model.modules():
        if getattr(module, FLAG, False) and _is_reentrant(module) and not _is_replaceable(module):
            return (
                f"{type(module).__name__} is checkpointed by a function of your own that is "
                "reentrant, which runs attention outside of autograd's order; give it "
                "use_reentrant=False"
            )
    return None


class NonReentrant:
    """The layers of one model that may be checkpointed, which are never so in the reentrant
    way between `replace` and `restore`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers = [module for module in model.modules() if hasattr(module, FLAG)]
        self._replaced = ExitStack()
        self._has_said = False

    def replace(self) -> None:
        """Replace reentrant functions; the first time one line in the log says so. Raises
        NotImplementedError for one that cannot be replaced."""
        reentrant = [layer for layer in self._layers if _is_reentrant(layer)]
        if not reentrant:
            return
        reason = unsuitable_checkpointing(self._model)
        if reason is not None:
            raise NotImplementedError(f"{type(self._model).__name__}: {reason}")
        if not self._has_said:
            self._has_said = True
            logger.info(
                "use_reentrant=True: layers of %s are checkpointed with use_reentrant=False, "
                "which has the same results",
                type(self._model).__name__,
            )
        for layer in reentrant:
            if _is_replaceable(layer):
                ours = _other_way(getattr(layer, FUNCTION))
                self._replaced.enter_context(Patch(layer, **{FUNCTION: ours}))

    def restore(self) -> None:
        """Give layers their former functions back, unless others have been set since."""
        self._replaced.close()
        self._has_said = False


def _is_reentrant(module: nn.Module) -> bool:
    """Tell whether a layer's function is torch's checkpoint, or has options as that one has, and
    is not told to be non-reentrant."""
    function = getattr(module, FUNCTION, None)
    if function is checkpoint:
        return True
    # transformers binds the options with functools.partial; any other function is not torch's
    options = getattr(function, "keywords", CHECKPOINT.keywords)
    return options.get("use_reentrant", True) is not False


def _is_replaceable(module: nn.Module) -> bool:
    """Tell whether the function of a reentrant layer is torch's or transformers' own."""
    function = getattr(module, FUNCTION)
    return getattr(function, "func", function) is checkpoint or offloads(module)


def _other_way(function: Any) -> Any:
    """Return the non-reentrant function for a replaceable one, with the same other options."""
    if function is checkpoint:
        return CHECKPOINT
    options = {**function.keywords, "use_reentrant": False}
    return partial(function.func, *function.args, **options)


# ---- what a trainer asks for


def asks_to_offload(trainer: Trainer) -> bool:
    """Tell whether activation checkpointing is on, and brings layers' inputs to the host."""
    is_on = getattr(trainer.args, checkpointing_name(trainer.args))
    return bool(is_on and checkpointing_options(trainer.args).get("offload"))


def offloading_twice(trainer: Trainer) -> str | None:
    """Find layers' inputs that TRL and activation checkpointing would both bring to the host."""
    if not getattr(trainer.args, "activation_offloading", False):
        return None
    if not asks_to_offload(trainer):
        return None
    name = checkpointing_name(trainer.args)
    return f"activation_offloading=True and offload=True in {name}_kwargs"


def unknown_offloading(trainer: Trainer) -> str | None:
    """Find offloading that this version of transformers would hand on to torch."""
    if not is_older("transformers", OFFLOAD_FROM):
        return None
    if "offload" not in checkpointing_options(trainer.args):
        return None
    name = checkpointing_name(trainer.args)
    return f"offload in {name}_kwargs ({needs('transformers', OFFLOAD_FROM)})"
