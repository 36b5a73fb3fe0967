"""A launch of FlashAttention on packed sequences, as all its builds are asked for one: what they
refuse is refused, and the reference computes it."""

from typing import NamedTuple

import torch

from hf_flexseq.kernels import KernelCall
from hf_flexseq.kernels.segments import Segments
from tests.kernels.reference import Reference


class Launch(NamedTuple):
    """What describes a launch beside its tensors."""

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    causal: bool
    scale: float
    before: int
    after: int
    softcap: float = 0.0

    def call(self, q, k, v):
        """The call that this is a launch of, after the checks that all builds have."""
        assert self.cu_q.dtype == self.cu_k.dtype == torch.int32
        assert self.cu_q.is_contiguous()
        assert self.cu_k.is_contiguous()
        assert q.stride(-1) == k.stride(-1) == 1
        assert q.shape[2] % 8 == 0
        assert self.cu_q.numel() > 1
        q_lens, k_lens = self.cu_q.diff().tolist(), self.cu_k.diff().tolist()
        assert self.max_q >= max(q_lens), "the bound on queries is too low"
        assert self.max_k == max(k_lens) > 0, "the bound on keys is wrong, or the launch empty"
        # A window reaches back from a query, and not beyond it.
        sizes = self.before, self.after
        assert sizes == (-1, -1) or (self.causal and self.before >= 0 == self.after)
        window = None if self.before == -1 else self.before + 1
        segments = Segments(q_lens, k_lens, causal=self.causal, device=q.device, window=window)
        return KernelCall(q, k, v, segments, self.scale, self.softcap or None)


def flash2_forward(q, k, v, launch):
    call = launch.call(q, k, v)
    if launch.max_q == 1 and q.shape[1] > k.shape[1]:
        assert q.shape[0] == len(call.segments.q_lens), (
            "the path for decoding needs exactly one query per sequence"
        )
    out, lse = Reference().forward(call)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)
