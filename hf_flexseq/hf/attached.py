"""What a whole model is given while it runs on planned steps, and gives back.

| given | by |
|---|---|
| attention of the plan's groups | `attention.py`, registered with transformers |
| loss in chunks, inside the head's own call | `model/loss.py` |
| positions and lengths of whole sequences | `model/positions.py` |
| recurrent layers over a sequence's ranks | `model/recurrent.py` |
| router loss of the whole step | `model/router.py` |
| DDP buckets that are reduced early | `model/buckets.py` |
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
    """A model that runs on planned steps, until it is detached."""

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
        """The router loss of a model that asks for one."""
        self.token_columns = needed_columns(base)
        """The columns that are dealt with every token, beside those that were drawn."""

    def detach(self) -> None:
        """Give the model its own attention and loss back, and accelerate its DDP handler."""
        self.base.set_attn_implementation(self._former_attention)
        self._accelerator.ddp_handler = self._former_ddp
        if self._chunked_loss is not None:
            self._chunked_loss.detach()
        self._positions.detach()
        self._recurrent.detach()
        if self.router is not None:
            self.router.detach()

    def need_columns(self, names: Iterable[str]) -> None:
        """Have more columns dealt with every token from now on."""
        self.token_columns = tuple(dict.fromkeys((*self.token_columns, *names)))  # each once

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Give the model its own attention back inside the block, to generate with."""
        self.base.set_attn_implementation(self._former_attention)
        try:
            yield
        finally:
            self.base.set_attn_implementation(NAME)

    @contextmanager
    def planned_attention(self) -> Iterator[None]:
        """Give the model our attention inside the block, also where `own_attention` has taken it
        away."""
        former = self.base.config._attn_implementation
        if former == NAME:
            yield
            return
        self.base.set_attn_implementation(NAME)
        try:
            yield
        finally:
            self.base.set_attn_implementation(former)
