"""Hooks and modules that a user may add to a model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.hf.drawn_settings.change import Change
from tests.hf.drawn_settings.options import ALL, CAUSAL
from tests.hf.tiny import VOCAB


def base_of(model: Any) -> Any:
    """The model without adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> Any:
    inner = base_of(model).base_model
    return inner.h if hasattr(inner, "h") else inner.layers


def head_of(model: Any) -> Any:
    return base_of(model).get_output_embeddings()


def scaled(output: Any, factor: float) -> Any:
    """An output of a layer, scaled."""
    if isinstance(output, tuple):
        return (output[0] * factor, *output[1:])
    return output * factor


# ---- on modules


def head_hook(model: Any) -> None:
    head_of(model).register_forward_hook(lambda module, args, output: output * 0.5)


def head_pre_hook(model: Any) -> None:
    head_of(model).register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:]))


def layer_hook(model: Any) -> None:
    layers_of(model)[0].register_forward_hook(lambda module, args, out: scaled(out, 0.9))


def layer_pre_hook(model: Any) -> None:
    layers_of(model)[1].register_forward_pre_hook(lambda module, args: scaled(args, 1.1))


def layer_backward_hook(model: Any) -> None:
    layers_of(model)[1].register_full_backward_hook(
        lambda module, inwards, outwards: tuple(g if g is None else g * 0.5 for g in inwards)
    )


def normed_backward_hook(model: Any) -> None:
    """Normalises the gradient that leaves a layer, of a whole batch."""
    layers_of(model)[1].register_full_backward_hook(
        lambda module, inwards, outwards: tuple(
            g if g is None else g / (1 + g.norm()) for g in inwards
        )
    )


def embedding_hook(model: Any) -> None:
    base_of(model).get_input_embeddings().register_forward_hook(
        lambda module, args, output: output * 1.5
    )


def model_hook(model: Any) -> None:
    """Scales the loss of a model's outputs."""

    def scale(module: Any, args: Any, output: Any) -> Any:
        if output.get("loss") is not None:
            output["loss"] = output["loss"] * 0.5
        return output

    base_of(model).register_forward_hook(scale)


def model_pre_hook(model: Any) -> None:
    """Changes the tokens that a model is called on."""

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % VOCAB}

    base_of(model).register_forward_pre_hook(change, with_kwargs=True)


def label_pre_hook(model: Any) -> None:
    """Changes the labels that a model is called with."""

    def change(module: Any, args: Any, kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is None:
            return args, kwargs
        other = torch.where(labels >= 0, (labels + 1) % VOCAB, labels)
        return args, {**kwargs, "labels": other}

    base_of(model).register_forward_pre_hook(change, with_kwargs=True)


def hidden_norm_hook(model: Any) -> None:
    """Divides the output of a layer by its size in the whole batch."""
    layers_of(model)[0].register_forward_hook(lambda module, args, out: out / out.std())


class Adapter(nn.Module):
    """A residual branch beside an MLP, token by token."""

    def __init__(self, mlp: nn.Module, like: torch.Tensor) -> None:
        super().__init__()
        self.mlp = mlp
        torch.manual_seed(9)
        size = like.shape[-1]
        self.branch = nn.Linear(size, size).to(like)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden) + self.branch(hidden)


class Smoother(Adapter):
    """Mixes each token with the one before it in its row."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = torch.roll(hidden, 1, dims=1)
        before = torch.cat([hidden[:, :1], before[:, 1:]], dim=1)
        return self.mlp(hidden) + 0.3 * self.branch(before)


class CenteredBatch(Adapter):
    """Subtracts the mean of all tokens of a batch."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden - hidden.mean((0, 1)))


def put_around_mlp(cls: Any) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        layer = layers_of(model)[0]
        layer.mlp = cls(layer.mlp, next(iter(layers_of(model)[1].parameters())).new_zeros(1, 32))

    return put


def own_forward(model: Any) -> None:
    """Replaces the forward of the model by one that changes its tokens."""
    inner = base_of(model)
    stock = inner.forward

    def forward(input_ids: Any = None, **given: Any) -> Any:
        return stock(input_ids=(input_ids + 1) % VOCAB, **given)

    inner.forward = forward


def own_loss_function(model: Any) -> None:
    """Gives the model a loss of its user's."""

    def loss(
        logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **given: Any
    ) -> Any:
        targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        each = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        each = each * (1 - (-each).exp())
        items = num_items_in_batch
        return each.sum() / (items if items is not None else (targets != -100).sum())

    base_of(model).loss_function = loss


# ---- on gradients


def _trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def gradients_scaled(model: Any) -> None:
    for parameter in _trained(model):
        parameter.register_hook(lambda gradient: gradient * 0.5)


def gradients_masked(model: Any) -> None:
    parameter = _trained(model)[0]
    mask = (torch.arange(parameter.numel()) % 3 > 0).view_as(parameter)
    parameter.register_hook(lambda gradient: gradient * mask)


def gradients_clamped(model: Any) -> None:
    for parameter in _trained(model):
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


def clamped_after_accumulation(model: Any) -> None:
    def clamp(parameter: Any) -> None:
        parameter.grad.clamp_(-1e-4, 1e-4)

    for parameter in _trained(model):
        parameter.register_post_accumulate_grad_hook(clamp)


def scaled_after_accumulation(model: Any) -> None:
    def scale(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    for parameter in _trained(model):
        parameter.register_post_accumulate_grad_hook(scale)


_ON_MODEL: dict[str, tuple[Callable[[Any], None], tuple[str, ...], float]] = {
    "head hook": (head_hook, CAUSAL, 0.5),
    "head pre-hook": (head_pre_hook, CAUSAL, 1),
    "layer hook": (layer_hook, ALL, 1),
    "layer pre-hook": (layer_pre_hook, ALL, 1),
    "layer backward hook": (layer_backward_hook, ALL, 1),
    "normed backward hook": (normed_backward_hook, ALL, 0.5),
    "embedding hook": (embedding_hook, ALL, 1),
    "model hook": (model_hook, CAUSAL, 1),
    "model pre-hook": (model_pre_hook, ALL, 1),
    "label pre-hook": (label_pre_hook, CAUSAL, 0.7),
    "hidden norm hook": (hidden_norm_hook, ALL, 0.5),
    "adapter": (put_around_mlp(Adapter), ALL, 1),
    "smoother": (put_around_mlp(Smoother), ALL, 0.5),
    "centered batch": (put_around_mlp(CenteredBatch), ALL, 0.5),
    "own forward": (own_forward, CAUSAL, 1),
    "own loss function": (own_loss_function, ("trainer",), 1),
    "gradients scaled": (gradients_scaled, ALL, 1),
    "gradients masked": (gradients_masked, ALL, 1),
    "gradients clamped": (gradients_clamped, ALL, 0.7),
    "clamped after accumulation": (clamped_after_accumulation, ALL, 0.7),
    "scaled after accumulation": (scaled_after_accumulation, ALL, 0.7),
}

HOOKS = {
    name: Change(model=on_model, of=of, weight=weight)
    for name, (on_model, of, weight) in _ON_MODEL.items()
}
