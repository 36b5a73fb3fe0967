"""Products of 16-bit factors into wider sums."""

import pytest
import torch

from hf_flexseq.kernels.products import addmm_into, factor_dtype, mm_into, sum_dtype


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_many_products_are_added_up_as_exactly_as_the_sum_can_hold(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        options = {"dtype": dtype, "device": device}
        factors = [
            (torch.randn(40, 9, **options), torch.randn(40, 7, **options)) for _ in range(50)
        ]
        total = torch.empty(9, 7, dtype=sum_dtype(dtype), device=device)
        first, *others = factors
        assert mm_into(total, first[0].t(), first[1]) is total
        for a, b in others:
            assert addmm_into(total, a.t(), b) is total
        wanted = sum(a.double().t() @ b.double() for a, b in factors)
        scale = sum(a.double().abs().t() @ b.double().abs() for a, b in factors)
        assert ((total - wanted).abs() <= 4 * torch.finfo(total.dtype).eps * scale).all()


def test_only_cuda_multiplies_narrow_factors():
    assert factor_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert factor_dtype(torch.bfloat16, torch.device("cpu")) == torch.float32
    assert factor_dtype(torch.float64, torch.device("cpu")) == torch.float64
