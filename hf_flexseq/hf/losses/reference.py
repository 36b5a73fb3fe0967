"""Models that a loss asks besides the trained one, without gradients: a reference model, or the
trained model with its adapter off."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.hf.model.attachments import on_micro_batches
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import base_model, layer_calls
from hf_flexseq.hf.model.vision import VisionModel


@contextmanager
def attached_reference(
    model: nn.Module | None, policy: PreTrainedModel, *, takes_images: bool
) -> Iterator[None]:
    """Give a reference model our attention, recurrent layers and positions inside the block, and
    features of its own tower; nothing happens for None.

    model: as accelerate has wrapped it. policy: the trained model, whose kernels serve both.
    takes_images: True if the trained model does.
    Raises NotImplementedError for a model that cannot be computed exactly, or whose layers are of
    other sizes than the policy's.
    """
    if model is None:
        yield
        return
    base = base_model(_unwrapped(model))
    check_model(base)
    if layer_calls(base.config) != layer_calls(policy.config):
        raise NotImplementedError(
            f"the reference model {type(base).__name__} has other attention layers than the "
            "trained one: give a reference of the same architecture and sizes"
        )
    with ExitStack() as attached:
        attached.enter_context(on_micro_batches(base))
        if takes_images:
            attached.enter_context(VisionModel(base).attached())
        yield


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DDP or DeepSpeed."""
    inner = getattr(model, "module", None)
    if isinstance(inner, nn.Module) and not isinstance(model, PreTrainedModel):
        return inner
    return model


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Turn to the reference adapter inside the block, as TRL does: `ref`, or no adapter."""
    from trl.trainer.utils import use_adapter

    name = "ref" if "ref" in model.peft_config else None
    with use_adapter(model, adapter_name=name):
        yield


def adapter_state(model: nn.Module) -> tuple[Any, ...] | None:
    """Return which adapters of a model are on, and if they are disabled; None without any."""
    if not hasattr(model, "peft_config"):
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():  # of the model itself, `disable_adapters` is a method
        if isinstance(module, BaseTunerLayer):
            return (tuple(module.active_adapters), module.disable_adapters)
    return None


@contextmanager
def reference_of(trainer: Any, policy: nn.Module) -> Iterator[Any]:
    """Yield the trainer's reference. policy: the trained model as accelerate has wrapped it."""
    model = getattr(trainer, "ref_model", None)
    if model is not None:
        yield model
        return
    with adapter_off(trainer.accelerator.unwrap_model(trainer.model)):
        yield policy
