"""bfloat16 in interpreted kernels is that of torch, which rounds as a GPU does."""

import pytest
import torch

from tests.kernels.interpreter import real_bfloat16

pytestmark = pytest.mark.kernels
triton = pytest.importorskip("triton", reason="Triton has wheels for Linux only")
tl = triton.language


@triton.jit
def arithmetic(x, y, sums, products, quotients, larger, dots, rounded, total):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = rows * 16 + columns
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(sums + at, a + b)
    tl.store(products + at, tl.where(rows < columns, a * b, -a))
    tl.store(quotients + at, a / b)
    tl.store(larger + at, a > b)
    tl.store(total, tl.sum(a * 3.0))
    dot = tl.dot(a, b)
    tl.store(dots + at, dot)
    tl.store(rounded + at, dot.to(tl.bfloat16))


def test_bfloat16_is_torchs(monkeypatch):
    real_bfloat16(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    total = torch.empty(1).bfloat16()
    sums, products, rounded = (torch.empty_like(x) for _ in range(3))
    quotients, larger, dots = torch.empty(16, 16), torch.empty(16, 16), torch.empty(16, 16)
    arithmetic[(1,)](x, y, sums, products, quotients, larger, dots, rounded, total)
    above = torch.ones(16, 16).triu(1).bool()
    assert torch.equal(sums, x + y)
    assert torch.equal(products, torch.where(above, x * y, -x))
    assert torch.equal(quotients, x.float() / y.float())
    assert torch.equal(larger, (x > y).float())
    assert torch.equal(total, (x * 3).sum(dtype=torch.float32).bfloat16()[None])
    torch.testing.assert_close(dots, x.float() @ y.float(), rtol=0, atol=1e-5)
    assert torch.equal(rounded, dots.bfloat16())
