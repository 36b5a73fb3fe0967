"""A small copy of a model, made to be timed: the same layers, but fewer of them, and weights of no
meaning.

It runs micro-batches exactly as training does: packed rows with their sequence context, the
attention of the plan's groups, the chunked loss, the backward; under the same autocast and with
the same checkpointing.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan.shard import Shard, make_shard
from hf_flexseq.profiler.design import ProbeLayout
from hf_flexseq.steps.step import model_inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSpec:
    """What a copy is made from.

    kind: the class of the model. dtype: of its parameters. autocast: of its arithmetic, if another
    one. checkpointing: whether layers are recomputed. attention_remat: whether their attention is
    not. frozen: whether only activations get gradients, as under adapters.
    """

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype
    autocast: torch.dtype | None
    checkpointing: bool
    attention_remat: bool = True
    frozen: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.autocast or self.dtype


class Probe:
    """A model of `layers` layers on `device`. Leaves the random numbers of the run as they are."""

    def __init__(
        self, spec: ProbeSpec, layers: int, communicator: Communicator, device: torch.device
    ) -> None:
        self.spec, self.communicator, self.device = spec, communicator, device
        with untouched_random_numbers(device), torch.device(device):
            model = spec.kind(shortened(spec.config, layers)).to(spec.dtype).train()
        model.set_attn_implementation(NAME)
        attach_chunked_loss(model)
        if spec.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if spec.frozen:
            model.requires_grad_(False)
            model.enable_input_require_grads()
        self.model = model

    def run(self, layout: ProbeLayout, kernel: Kernel) -> Callable[[], None]:
        """One micro-batch, ready to be run again and again."""
        shard = make_shard(layout.micro_batch, layout.lengths, self.communicator.rank)
        ((_, inputs),) = model_inputs(
            [shard],
            [self._columns(shard)],
            lockstep=True,
            communicator=self.communicator,
            kernel=kernel,
            device=self.device,
            attention_remat=self.spec.attention_remat,
        )
        autocast = torch.autocast(
            self.device.type, self.spec.autocast, enabled=self.spec.autocast is not None
        )

        def forward_backward() -> None:
            with autocast:
                loss = self.model(
                    **inputs, use_cache=False, num_items_in_batch=sum(layout.lengths)
                ).loss
            loss.backward()

        return forward_backward

    def _columns(self, shard: Shard) -> dict[str, torch.Tensor]:
        """Some tokens, at the positions that they have in their sequences as far as the model
        knows such."""
        config = self.spec.config.get_text_config()
        last = (getattr(config, "max_position_embeddings", None) or 2**31) - 1
        rows = [torch.arange(piece.start, piece.stop) for piece in shard.slices]
        positions = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        tokens = positions % config.vocab_size
        return {"input_ids": tokens, "labels": tokens, "position_ids": positions.clamp(max=last)}


def shortened(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """A copy of `config` with its first `layers` layers."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return short


@contextmanager
def untouched_random_numbers(device: torch.device) -> Iterator[None]:
    """The generators of the CPU and of `device` are after the block what they were before it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
