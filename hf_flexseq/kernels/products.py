"""Matrix products of 16-bit factors, made and added up in float32.

A product that is rounded to 16 bits before it is added to others costs a sum most of its digits,
and a converted copy of itself. Where the sum is wider than the factors,

    CUDA         cuBLAS multiplies 16-bit factors into the float32 sum itself (torch's
                 `out_dtype`): neither factors nor product are copied
    elsewhere    torch has no such product: the factors are widened first, which copies both of
                 them, and their product is added to the sum without a copy of its own

Factors of the sum's own dtype are multiplied into it everywhere.
"""

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of products: float32 for 16-bit factors, else their own."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def factor_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that factors of `dtype` are multiplied in on `device`, to be added up in
    `sum_dtype(dtype)`. Those who use a factor often widen it once."""
    return dtype if device.type == "cuda" else sum_dtype(dtype)


def mm_into(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Set total [m, n] to a [m, k] @ b [k, n], and return it."""
    if _multiplies_into(a, total):
        return torch.mm(a, b, out_dtype=total.dtype, out=total)
    return torch.mm(a.to(total.dtype), b.to(total.dtype), out=total)


def addmm_into(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add a [m, k] @ b [k, n] to total [m, n], and return it."""
    if _multiplies_into(a, total):
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    return total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _multiplies_into(factor: torch.Tensor, total: torch.Tensor) -> bool:
    """Return whether the device multiplies 16-bit `factor`s into the float32 `total`."""
    is_wider = factor.dtype.itemsize == 2 and total.dtype == torch.float32
    return is_wider and factor.device.type == "cuda"
