"""Count the bytes of tensors without memory that operations make from tokens, while they live.

Under `LiveBytes` inside of torch's FakeTensorMode, every operation of forward and backward runs on
shapes alone. Its results are counted by storage, until the storage is gone, and views count
nothing. The number of tokens has a prime factor that no parameter has: a storage with this factor
grows with the tokens, and others, such as gradients of weights, are not counted.
`StandInKernel` replaces an attention kernel, with tensors as large as FlashAttention's, and
`stand_in_sum` replaces the chunked loss, whose logits do not grow with the tokens.

Numbers are not there to be read. Two operations that read some are answered as routing needs it,
where every expert gets its even share of the tokens: places that are not zero, and one number.
Grouped products, for which torch's shapes are of bfloat16 alone, are made here.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_flexseq.kernels import KernelCall, lse_dtype


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations make inside of the mode."""

    def __init__(self, factor: int) -> None:
        """factor: a prime of the number of tokens."""
        super().__init__()
        self.live = 0
        """Bytes that live now."""
        self._factor = factor
        self._peak = 0
        self._parts = 1  # of equal size, into which a mask of experts divides the tokens
        self._counted: dict[int, weakref.ref[Any]] = {}

    def take_peak(self) -> int:
        """Return the most bytes that have lived at once since the last call."""
        peak = self._peak
        self._peak = self.live
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the storages of its results. Raises RuntimeError for a
        parameter with memory, which would get a gradient without."""
        for one in tree_leaves(args):
            if isinstance(one, nn.Parameter) and not isinstance(one, FakeTensor):
                raise RuntimeError("a parameter is not of the copy that is counted")
        if func is torch.ops.aten.nonzero.default:
            result = self._places(args[0])
        elif func is torch.ops.aten._grouped_mm.default:
            result = _grouped_product(*args[:3])
        elif func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 0
        else:
            result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._count(one)
        return result

    def _places(self, mask: torch.Tensor) -> torch.Tensor:
        """Return as many places as are not zero in a mask of experts [E], or of the tokens of one
        expert, [k, tokens]: int64 [n, dimensions]."""
        if mask.dim() == 1:
            self._parts = mask.numel()
            return mask.new_empty(self._parts, 1, dtype=torch.int64)
        places = -(-mask.numel() // (self._parts * self._factor)) * self._factor
        return mask.new_empty(places, mask.dim(), dtype=torch.int64)

    def _count(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor until it is gone, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = storage.nbytes()
        if key in self._counted or size % self._factor:
            return

        def forget(_: Any) -> None:
            self.live -= size
            del self._counted[key]

        self._counted[key] = weakref.ref(storage, forget)
        self.live += size
        self._peak = max(self._peak, self.live)


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Return the empty product of rows by groups that end at `ends`: a [rows, x] and b [groups, x,
    y] -> [rows, y], or a [x, rows] and b [rows, y] -> [groups, x, y]."""
    if b.dim() == 3:
        return a.new_empty(*a.shape[:-1], b.shape[-1])
    assert ends is not None, "a product of matrices by groups has their ends"
    return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])


class StandInKernel:
    """An attention kernel that computes nothing, and makes tensors as large as a real one's.

    The backward of FlashAttention-2 adds the gradient of queries up in float32, and has gradients
    of keys and values for every query head until it adds up those that share one.
    """

    name = "stand-in"
    wide_gradients = False
    computes = False
    """Nor do recurrent layers in blocks of rows: their tensors for a block do not grow with the
    tokens, and take dozens of operations for every 64 of them."""

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`: -> out [Tq, H, D], lse [H, Tq]."""
        tokens, heads, _ = call.q.shape
        lse = call.q.new_empty(heads, tokens, dtype=lse_dtype(call.q.dtype))
        return torch.empty_like(call.q), lse

    def backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`: -> dq [Tq, H, D], dk and dv [Tk, Hkv, D]."""
        shape = (call.k.shape[0], call.q.shape[1], call.k.shape[2])  # keys for every query head
        work = [call.q.new_empty(call.q.shape, dtype=lse_dtype(call.q.dtype))]
        if call.k.shape[1] != call.q.shape[1]:
            work += [call.k.new_empty(shape), call.k.new_empty(shape)]
        gradients = (torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v))
        del work
        return gradients


def stand_in_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *others: Any
) -> torch.Tensor:
    """Replace `chunked_cross_entropy_sum`: hidden [T, C], weight [V, C], bias [V] -> scalar."""
    total: torch.Tensor = _Sum.apply(hidden, weight, bias)
    return total


class _Sum(torch.autograd.Function):
    """A sum whose gradients are made in the forward, as the chunked loss makes its gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor | None) -> torch.Tensor:
        """Return a scalar. inputs: hidden [T, C], weight [V, C], bias [V] or None."""
        gradients = []
        for one, is_needed in zip(inputs, ctx.needs_input_grad, strict=True):
            gradients.append(torch.empty_like(one) if is_needed and one is not None else None)
        ctx.save_for_backward(*gradients)
        hidden = inputs[0]
        assert hidden is not None, "a head has hidden states"
        return hidden.new_empty(hidden.shape[0], dtype=lse_dtype(hidden.dtype)).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs."""
        return tuple(ctx.saved_tensors)
