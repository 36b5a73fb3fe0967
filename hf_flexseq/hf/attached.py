"""What is attached to a whole model while it runs planned steps.

| attached | by |
|---|---|
| attention of the plan's groups | `attention.py`, registered with transformers |
| loss in chunks, inside the head's own call | `model/loss.py` |
| positions and lengths of whole sequences | `model/positions.py` |
| recurrent layers over a sequence's ranks | `model/recurrent.py` |
| router loss of the whole step | `model/router.py` |
| DDP buckets with early reduction | `model/buckets.py` |

A call without `seq_ctx` is outside of planned steps, for example when a callback generates a
sample. Such a call uses the model's own attention and loss.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.buckets import early_buckets
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.positions import attach_positions, needed_columns
from hf_flexseq.hf.model.recurrent import attach_recurrent
from hf_flexseq.hf.model.router import RouterLoss, asks_for_router_loss


class AttachedModel:
    """A model that runs planned steps until it is detached."""

    def __init__(self, model: nn.Module, base: PreTrainedModel, accelerator: Accelerator) -> None:
        """model: may be a PEFT model, with `base` inside."""
        self.base = base
        self._accelerator = accelerator
        self._former_ddp = accelerator.ddp_handler
        self._former_attention: str = base.config._attn_implementation
        accelerator.ddp_handler = early_buckets(accelerator.ddp_handler, model)
        base.set_attn_implementation(NAME)
        self._chunked_loss = attach_chunked_loss(model)
        self._positions = attach_positions(base)
        self._recurrent = attach_recurrent(base)
        self.router = RouterLoss(model, base) if asks_for_router_loss(base) else None
        """Router loss, if the model computes one."""
        self.token_columns = needed_columns(base)
        """Columns to dispatch with every token, besides those that were drawn."""
        self._other_call: tuple[nn.Module, ExitStack] | None = None  # call without `seq_ctx`
        self._hooks: list[Any] = []
        for entry in {base, base.base_model}:  # the second one is the decoder below the head
            self._hooks += [
                entry.register_forward_pre_hook(self._begin_call, with_kwargs=True, prepend=True),
                entry.register_forward_hook(self._end_call, always_call=True),
            ]

    def detach(self) -> None:
        """Restore the model's attention and loss, and accelerate's DDP handler."""
        self.base.set_attn_implementation(self._former_attention)
        self._accelerator.ddp_handler = self._former_ddp
        if self._chunked_loss is not None:
            self._chunked_loss.detach()
        self._positions.detach()
        self._recurrent.detach()
        if self.router is not None:
            self.router.detach()
        for hook in self._hooks:
            hook.remove()

    def _begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Restore the model's own attention and loss for a call without `seq_ctx`."""
        is_planned = self.base.config._attn_implementation == NAME
        if kwargs.get("seq_ctx") is not None or not is_planned:
            return
        own = ExitStack()
        own.enter_context(self.own_attention())
        if self._chunked_loss is not None:
            own.enter_context(self._chunked_loss.disabled())
        self._other_call = (module, own)

    def _end_call(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """Undo `_begin_call` of the same module."""
        if self._other_call is not None and self._other_call[0] is module:
            _, own = self._other_call
            self._other_call = None
            own.close()

    def need_columns(self, names: Iterable[str]) -> None:
        """Dispatch more columns, without duplicates, with every token from now on."""
        self.token_columns = tuple(dict.fromkeys((*self.token_columns, *names)))

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Restore the model's own attention inside the block, for generation."""
        self.base.set_attn_implementation(self._former_attention)
        try:
            yield
        finally:
            self.base.set_attn_implementation(NAME)

    @contextmanager
    def planned_attention(self) -> Iterator[None]:
        """Use our attention inside the block, even within `own_attention`."""
        former = self.base.config._attn_implementation
        if former == NAME:
            yield
            return
        self.base.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self.base.set_attn_implementation(former)
