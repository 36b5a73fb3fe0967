"""NEFTune's noise on the embeddings of an attached model, instead of transformers' own hook.

That of transformers draws from the device's generator, and divides by the length of the row, which
here holds parts of several sequences. What stands in its place is in `steps/embedding_noise.py`.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.steps.embedding_noise import TokenNoise
from hf_flexseq.steps.forward_hooks import around_forward


class EmbeddingNoise:
    """Adds the noise of each micro-batch to its embedded tokens, until it is detached.

    As in transformers, only a model in training mode has noise, also without gradients.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """model: without adapters."""
        self._noise: TokenNoise | None = None  # while the model runs on a micro-batch
        self._hooks = ExitStack()
        embedded = model.get_input_embeddings().register_forward_hook(self._add)
        self._hooks.callback(embedded.remove)
        for entry in {model, model.base_model}:
            self._hooks.enter_context(around_forward(entry, self._begin, self._end))

    def detach(self) -> None:
        """Take the hooks back."""
        self._hooks.close()

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        context = kwargs.get("seq_ctx")
        self._noise = None if context is None else context.noise

    def _end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._noise = None

    def _add(self, module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens, [1, tokens, hidden], with noise in training mode."""
        if self._noise is None or not module.training:
            return embedded
        return self._noise.added_to(embedded)
