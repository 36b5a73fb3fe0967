"""CUDA attention kernels: their errors against float32, and their seconds.

Errors: every kernel that serves the device, in bfloat16, forward and backward, against the plain
float32 softmax. Its largest error may be twice that of the same softmax written plainly in
bfloat16.

Seconds: the same kernels on packs of sequences, and the other FlashAttentions that torch knows,
where they are installed. `activate_flash_attention_impl` puts one of those behind the very
operators that the kernel `torch_varlen` calls.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from gpu_checks.report import Section, Setting, table, verdict
from hf_flexseq.kernels import Kernel, KernelCall, cudnn_long
from hf_flexseq.kernels.capabilities import CallKind
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from tests.kernels.reference import Reference

HEADS, KV_HEADS, HEAD_DIM, SCALE = 8, 2, 128, 128**-0.5


class Case(NamedTuple):
    """A packed call."""

    q_lens: list[int]
    """Queries of each sequence."""
    k_lens: list[int]
    """Keys of each sequence."""
    causal: bool
    window: int | None = None
    softcap: float | None = None


LENGTHS = [1, 0, 17, 1021, 128, 64, 2053]
HALOED = [n + 300 for n in LENGTHS]  # with keys that no query reads within a window of 130
CASES = {
    "causal": Case(LENGTHS, LENGTHS, True),
    "causal, with earlier keys": Case(LENGTHS, [n + 100 for n in LENGTHS], True),
    "rectangles, some without queries or keys": Case(LENGTHS, [5, 33, 0, 509, 4096, 1, 0], False),
    "one query at most": Case([1, 0, 1], [300, 7, 64], False),
    "window of 130": Case(LENGTHS, LENGTHS, True, window=130),
    "window of 130, with keys that none reads": Case(LENGTHS, HALOED, True, window=130),
    "window of 1": Case(LENGTHS, LENGTHS, True, window=1),
    "softcap": Case(LENGTHS, LENGTHS, True, softcap=2.0),
    "softcap, window of 130": Case(LENGTHS, HALOED, True, window=130, softcap=2.0),
}
SHORT_CASES = {  # in a rehearsal
    "causal": Case([1, 0, 61], [1, 0, 61], True),
    "rectangles": Case([5, 0, 9], [0, 7, 33], False),
    "window": Case([1, 0, 61], [1, 0, 70], True, window=10),
    "softcap, window": Case([1, 0, 61], [1, 0, 70], True, window=10, softcap=2.0),
}
TENSORS = ("out", "dq", "dk", "dv")

# Packs that are timed: so many sequences of so many tokens.
PACKS = ((1, 32768), (16, 2048), (256, 128))
SHORT_PACKS = ((1, 64), (4, 16))
TIMED_HEADS, TIMED_KV_HEADS = 32, 8
ROUNDS = 5
FORWARD_FLOPS = 4  # of a pair of a query and a key, per head and element
BACKWARD_FLOPS = 10

# FlashAttentions that torch can put behind its operators, and the packages they come from.
OTHERS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}


def kernel_errors_section(setting: Setting) -> Section:
    """Compare every kernel of the device with the truth, and cuDNN with another kernel."""
    section = errors_of(setting.device, SHORT_CASES if setting.rehearse else CASES)
    device = setting.device
    if device.type != "cuda":
        return section
    heads = cudnn_long.Heads(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16)
    other = TorchVarlen()
    takes = cudnn_long.is_verified(heads, device, (other.launch_forward, other.launch_backward))
    line = "computes the same" if takes else "does not, or cannot run: it is not used"
    return replace(section, lines=(*section.lines, "", f"cuDNN on long sequences {line}."))


def errors_of(device: torch.device, cases: dict[str, Case]) -> Section:
    """Return a table of the errors of every kernel of the device, by case.

    cases: by name. A kernel that a case needs too much of is not run on it, and says so.
    """
    rows = []
    holds = True
    for kernel in CANDIDATES[device.type]:
        refusal = kernel.reason_unsupported(CallKind(device, torch.bfloat16, HEAD_DIM))
        if refusal:
            rows.append([kernel.name, f"not run: {refusal}"])
            continue
        for name, case in cases.items():
            calls = CallKind(
                device,
                torch.bfloat16,
                HEAD_DIM,
                window=case.window is not None,
                softcap=case.softcap is not None,
            )
            refusal = kernel.reason_unsupported(calls)
            if refusal:
                rows.append([kernel.name, name, f"not run: {refusal}"])
                continue
            segments = Segments(
                case.q_lens, case.k_lens, causal=case.causal, device=device, window=case.window
            )
            errors, is_close = kernel_errors(kernel, segments, case.softcap)
            cells = [f"{mine:.1e} ({plain:.1e})" for mine, plain in errors]
            rows.append([kernel.name, name, *cells, verdict(is_close)])
            holds = holds and is_close
    return Section(
        title="Attention kernels in bfloat16: largest error against float32 (of a plain bfloat16 "
        "softmax)",
        lines=table(["kernel", "case", *TENSORS, ""], rows),
        holds=holds,
    )


def kernel_errors(
    kernel: Kernel, segments: Segments, softcap: float | None = None
) -> tuple[list[tuple[float, float]], bool]:
    """Return (error of kernel, error of plain softmax) for each of `TENSORS`, and a verdict.

    The verdict is True when every error of the kernel is within its bound.
    """
    make = torch.Generator(segments.device).manual_seed(0)
    q = _normal((segments.total_q, HEADS, HEAD_DIM), make)  # [tokens, heads, head_dim]
    dout = _normal((segments.total_q, HEADS, HEAD_DIM), make)
    k = _normal((segments.total_k, KV_HEADS, HEAD_DIM), make)
    v = _normal((segments.total_k, KV_HEADS, HEAD_DIM), make)
    out, lse, *grads = _run(kernel, q, k, v, dout, segments, softcap)
    true_out, true_lse, *true_grads = _run(
        Reference(), *(x.float() for x in (q, k, v, dout)), segments, softcap
    )
    errors = []
    for mine, plain, true in zip(
        (out, *grads),
        plain_softmax(q, k, v, dout, segments, softcap),
        (true_out, *true_grads),
        strict=True,
    ):
        errors.append((_error(mine, true), _error(plain, true)))
    # The log-sum-exp is float32 in both, so it only differs by the order of its sums; -inf must be
    # where it should.
    lse_agrees = torch.allclose(lse, true_lse, rtol=1e-4, atol=1e-4)
    return errors, lse_agrees and all(error <= 2 * bound for error, bound in errors)


def plain_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    segments: Segments,
    softcap: float | None = None,
) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of softmax attention in the dtype of its inputs, by autograd.

    q and dout [tokens, heads, head_dim], k and v [keys, kv_heads, head_dim]; the results have the
    shapes of q, q, k and v.
    """
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    lq = leaves[0]
    lk = leaves[1].repeat_interleave(HEADS // KV_HEADS, 1)  # [keys, heads, head_dim]
    lv = leaves[2].repeat_interleave(HEADS // KV_HEADS, 1)
    out = torch.zeros_like(q)
    for rows, keys in segments.blocks():
        scores = torch.einsum("nhd,mhd->hnm", lq[rows], lk[keys]) * SCALE  # [heads, n, m]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if segments.causal:
            earlier = scores.shape[2] - scores.shape[1]  # keys in front of the first query
            everywhere = torch.ones_like(scores[0], dtype=torch.bool)  # [n, m]
            hidden = everywhere.triu(1 + earlier)
            if segments.window is not None:
                hidden |= everywhere.tril(earlier - segments.window)
            scores = scores.masked_fill(hidden, -torch.inf)
        out[rows] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), lv[keys])
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def _run(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    segments: Segments,
    softcap: float | None,
) -> tuple[torch.Tensor, ...]:
    """Return out, lse, dq, dk, dv of a kernel, in its shapes."""
    call = KernelCall(q, k, v, segments, SCALE, softcap)
    out, lse = kernel.forward(call)
    gradients = kernel.backward(call, dout, out, lse)
    return out, lse, *gradients


def _normal(shape: tuple[int, ...], make: torch.Generator) -> torch.Tensor:
    """Return normal numbers in bfloat16, of this shape."""
    return torch.randn(shape, generator=make, device=make.device).to(torch.bfloat16)


def _error(got: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape."""
    return (got.float() - true).abs().max().item()


# ---- seconds


def kernel_seconds_section(setting: Setting) -> Section:
    """Time every kernel that is installed, on some packs of sequences."""
    device = setting.device
    packs = SHORT_PACKS if setting.rehearse else PACKS
    columns = ["kernel", *(f"{count} x {tokens:,}" for count, tokens in packs)]
    rows: list[list[str]] = []
    for kernel in CANDIDATES[device.type]:
        refusal = kernel.reason_unsupported(CallKind(device, torch.bfloat16, HEAD_DIM))
        if refusal:
            rows.append([kernel.name, f"not run: {refusal}"])
        else:
            rows.append([kernel.name, *_speeds(kernel, device, packs)])
    for name, package in OTHERS.items():
        refusal = _reason_not_timed(package, device)
        if refusal:
            rows.append([name, f"not run: {refusal}"])
            continue
        with _activated(name):
            rows.append([name, *_speeds(TorchVarlen(), device, packs)])
    return Section(
        title=f"Attention kernels in bfloat16: TFLOP/s forward / backward, {TIMED_HEADS} heads of "
        f"{HEAD_DIM} that share {TIMED_KV_HEADS}, causal",
        lines=table(columns, rows),
    )


class Pack(NamedTuple):
    """Sequences of one length, in one call."""

    sequences: int
    tokens: int
    """Of each sequence."""


def _speeds(kernel: Kernel, device: torch.device, packs: tuple[tuple[int, int], ...]) -> list[str]:
    """Return "forward / backward" in TFLOP/s for each pack."""
    cells = []
    for pack in packs:
        forward, backward = _teraflops(kernel, device, Pack(*pack))
        cells.append(f"{forward:.3g} / {backward:.3g}")
    return cells


def _teraflops(kernel: Kernel, device: torch.device, pack: Pack) -> tuple[float, float]:
    """Return the TFLOP/s of a kernel's forward and of its backward."""
    make = torch.Generator(device).manual_seed(0)
    rows = pack.sequences * pack.tokens
    q = _normal((rows, TIMED_HEADS, HEAD_DIM), make)  # [tokens, heads, head_dim]
    dout = _normal((rows, TIMED_HEADS, HEAD_DIM), make)
    k = _normal((rows, TIMED_KV_HEADS, HEAD_DIM), make)  # [tokens, kv_heads, head_dim]
    v = _normal((rows, TIMED_KV_HEADS, HEAD_DIM), make)
    lengths = [pack.tokens] * pack.sequences
    segments = Segments(lengths, lengths, causal=True, device=device)
    call = KernelCall(q, k, v, segments, SCALE)
    out, lse = kernel.forward(call)
    pairs = pack.sequences * pack.tokens * (pack.tokens + 1) / 2
    numbers = pairs * TIMED_HEADS * HEAD_DIM / 1e12
    forward_s = median_s(lambda: kernel.forward(call), device)
    backward_s = median_s(lambda: kernel.backward(call, dout, out, lse), device)
    return FORWARD_FLOPS * numbers / forward_s, BACKWARD_FLOPS * numbers / backward_s


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a run on the device, after one that does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reason_not_timed(package: str, device: torch.device) -> str | None:
    """Say why another FlashAttention cannot be timed; None when it can."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    parent = package.split(".")[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return None


@contextmanager
def _activated(name: str) -> Iterator[None]:
    """Put another FlashAttention behind torch's operators, for a block."""
    activate_flash_attention_impl(name)
    try:
        yield
    finally:
        restore_flash_attention_impl()
