"""The parts of a decoder-only HF model that a pipeline cuts (`stages.py`), and placeholders for
the parts of other stages.

The model's own forward must do nothing between the embedding and the norm but call the layers:
`check_identity` tries it on a stack of skips, which must change nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_flexseq.hf.model.facts import expert_counts
from hf_flexseq.pipeline.divide import NONE

# Names of a decoder's last norm.
NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "embedding_norm")


class Skip(nn.Module):
    """A module of another stage, which returns its input, with the plain attributes that decoders
    read."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if isinstance(value, int | float | str) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return hidden [1, tokens, hidden_size]; ValueError for another tensor of that shape."""
        for other in (*args, *kwargs.values()):
            if isinstance(other, torch.Tensor) and other.shape == hidden.shape:
                raise ValueError("its layers are given the embeddings, too")
        return hidden


class Elsewhere(nn.Module):
    """Embedding or head of another stage, which nothing may call, `generate` included."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raise NotImplementedError instead of returning [1, tokens, ...]."""
        raise NotImplementedError(
            "this model is one stage of a pipeline: save it, and load the whole one to call it or "
            "to generate"
        )


class View(NamedTuple):
    """Layers and norm that a decoder has for a while."""

    layers: nn.ModuleList
    norm: nn.Module


class LayerSizes(NamedTuple):
    """Counts of weights."""

    layers: tuple[int, ...]  # of every layer: those that multiply a token
    head: int  # of the LM head
    held: tuple[int, ...]  # of every layer: all, with the experts that a token passes by


class Stack:
    """Embedding, layers, norm and head of a decoder-only model, by their names."""

    def __init__(self, model: nn.Module) -> None:
        """Find the parts. Raises NotImplementedError, with the reason, for another structure."""
        prefix = getattr(model, "base_model_prefix", "base model")
        decoder = getattr(model, prefix, None)
        if decoder is None:
            decoder = getattr(model, "model", None)  # Llama 4's prefix names what it has not
        if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
            raise _no_stack(model, f"its {prefix!r} has no list `layers`")
        self.model = model
        self.decoder: nn.Module = decoder
        self.embedding_name = _name_of(decoder, model.get_input_embeddings())
        self.head_name = _name_of(model, model.get_output_embeddings())
        self.norm_name = ""
        for name in NORMS:
            if not self.norm_name and hasattr(decoder, name):
                self.norm_name = name
        parts = {
            "embedding": self.embedding_name,
            "LM head": self.head_name,
            "norm": self.norm_name,
        }
        for part, name in parts.items():
            if not name:
                raise _no_stack(model, f"it has no {part} where a plain decoder has it")
        self._check_nothing_else()
        self._check_nothing_shared()
        self.width = self.embedding.weight.shape[1]  # hidden_size

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def embedding(self) -> nn.Module:
        return self.decoder.get_submodule(self.embedding_name)

    @property
    def head(self) -> nn.Module:
        return self.model.get_submodule(self.head_name)

    @property
    def norm(self) -> nn.Module:
        return self.decoder.get_submodule(self.norm_name)

    @property
    def _text_config(self) -> Any:
        config: Any = getattr(self.model, "config", None)
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    def tied_name(self) -> str | None:
        """Return the name of the tensor [vocabulary, hidden_size] tied to both ends, or None."""
        embedding = getattr(self.embedding, "weight", None)
        head = getattr(self.head, "weight", None)
        if embedding is None:
            return None
        # A model without memory is tied only after it has been loaded.
        will_be_tied = embedding.is_meta and self.model.config.tie_word_embeddings
        if embedding is not head and not will_be_tied:
            return None
        names = (name for name, weight in self.model.named_parameters() if weight is embedding)
        return next(names)

    def sizes(self) -> LayerSizes:
        """Return how many weights each layer and the head have."""
        experts = (0, 0)
        if self._text_config is not None:
            experts = expert_counts(self._text_config)
        return LayerSizes(
            layers=tuple(_multiplying(layer, *experts) for layer in self.layers),
            head=_multiplying(self.head, *experts),
            held=tuple(sum(p.numel() for p in layer.parameters()) for layer in self.layers),
        )

    def inseparable(self) -> range:
        """Return the layers from the first that stores shared keys to the last that reads them."""
        modes = list(getattr(self._text_config, "kv_sharing_modes", None) or ())
        readers = [layer for layer, mode in enumerate(modes) if mode not in (None, "store")]
        if not readers:
            return NONE
        return range(modes.index("store"), readers[-1] + 1)

    # ---- other layers for a while

    def view(self, start: int, stop: int, *, has_norm: bool) -> View:
        """Return the view in which the decoder has layers [start, stop) alone."""
        layers = nn.ModuleList()
        for index, layer in enumerate(self.layers):
            layers.append(layer if start <= index < stop else Skip(layer))
        return View(layers, self.norm if has_norm else Skip(self.norm))

    @contextmanager
    def replaced(self, view: View | None) -> Iterator[None]:
        """Give the decoder the layers and norm of `view`, if any, inside the block."""
        if view is None:
            yield
            return
        own = View(self.layers, self.norm)
        self._put(view)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, view: View) -> None:
        self.decoder.layers = view.layers
        setattr(self.decoder, self.norm_name, view.norm)

    # ---- checks

    def check_identity(self) -> None:
        """Raise NotImplementedError unless the decoder without layers keeps hidden states."""
        parameter = next(self.model.parameters())
        hidden = torch.ones(1, 2, self.width, dtype=parameter.dtype, device=parameter.device)
        positions = torch.arange(2, device=parameter.device).unsqueeze(0)  # [2] -> [1, 2]
        with torch.no_grad(), self.replaced(self.view(0, 0, has_norm=False)):
            try:
                output = self.decoder(
                    inputs_embeds=hidden, position_ids=positions, use_cache=False
                )
                found = output.last_hidden_state  # [1, 2, hidden_size]
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                reason = f"it does not run on hidden states ({error})"
                raise _no_stack(self.model, reason) from error
        if found.shape != hidden.shape or not torch.equal(found, hidden):
            raise _no_stack(
                self.model, "it changes hidden states between its embedding and its layers"
            )

    def _check_nothing_else(self) -> None:
        """Raise NotImplementedError for a parameter outside of the parts, in no stage or all."""
        known: set[int] = set()
        for part in (self.embedding, self.layers, self.norm, self.head):
            known.update(id(parameter) for parameter in part.parameters())
        for name, parameter in self.model.named_parameters():
            if id(parameter) not in known:
                raise _no_stack(
                    self.model, f"{name} is outside of embedding, layers, norm and head"
                )

    def _check_nothing_shared(self) -> None:
        """Raise NotImplementedError for a parameter of two layers, which may be in two stages."""
        layer_of: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                first = layer_of.setdefault(id(parameter), index)
                if first != index:
                    raise _no_stack(self.model, f"layers {first} and {index} share {name}")


def _multiplying(module: nn.Module, experts: int, active: int) -> int:
    """Return how many weights multiply each token in `module`: the elements of its matrices, and
    the share of the `active` among all `experts`."""
    count = 0
    for name, parameter in module.named_parameters():
        is_of_all = parameter.dim() > 2 and len(parameter) == experts
        if experts and (is_of_all or ".experts." in name):
            count += parameter.numel() * active // experts
        elif parameter.dim() == 2:
            count += parameter.numel()
    return count


def _name_of(parent: nn.Module, child: nn.Module | None) -> str:
    """Return the name under which `parent` has `child` as a direct child, "" without one."""
    for name, module in parent.named_children():
        if module is child:
            return name
    return ""


def _no_stack(model: nn.Module, reason: str) -> NotImplementedError:
    """Return the error for a model that cannot be cut."""
    return NotImplementedError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {reason}; set "
        "pipeline_parallel_size=1"
    )
