import pytest
import torch
from torch.nn import functional

from hf_flexseq.kernels import convolution
from hf_flexseq.kernels.convolution import causal_convolution_of_rows


def conv1d(x, weight, bias):
    """[tokens, channels] -> [tokens, channels] by torch."""
    tokens, channels = x.shape
    width = weight.shape[1]
    out = functional.conv1d(
        x.t().unsqueeze(0), weight.unsqueeze(1), bias, padding=width - 1, groups=channels
    )
    return out[0, :, :tokens].t()


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_a_convolution_of_rows_is_torchs(width, monkeypatch):
    monkeypatch.setitem(convolution.BLOCK_ROWS, "cpu", 4)
    for tokens in (1, 2, 3, 4, 5, 9, 17):
        generator = torch.Generator().manual_seed(tokens)
        options = {"dtype": torch.float64, "generator": generator}
        x, grad = (torch.randn(tokens, 3, **options) for _ in range(2))
        weight, bias = torch.randn(3, width, **options), torch.randn(3, **options)
        for inputs in ([x, weight, bias], [x, weight]):
            results = []
            for convolve in (causal_convolution_of_rows, conv1d):
                leaves = [one.clone().requires_grad_() for one in inputs]
                out = convolve(*leaves, *[None] * (3 - len(leaves)))
                results.append((out, *torch.autograd.grad(out, leaves, grad)))
            for ours, theirs in zip(*results, strict=True):
                assert (ours - theirs).abs().max() <= 1e-13


def test_sums_of_16_bit_rows_are_taken_in_float32():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator).bfloat16()
    weight = torch.randn(8, 4, generator=generator).bfloat16()
    exact = causal_convolution_of_rows(x.double(), weight.double(), None)
    out = causal_convolution_of_rows(x, weight, None)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.to(torch.bfloat16)) or (
        (out.double() - exact).abs().max() <= exact.abs().max() * 2**-8
    )
