"""Hooks and modules that a user may add to a model."""

import torch
from torch import nn

from tests.differential.case import base_of
from tests.hf.drawn_settings.change import Change, other_labels, recorder, shifted_ids
from tests.hf.drawn_settings.options import ALL

HOOKS: dict[str, Change] = {}
on_model = recorder(HOOKS, "model")


def layers_of(model):
    inner = base_of(model).base_model
    return inner.h if hasattr(inner, "h") else inner.layers


def head_of(model):
    return base_of(model).get_output_embeddings()


def scaled(output, factor):
    """An output of a layer, or its inputs, scaled."""
    if isinstance(output, tuple):
        return (output[0] * factor, *output[1:])
    return output * factor


# ---- on modules


@on_model(weight=0.5)
def head_hook(model):
    head_of(model).register_forward_hook(lambda module, args, output: output * 0.5)


@on_model()
def head_pre_hook(model):
    head_of(model).register_forward_pre_hook(lambda module, args: scaled(args, 0.5))


@on_model(of=ALL)
def layer_hook(model):
    layers_of(model)[0].register_forward_hook(lambda module, args, out: scaled(out, 0.9))


@on_model(of=ALL)
def layer_pre_hook(model):
    layers_of(model)[1].register_forward_pre_hook(lambda module, args: scaled(args, 1.1))


@on_model(of=ALL)
def layer_backward_hook(model):
    layers_of(model)[1].register_full_backward_hook(
        lambda module, inwards, outwards: tuple(g if g is None else g * 0.5 for g in inwards)
    )


@on_model(of=ALL, weight=0.5)
def normed_backward_hook(model):
    """Normalises the gradient that leaves a layer, of a whole batch."""

    def normed(module, inwards, outwards):
        return tuple(g if g is None else g / (1 + g.norm()) for g in inwards)

    layers_of(model)[1].register_full_backward_hook(normed)


@on_model(of=ALL)
def embedding_hook(model):
    embedding = base_of(model).get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: output * 1.5)


@on_model()
def model_hook(model):
    """Scales the loss of a model's outputs."""

    def scale(module, args, output):
        if output.get("loss") is not None:
            output["loss"] = output["loss"] * 0.5
        return output

    base_of(model).register_forward_hook(scale)


@on_model(of=ALL)
def model_pre_hook(model):
    """Changes the tokens that a model is called on."""

    def change(module, args, kwargs):
        return args, {**kwargs, "input_ids": shifted_ids(kwargs["input_ids"])}

    base_of(model).register_forward_pre_hook(change, with_kwargs=True)


@on_model(weight=0.7)
def label_pre_hook(model):
    """Changes the labels that a model is called with."""

    def change(module, args, kwargs):
        if kwargs.get("labels") is not None:
            kwargs = {**kwargs, "labels": other_labels(kwargs["labels"])}
        return args, kwargs

    base_of(model).register_forward_pre_hook(change, with_kwargs=True)


@on_model(of=ALL, weight=0.5)
def hidden_norm_hook(model):
    """Divides the output of a layer by its size in the whole batch."""
    layers_of(model)[0].register_forward_hook(lambda module, args, out: out / out.std())


def put_around_mlp(cls):
    def put(model):
        layer = layers_of(model)[0]
        layer.mlp = cls(layer.mlp, next(iter(layers_of(model)[1].parameters())).new_zeros(1, 32))

    return put


around_mlp = recorder(HOOKS, "model", put_around_mlp)


@around_mlp(of=ALL)
class Adapter(nn.Module):
    """A residual branch beside an MLP, token by token."""

    def __init__(self, mlp, like):
        super().__init__()
        self.mlp = mlp
        torch.manual_seed(9)
        self.branch = nn.Linear(like.shape[-1], like.shape[-1]).to(like)

    def forward(self, hidden):
        return self.mlp(hidden) + self.branch(hidden)


@around_mlp(of=ALL, weight=0.5)
class Smoother(Adapter):
    """Mixes each token with the one before it in its row."""

    def forward(self, hidden):
        before = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        return self.mlp(hidden) + 0.3 * self.branch(before)


@around_mlp(of=ALL, weight=0.5)
class CenteredBatch(Adapter):
    """Subtracts the mean of all tokens of a batch."""

    def forward(self, hidden):
        return self.mlp(hidden - hidden.mean((0, 1)))


@on_model()
def own_forward(model):
    """Replaces the forward of the model by one that changes its tokens."""
    inner = base_of(model)
    stock = inner.forward

    def forward(input_ids=None, **given):
        return stock(input_ids=shifted_ids(input_ids), **given)

    inner.forward = forward


@on_model(of=("trainer",))
def own_loss_function(model):
    """Gives the model a loss of its user's."""

    def loss(logits, labels, vocab_size, num_items_in_batch=None, **given):
        targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        each = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        each = each * (1 - (-each).exp())
        items = num_items_in_batch
        return each.sum() / (items if items is not None else (targets != -100).sum())

    base_of(model).loss_function = loss


# ---- on gradients


def _trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@on_model(of=ALL)
def gradients_scaled(model):
    for parameter in _trained(model):
        parameter.register_hook(lambda gradient: gradient * 0.5)


@on_model(of=ALL)
def gradients_masked(model):
    parameter = _trained(model)[0]
    mask = (torch.arange(parameter.numel()) % 3 > 0).view_as(parameter)
    parameter.register_hook(lambda gradient: gradient * mask)


@on_model(of=ALL, weight=0.7)
def gradients_clamped(model):
    for parameter in _trained(model):
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))


@on_model(of=ALL, weight=0.7)
def clamped_after_accumulation(model):
    def clamp(parameter):
        parameter.grad.clamp_(-1e-4, 1e-4)

    for parameter in _trained(model):
        parameter.register_post_accumulate_grad_hook(clamp)


@on_model(of=ALL, weight=0.7)
def scaled_after_accumulation(model):
    def scale(parameter):
        parameter.grad.mul_(0.5)

    for parameter in _trained(model):
        parameter.register_post_accumulate_grad_hook(scale)
