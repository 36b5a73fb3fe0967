"""Packed causal attention by cuDNN's own front end, forward and backward, with its plans kept.

torch's operator for packs looked its plans up and kept none (docs/limits.md); here they are kept,
so that the kernels themselves show. Needs nvidia-cudnn-frontend, which has no requirements.
"""

from collections.abc import Callable
from typing import Any

import cudnn
import torch

from hf_flexseq.kernels import KernelCall

BF16, FLOAT = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
INT32, INT64 = cudnn.data_type.INT32, cudnn.data_type.INT64


class PackedAttention:
    """A causal call over a pack, of which both graphs are built."""

    def __init__(self, call: KernelCall, dout: torch.Tensor) -> None:
        """call: q [T, H, D], k and v [T, Hkv, D], of sequences with as many queries as keys."""
        segments = call.segments
        self._call = call
        self._sequences = len(segments.q_lens)
        self._most = 1 << (segments.max_q - 1).bit_length()
        self._cu = segments.cu_seqlens_q.to(torch.int64)
        lengths = torch.tensor(segments.q_lens, dtype=torch.int32, device=call.q.device)
        self._lengths = lengths.view(-1, 1, 1, 1)
        stream = torch.cuda.current_stream().cuda_stream
        self._handle = cudnn.create_handle()
        cudnn.set_stream(handle=self._handle, stream=stream)
        self._out, self._dout = torch.empty_like(call.q), dout
        # log-sum-exps token by token, [T, H]
        self._lse = torch.empty(call.q.shape[:2], device=call.q.device)
        self._grads = tuple(torch.empty_like(x) for x in (call.q, call.k, call.v))
        self._run_forward = self._built(is_backward=False)
        self._run_backward = self._built(is_backward=True)

    def forward(self) -> torch.Tensor:
        """Return out [T, H, D]."""
        self._run_forward()
        return self._out

    def backward(self) -> tuple[torch.Tensor, ...]:
        """Return dq [T, H, D], dk and dv [T, Hkv, D]; after a forward."""
        self._run_backward()
        return self._grads

    def _built(self, *, is_backward: bool) -> Callable[[], None]:
        """Build a graph, and return what runs it."""
        graph = cudnn.pygraph(
            io_data_type=BF16,
            intermediate_data_type=FLOAT,
            compute_data_type=FLOAT,
            handle=self._handle,
        )
        tensors: dict[int, torch.Tensor] = {}  # by the number that the graph knows them by

        def number_of(x: torch.Tensor) -> int:
            tensors[len(tensors) + 1] = x
            return len(tensors)

        def offsets(of_token: int) -> Any:
            one = (self._sequences + 1, 1, 1, 1)
            values = (self._cu * of_token).view(one)
            return graph.tensor(
                uid=number_of(values), dim=one, stride=(1, 1, 1, 1), data_type=INT64
            )

        def read(x: torch.Tensor, kind: Any = BF16) -> Any:
            shape, strides = self._layout(x)
            made = graph.tensor(uid=number_of(x), dim=shape, stride=strides, data_type=kind)
            made.set_ragged_offset(offsets(x[0].numel()))
            return made

        def written(made: Any, x: torch.Tensor, kind: Any = BF16) -> None:
            shape, strides = self._layout(x)
            made.set_uid(number_of(x)).set_output(True).set_dim(shape).set_stride(strides)
            made.set_data_type(kind).set_ragged_offset(offsets(x[0].numel()))

        q, k, v = (read(x) for x in (self._call.q, self._call.k, self._call.v))
        one = (self._sequences, 1, 1, 1)
        counts = []
        for _ in "qk":
            uid = number_of(self._lengths)
            counts.append(graph.tensor(uid=uid, dim=one, stride=(1, 1, 1, 1), data_type=INT32))
        common = {
            "attn_scale": self._call.scale,
            "use_padding_mask": True,
            "seq_len_q": counts[0],
            "seq_len_kv": counts[1],
            "diagonal_band_right_bound": 0,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
        }
        if is_backward:
            out, dout, lse = read(self._out), read(self._dout), read(self._lse, FLOAT)
            most = self._call.q.shape[0]
            grads = graph.sdpa_backward(
                q=q,
                k=k,
                v=v,
                o=out,
                dO=dout,
                stats=lse,
                max_total_seq_len_q=most,
                max_total_seq_len_kv=most,
                **common,
            )
            for made, x in zip(grads, self._grads, strict=True):
                written(made, x)
        else:
            out, lse = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **common)
            written(out, self._out)
            written(lse, self._lse, FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        size = max(graph.get_workspace_size(), 1)
        workspace = torch.empty(size, dtype=torch.uint8, device=self._out.device)
        return lambda: graph.execute(tensors, workspace, handle=self._handle)

    def _layout(self, x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return sizes [sequences, heads, most tokens, D] and strides of rows [T, heads(, D)]."""
        heads, size = x.shape[1], x[0, 0].numel()
        return (self._sequences, heads, self._most, size), (
            self._most * heads * size,
            size,
            heads * size,
            1,
        )
