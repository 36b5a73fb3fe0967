"""Weight gradients that are put off."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_flexseq.pipeline.weights import WeightGradients


def layer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def wanted(x):
    module = layer()
    module(x).square().sum().backward()
    return gradients(module)


@pytest.fixture
def x():
    return torch.randn(1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_at_once_they_are_those_of_the_plain_layer(x):
    module = layer()
    WeightGradients([module])
    module(x).square().sum().backward()
    torch.testing.assert_close(gradients(module), wanted(x), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("replayed", [False, True])
def test_deferred_they_come_with_run_and_add_up(x, replayed):
    module = layer()
    store = WeightGradients([module])
    calls = []
    module[1].register_forward_hook(lambda *_: calls.append(1))
    for chunk in range(2):
        loss = (
            (checkpoint(module, x, use_reentrant=False) if replayed else module(x)).square().sum()
        )
        with store.deferred(chunk):
            loss.backward()
    assert all(g is None for g in gradients(module).values())
    assert len(calls) == (4 if replayed else 2), "a layer was replayed more than once"
    for chunk in range(2):
        store.run(chunk)
    store.check_empty()
    twice = {name: 2 * g for name, g in wanted(x).items()}
    torch.testing.assert_close(gradients(module), twice, rtol=1e-14, atol=1e-14)
    assert not any(g.requires_grad for g in gradients(module).values()), (
        "a gradient holds the forward's graph"
    )


def test_under_autocast_they_are_as_good_as_the_plain_layers(x):
    module, plain = layer().float(), layer().float()
    store = WeightGradients([module])
    with torch.autocast("cpu", torch.bfloat16):
        losses = [m(x.float()).square().sum() for m in (module, plain)]
    with store.deferred(0):
        losses[0].backward()
    store.run(0)
    losses[1].backward()
    torch.testing.assert_close(gradients(module), gradients(plain), rtol=2e-2, atol=2e-2)
    assert all(g.dtype == torch.float32 for g in gradients(module).values())


def test_frozen_weights_leave_nothing(x):
    module = layer()
    module[0].requires_grad_(False)
    store = WeightGradients([module])
    loss = module(x).square().sum()
    with store.deferred(0):
        loss.backward()
    store.run(0)
    assert module[0].weight.grad is None
    torch.testing.assert_close(
        module[2].weight.grad, wanted(x)["2.weight"], rtol=1e-14, atol=1e-14
    )


def test_a_wrong_order_is_noticed(x):
    module = layer()
    store = WeightGradients([module])
    with pytest.raises(AssertionError, match="before its input gradient, or twice"):
        store.run(0)
    loss = module(x).square().sum()
    with store.deferred(0):
        loss.backward()
    with pytest.raises(AssertionError, match=r"weight gradients of \[0\] were never added"):
        store.check_empty()


def test_detached_the_layers_are_as_before(x):
    module = layer()
    WeightGradients([module]).detach()
    assert "forward" not in vars(module[0])
