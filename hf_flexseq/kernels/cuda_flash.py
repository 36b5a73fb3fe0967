"""The common part of FlashAttention's CUDA builds: their guarantees, and their behaviour where a
sequence has no queries or no keys.

FlashAttention-2 (arXiv 2307.08691), as the flash-attn package and torch build it:

* it refuses an empty launch, so a call in which no query has a key is answered here;
* it reports +inf instead of -inf as the log-sum-exp of a query without keys, which is mended;
* when no sequence has more than one query it takes a path for decoding that assumes exactly one
  query in each, which empty sequences break; a bound of two (it is only a bound) keeps it on the
  general path;
* a window of w keys is w - 1 keys before a query's own and 0 after it, aligned with the last key
  as `causal` is, in forward and backward; a softcap of 0 means that there is no softcap;
* its backward adds dq up in any order over tiles of 64 to 128 keys (32 for head sizes above 192 on
  GPUs with little shared memory). Two terms on a zero give the same bits in any order, so the
  backward of up to 128 keys is deterministic.

FlashAttention-3 (arXiv 2407.08608), the same code behind the flash_attn_3 operators and behind
torch's registry, not run on a GPU yet:

* Hopper only, for torch's registry refuses every other generation;
* a query without keys gets -inf, in a launch without any key +inf; that launch is answered here;
* its backward adds dk and dv up over the query heads that share a key head in any order, so no
  number of keys is deterministic by itself; its deterministic mode has no head sizes above 192.
"""

import abc
from collections.abc import Iterable

import torch

from hf_flexseq.kernels import KernelCall, cudnn_long, lse_dtype
from hf_flexseq.kernels.capabilities import KernelCapabilities
from hf_flexseq.kernels.cudnn_long import GENERATION, Heads
from hf_flexseq.kernels.segments import Segments

FLASH2 = KernelCapabilities(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float16),
    oldest=8,
    most_head_dim=256,
    head_dim_step=8,
    keyless_lse=torch.inf,
    wide_gradients=False,
    softcap=True,
)
FLASH3 = KernelCapabilities(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float16),
    oldest=9,
    newest=9,
    most_head_dim=256,
    head_dim_step=8,
    wide_gradients=False,
    softcap=True,
)
FLASH4_PROBLEM = (
    "the releases of FlashAttention-4 differ in what their forward returns and in whether they "
    "bear sequences without queries or keys"
)


class CudaFlash(abc.ABC):
    """A build of FlashAttention. Which one, its two launches say."""

    name: str
    wide_gradients = False

    @property
    @abc.abstractmethod
    def capabilities(self) -> KernelCapabilities:
        """Capabilities for every call that it serves."""

    @abc.abstractmethod
    def launch_forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a call with work and contiguous rows -> out [Tq, H, D], lse [H, Tq]."""

    @abc.abstractmethod
    def launch_backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Launch the backward of such a call -> dq [Tq, H, D], dk and dv [Tk, Hkv, D]."""

    def __init__(self) -> None:
        self._cudnn_heads: set[Heads] = set()  # whose long sequences are left to cuDNN

    def try_cudnn(self, kinds: Iterable[Heads], device: torch.device) -> None:
        """Leave long sequences of some kinds of heads to cuDNN from now on, where it is faster on
        this device and computes the same. It takes about a second for each kind that is new."""
        if self.capabilities.newest == GENERATION:
            return  # FlashAttention-3 is as fast
        launches = (self.launch_forward, self.launch_backward)
        for heads in kinds:
            if cudnn_long.is_verified(heads, device, launches):
                self._cudnn_heads.add(heads)

    def forward(self, call: KernelCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`: -> out [Tq, H, D], lse [H, Tq]."""
        call.check()
        if not call.segments.has_work():
            return _nothing_to_read(call.q)
        call = _rows_contiguous(call)
        long = self._left_to_cudnn(call)
        if not long:
            out, lse = self.launch_forward(call)
            return out, _checked_lse(lse, call, self.capabilities)
        if len(call.segments.q_lens) == 1:
            return cudnn_long.forward(call)
        out = call.q.new_empty(call.q.shape)
        lse = out.new_empty((out.shape[1], out.shape[0]), dtype=lse_dtype(out.dtype))
        for rows, keys, segments in call.segments.apart(long):
            out[rows], lse[:, rows] = self.forward(call.part(rows, keys, segments))
        return out, lse

    def backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `Kernel.backward`: dout and out [Tq, H, D], lse [H, Tq] -> dq [Tq, H, D], dk and dv
        [Tk, Hkv, D].

        Deterministic under `torch.use_deterministic_algorithms(True)`.
        """
        call.check()
        if not call.segments.has_work():
            return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)
        call = _rows_contiguous(call)
        dout, out = rows_contiguous(dout), rows_contiguous(out)
        long = self._left_to_cudnn(call)
        if not long:
            return self.launch_backward(call, dout, out, lse.contiguous())
        if len(call.segments.q_lens) == 1:
            return cudnn_long.backward(call, dout, out, lse)
        dq, dk, dv = (x.new_empty(x.shape) for x in (call.q, call.k, call.v))
        for rows, keys, segments in call.segments.apart(long):
            dq[rows], dk[keys], dv[keys] = self.backward(
                call.part(rows, keys, segments), dout[rows], out[rows], lse[:, rows]
            )
        return dq, dk, dv

    def _left_to_cudnn(self, call: KernelCall) -> int:
        """Return how many sequences at the beginning of a call are left to cuDNN."""
        if self.capabilities.newest == GENERATION:  # it may have become active in torch since
            return 0
        if cudnn_long.heads_of(call) not in self._cudnn_heads:
            return 0
        return cudnn_long.long_sequences(call)


class FlashPackage(CudaFlash):
    """A build in a package of its own, which writes gradients into given tensors."""

    capabilities: KernelCapabilities

    def launch_backward(
        self, call: KernelCall, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `CudaFlash.launch_backward`."""
        q, k, v = call.q, call.k, call.v
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))  # contiguous
        options = self.launch_options(call) | {
            "deterministic": torch.are_deterministic_algorithms_enabled()
        }
        self.call_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options)
        return dq, dk, dv

    @abc.abstractmethod
    def call_backward(self, *tensors: torch.Tensor, **options: object) -> None:
        """Call the package's backward with dout, q, k, v, out, lse and options by name."""

    @abc.abstractmethod
    def launch_options(self, call: KernelCall) -> dict[str, object]:
        """Return the arguments that forward and backward share, by the package's names."""


def shared_options(call: KernelCall) -> dict[str, object]:
    """Return the arguments of a launch that both packages have, by the names they give them."""
    segments = call.segments
    before, after = window_sizes(segments)
    return {
        "cu_seqlens_q": segments.cu_seqlens_q,
        "cu_seqlens_k": segments.cu_seqlens_k,
        "max_seqlen_k": segments.max_k,
        "softmax_scale": call.scale,
        "window_size_left": before,
        "window_size_right": after,
        "softcap": call.softcap or 0.0,
    }


def window_sizes(segments: Segments) -> tuple[int, int]:
    """Return how many keys a query reads before and after its own, as the packages want them: -1
    is any number. `causal` hides later keys by itself, and where there is a window both do."""
    if segments.window is None:
        return -1, -1
    return segments.window - 1, 0


def query_bound(segments: Segments) -> int:
    """Return FlashAttention-2's bound on queries per sequence, never 1: see the module."""
    return max(segments.max_q, 2)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, D] with D contiguous; kernels take any other strides."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


def _rows_contiguous(call: KernelCall) -> KernelCall:
    """Return a call with `rows_contiguous` tensors."""
    q, k, v = (rows_contiguous(x) for x in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v)


def _nothing_to_read(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [Tq, H, D] and lse [H, Tq] for q [Tq, H, D] when no query has a key."""
    tokens, heads, _ = q.shape
    lse = q.new_full((heads, tokens), -torch.inf, dtype=lse_dtype(q.dtype))
    return torch.zeros_like(q), lse


def _checked_lse(
    lse: torch.Tensor, call: KernelCall, capabilities: KernelCapabilities
) -> torch.Tensor:
    """Return the kernel's lse [H, Tq], changed in place to -inf for queries without keys."""
    tokens, heads, _ = call.q.shape
    assert lse.shape == (heads, tokens), (
        f"the kernel's lse is {tuple(lse.shape)}, not [heads, tokens]"
    )
    if capabilities.keyless_lse != -torch.inf and call.segments.has_keyless():
        lse.masked_fill_(lse == capabilities.keyless_lse, -torch.inf)
    return lse
