"""An MLP in tiles has the result and the gradients of one in a piece, and holds less at once."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_flexseq.memory.tiles import TokenWise, in_tiles
from tests.pipeline.live_bytes import LiveBytes

HIDDEN, WIDE, TOKENS = 8, 12, 17


class Gated(nn.Module):
    """SwiGLU, or GeGLU with another activation; `gate_up` of both in one may have a bias."""

    def __init__(self, activation=nn.functional.silu, *, bias=False, hidden=HIDDEN, wide=WIDE):
        super().__init__()
        self.activation = activation
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=bias)
        self.down = nn.Linear(wide, hidden, bias=bias)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class TwoLayers(nn.Module):
    """As in OPT and GPT-NeoX."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


def with_lora():
    config = LoraConfig(r=2, target_modules=["gate_up", "down"], init_lora_weights=False)
    return inject_adapter_in_model(config, Gated())


KINDS = {
    "SwiGLU": Gated,
    "GeGLU with bias": lambda: Gated(nn.functional.gelu, bias=True),
    "two layers": TwoLayers,
    "LoRA": with_lora,
}


def made(kind, dtype=torch.float64):
    torch.manual_seed(0)
    return KINDS[kind]().to(dtype)


def trained(mlp):
    return [parameter for parameter in mlp.parameters() if parameter.requires_grad]


def tiled(mlp, tiles):
    """What computes it in tiles."""
    function = TokenWise(mlp.forward, lambda: trained(mlp))
    return lambda hidden: in_tiles(function, hidden, tiles)


def numbers(shape=(1, TOKENS, HIDDEN), dtype=torch.float64, seed=1):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def run(compute, mlp, hidden, needs_input=True):
    """The result, and the gradients of the input and of all weights."""
    mlp.zero_grad()
    leaf = hidden.detach().requires_grad_(needs_input)
    result = compute(leaf)
    result.backward(numbers(hidden.shape, hidden.dtype, seed=2).to(result.dtype))
    return [result.detach(), leaf.grad, *(parameter.grad for parameter in mlp.parameters())]


def worst(found, wanted):
    """The largest relative error; None stands for no gradient on both sides."""
    assert [x is None for x in found] == [x is None for x in wanted]
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs)
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)


SHAPES = [(1, TOKENS, HIDDEN), (TOKENS, HIDDEN), (2, 3, HIDDEN), (1, 1, HIDDEN)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_change_nothing(kind, shape):
    mlp, hidden = made(kind), numbers(shape)
    wanted = run(mlp, mlp, hidden)
    for tiles in (1, 2, 5, shape[-2], 64):
        assert worst(run(tiled(mlp, tiles), mlp, hidden), wanted) < 1e-14


def test_a_rank_may_have_no_token():
    mlp, hidden = made("SwiGLU"), numbers((1, 0, HIDDEN))
    for a, b in zip(run(tiled(mlp, 8), mlp, hidden), run(mlp, mlp, hidden), strict=True):
        assert torch.equal(a, b)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_frozen_weights_cost_no_product(is_frozen):
    mlp = made("SwiGLU").requires_grad_(not is_frozen)
    result = tiled(mlp, 4)(numbers().requires_grad_())
    with Products() as products:
        result.sum().backward()
    # of each tile: those of the forward, for the gradient, for those of the weights
    assert products.count == 4 * (2 + 2 + (0 if is_frozen else 2))
    assert all((parameter.grad is None) == is_frozen for parameter in mlp.parameters())


# ---- arithmetic


def test_sums_over_tiles_are_in_float32_and_rounded_once():
    """In bfloat16 a sum of ones stops at 256."""
    tiles = 512
    mlp = nn.Linear(1, 1, bias=False).bfloat16()
    ones = torch.ones(tiles, 1, dtype=torch.bfloat16)
    tiled(mlp, tiles)(ones).backward(ones)
    assert mlp.weight.grad.dtype == torch.bfloat16
    assert mlp.weight.grad.item() == tiles


def test_tiles_run_under_the_autocast_of_the_forward():
    mlp, hidden = made("GeGLU with bias", torch.float32), numbers(dtype=torch.float32)
    seen = []

    def under_autocast(compute):
        def forward(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return compute(x)

        return forward

    wanted = run(under_autocast(mlp), mlp, hidden)
    mlp.down.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    found = run(under_autocast(tiled(mlp, 3)), mlp, hidden)
    assert seen == 6 * [torch.bfloat16]
    assert found[0].dtype == torch.bfloat16
    assert worst(found, wanted) < 1e-2


def test_no_weight_loses_its_graph_to_a_cast_of_a_tile():
    """Autocast keeps the casts of weights that it makes, also those that have no graph."""
    mlp, hidden = made("SwiGLU", torch.float32), numbers(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tiled(mlp, 3)(hidden)
        result = mlp(hidden)
    result.float().sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())


# ---- under checkpointing


def test_the_replay_of_a_layer_does_not_run_the_mlp():
    """Its input is all that is saved of it, and is saved before it runs."""
    mlp, hidden = made("SwiGLU"), numbers()

    def layer(x):
        return x + tiled(mlp, 4)(x.sin())

    wanted = run(lambda x: x + mlp(x.sin()), mlp, hidden)
    mlp.calls = 0
    found = run(lambda x: checkpoint(layer, x, use_reentrant=False), mlp, hidden)
    assert mlp.calls == 4 + 4
    assert worst(found, wanted) < 1e-14


# ---- memory


def test_what_is_inside_exists_for_one_tile_at_a_time():
    """Beside input, result, their gradients and those of weights, all of which exist anyway."""
    mlp = Gated(hidden=4, wide=256).double()
    hidden = numbers((1, 512, 4))
    inside = {tiles: peak(tiled(mlp, tiles) if tiles else mlp, mlp, hidden) for tiles in (0, 1, 8)}
    outside = 3 * hidden.nbytes + 2 * sum(p.nbytes for p in trained(mlp))
    assert outside < inside[0] / 16
    assert inside[1] == pytest.approx(inside[0], rel=0.05)
    assert inside[8] - outside == pytest.approx(inside[0] / 8, rel=0.05)


def peak(compute, mlp, hidden):
    mlp.zero_grad()
    leaf = hidden.detach().requires_grad_()
    with LiveBytes() as live:
        compute(leaf).sum().backward()
    return live.peak
