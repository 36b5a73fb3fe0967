"""A Llama on one rank, whose micro-batches run as in a planned step, and a guard against attention
that makes the host wait for the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_flexseq.attention import SequenceContext
from hf_flexseq.attention import function as attention_function
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.attention import NAME
from hf_flexseq.hf.model.facts import attention_shape
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.positions import attach_positions
from hf_flexseq.hf.model.towers import attention_of_text
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.cuda_flash import CudaFlash
from hf_flexseq.kernels.cudnn_long import Heads
from hf_flexseq.steps.inputs import inputs_of, shard_alone

COMMON = {"vocab_size": 128256, "max_position_embeddings": 131072}
FOUR_LAYERS = COMMON | {  # of Llama-3.1-8B
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}
SMALL = COMMON | {  # about Llama-3.2-1B: the state of its optimizer must fit
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
TINY = {  # in a rehearsal
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}


class OneRank:
    """A model and what its micro-batches need."""

    def __init__(
        self, config: LlamaConfig, device: torch.device, dtype: torch.dtype, *, checkpointing: bool
    ) -> None:
        """dtype: of the parameters; those of 32 bits compute under autocast in bfloat16."""
        self.device = device
        self._autocast = dtype == torch.float32
        with torch.device(device):
            self.model = LlamaForCausalLM(config).to(dtype).train()
        self.model.set_attn_implementation(attention_of_text(self.model, NAME))
        attach_chunked_loss(self.model)
        attach_positions(self.model)
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        heads = attention_shape(config)
        kernel = choose_kernel(device, torch.bfloat16, heads.head_dim)
        if isinstance(kernel, CudaFlash):
            kernel.try_cudnn([Heads(*heads, torch.bfloat16)], device)
        self._context = partial(
            SequenceContext, communicator=Communicator(), kernel=kernel, device=device
        )

    def forward_backward(self, lengths: Sequence[int]) -> None:
        """Run one micro-batch of sequences of these lengths; gradients are added up."""
        ids = torch.arange(sum(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])
        known = ids % self.model.config.vocab_size
        columns = {"input_ids": known, "labels": known, "position_ids": positions}
        shard = shard_alone(list(lengths), 0)
        inputs = inputs_of(shard, columns, self.device, self._context)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            outputs = self.model(**inputs, use_cache=False, num_items_in_batch=sum(lengths))
        outputs.loss.backward()


# ---- the host must not wait


@contextmanager
def host_waits_nowhere(is_guarded: bool) -> Iterator[None]:
    """Raise an error where attention makes the host wait for the device; do so if `is_guarded`."""
    if not is_guarded:
        yield
        return
    plain = attention_function._SequenceParallelAttention
    checkpointed = attention_function._CheckpointedAttention
    with (
        mock.patch.multiple(plain, **_guarded_halves(plain)),
        mock.patch.multiple(checkpointed, **_guarded_halves(checkpointed)),
    ):
        yield


def _guarded_halves(node: type[torch.autograd.Function]) -> dict[str, staticmethod]:
    """Return forward and backward of a node, each in a mode in which waiting is an error."""
    return {
        "forward": staticmethod(_guarded(node.forward)),
        "backward": staticmethod(_guarded(node.backward)),
    }


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        former = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode(former)

    return run
