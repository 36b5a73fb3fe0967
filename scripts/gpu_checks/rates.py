"""How fast attention kernels are on this GPU, in bfloat16.

    rates     TFLOP/s of one sequence, by heads and tokens, of every kernel that is installed and
              of cuDNN's dense operator; and of packs. Plans price them by `cost/kernels.py`.
    split     a long-tailed pack by the length from which on sequences go to cuDNN one by one: how
              the constant `LONG` of `kernels/cudnn_long.py` was chosen, or is to be
    cudnn     what a call of a length that was not seen before takes, with and without
              TORCH_CUDNN_SDPA_AVOID_RECOMPILE, each in a process of its own; and cuDNN's own front
              end on packs, if it is installed (pip install nvidia-cudnn-frontend)

Nothing is judged, but that cuDNN on packs computes what FlashAttention-2 does.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from gpu_checks.report import CUDNN_PART, Section, Setting, launch, table, this_script, verdict
from hf_flexseq.kernels import Kernel, KernelCall, cudnn_long
from hf_flexseq.kernels.capabilities import CallKind
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.cudnn_long import AVOID_RECOMPILE
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen

HEAD_DIM = 128
ROUNDS = 5
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # of a pair of a query and a key, per head and element
# FlashAttentions that torch can put behind its operators, and the packages they come from.
OTHERS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}

# (query heads, KV heads, tokens): of a rank alone, and of ranks that share heads
SINGLES = ((32, 8, 4096), (32, 8, 16384), (32, 8, 32768), (16, 4, 32768), (8, 2, 32768))
SINGLES += ((4, 1, 32768), (4, 1, 131072), (1, 1, 131072))
LONG_TAIL = (19182, 5400, 2600, 1500, 1100, 900, 700, 600, 500, 300, 250, 200, 150, 120, 100, 80)
PACKS = ((2048,) * 16, (128,) * 256, LONG_TAIL)
THRESHOLDS = (1000, 1500, 2500, 5000, 10_000, 1 << 30)  # of the long-tailed pack
NEW_LENGTHS = (3001, 3500, 9001, 12_000, 17_001, 30_000)
SHORT = {"singles": ((4, 2, 64),), "packs": ((16,) * 4,), "thresholds": (8, 1 << 30)}


class Attention(NamedTuple):
    """Inputs of a causal call, and what it computed."""

    call: KernelCall
    dout: torch.Tensor


def drawn(lengths: Sequence[int], heads: int, kv_heads: int, device: torch.device) -> Attention:
    """Return normal numbers for a causal call over some sequences."""
    make = torch.Generator(device).manual_seed(0)

    def normal(count: int) -> torch.Tensor:
        shape = (sum(lengths), count, HEAD_DIM)
        return torch.randn(shape, generator=make, device=device, dtype=torch.bfloat16)

    q, dout, k, v = normal(heads), normal(heads), normal(kv_heads), normal(kv_heads)
    segments = Segments(lengths, lengths, causal=True, device=device)
    return Attention(KernelCall(q, k, v, segments, HEAD_DIM**-0.5), dout)


def milliseconds(
    given: Attention,
    forward: Callable[..., tuple[torch.Tensor, ...]],
    backward: Callable[..., object],
) -> tuple[float, float]:
    """Return the median milliseconds of a forward and of its backward."""
    out, lse = forward(given.call)
    device = given.dout.device
    return (
        1e3 * median_s(lambda: forward(given.call), device),
        1e3 * median_s(lambda: backward(given.call, given.dout, out, lse), device),
    )


def median_s(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median seconds of a run on the device, after one that does not count."""
    seconds = []
    for _ in range(rounds + 1):
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


def teraflops(lengths: Sequence[int], heads: int, forward_ms: float, backward_ms: float) -> str:
    """Return "forward / backward" in TFLOP/s."""
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    numbers = pairs * heads * HEAD_DIM / 1e9
    forward, backward = (
        FORWARD_FLOPS * numbers / forward_ms,
        BACKWARD_FLOPS * numbers / backward_ms,
    )
    return f"{forward:.3g} / {backward:.3g}"


# ---- rates


def rates_section(setting: Setting) -> Section:
    """Time every kernel that is installed on single sequences and on packs."""
    device = setting.device
    singles = SHORT["singles"] if setting.rehearse else SINGLES
    packs = SHORT["packs"] if setting.rehearse else PACKS
    cases = [([n], heads, kv_heads) for heads, kv_heads, n in singles]
    cases += [(list(pack), *singles[0][:2]) for pack in packs]
    columns: dict[str, list[str]] = {}
    for name, kernel in _installed(device):
        with _active(name):
            cells = []
            for lengths, heads, kv_heads in cases:
                given = drawn(lengths, heads, kv_heads, device)
                found = milliseconds(given, kernel.forward, kernel.backward)
                cells.append(teraflops(lengths, heads, *found))
            columns[name] = cells
    if has_cudnn(device):
        cells = []
        for lengths, heads, kv_heads in cases:
            if len(lengths) > 1:
                cells.append("-")
                continue
            given = drawn(lengths, heads, kv_heads, device)
            found = milliseconds(given, cudnn_long.forward, cudnn_long.backward)
            cells.append(teraflops(lengths, heads, *found))
        columns["cuDNN, dense"] = cells
    rows = []
    for number, (lengths, heads, kv_heads) in enumerate(cases):
        is_equal = len(set(lengths)) == 1
        shape = (
            f"{len(lengths)} x {lengths[0]:,}"
            if is_equal
            else f"{lengths[0]:,} to {lengths[-1]:,}"
        )
        rows.append(
            [shape, f"{heads} on {kv_heads}", *(cells[number] for cells in columns.values())]
        )
    return Section(
        title=f"Attention in bfloat16: TFLOP/s forward / backward, heads of {HEAD_DIM}, causal",
        lines=table(["sequences x tokens", "heads", *columns], rows),
    )


def _installed(device: torch.device) -> Iterator[tuple[str, Kernel]]:
    """Yield the name and the kernel of all that serve the device."""
    for kernel in CANDIDATES[device.type]:
        if kernel.reason_unsupported(CallKind(device, torch.bfloat16, HEAD_DIM)) is None:
            yield kernel.name, kernel
    for name, package in OTHERS.items():
        is_there = importlib.util.find_spec(package.split(".")[0]) is not None
        if device.type == "cuda" and is_there and importlib.util.find_spec(package) is not None:
            yield name, TorchVarlen()


@contextmanager
def _active(name: str) -> Iterator[None]:
    """Put another FlashAttention behind torch's operators for a block, where it is one."""
    if name in OTHERS:
        activate_flash_attention_impl(name)
    try:
        yield
    finally:
        if name in OTHERS:
            restore_flash_attention_impl()


def has_cudnn(device: torch.device) -> bool:
    """Return whether cuDNN's dense operator is worth timing: on Hopper and newer GPUs."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] >= cudnn_long.GENERATION


# ---- split


def split_section(setting: Setting) -> Section:
    """Time a long-tailed pack by the length from which on sequences are calls of their own."""
    device = setting.device
    kernel = TorchVarlen()
    lengths = list(SHORT["packs"][0] if setting.rehearse else LONG_TAIL)
    heads, kv_heads, _ = (SHORT["singles"] if setting.rehearse else SINGLES)[0]
    given = drawn(lengths, heads, kv_heads, device)
    if has_cudnn(device):
        kernel.try_cudnn([cudnn_long.heads_of(given.call)], device)
    elif setting.rehearse:
        kernel = CANDIDATES["cpu"][0]  # it shares all calls
    rows = []
    for threshold in SHORT["thresholds"] if setting.rehearse else THRESHOLDS:
        with mock.patch.object(cudnn_long, "LONG", threshold):
            alone = cudnn_long.long_sequences(given.call)
            found = milliseconds(given, kernel.forward, kernel.backward)
        name = "none" if threshold == 1 << 30 else f"{threshold:,} tokens"
        rows.append([name, alone, *(f"{one:.2f}" for one in found), f"{sum(found):.2f}"])
    return Section(
        title=f"A pack of {len(lengths)} sequences, {lengths[0]:,} to {lengths[-1]:,} tokens: ms "
        "by the length from which on cuDNN has them one by one",
        lines=table(["from", "calls of cuDNN", "forward", "backward", "both"], rows),
    )


# ---- cuDNN


def cudnn_section(setting: Setting) -> Section:
    """Time cuDNN on new lengths, and its front end on packs."""
    title = "cuDNN: new lengths, and packs"
    if not has_cudnn(setting.device):
        return Section.not_run(title, "it needs a GPU of Hopper's generation or a newer one")
    rows = []
    holds = True
    for value in ("0", "1"):
        command = [sys.executable, *this_script(CUDNN_PART, setting)]
        found = launch(command, environment={AVOID_RECOMPILE: value})
        if "error" in found:
            rows.append([value, f"FAILED: {found['error']}"])
            holds = False
            continue
        rows += [[value, *row] for row in found["rows"]]
    columns = [f"{AVOID_RECOMPILE[len('TORCH_') :]}", "tokens", "first call, ms", "later, ms"]
    lines = table([*columns, "off FlashAttention-2"], rows)
    packs = _front_end(setting)
    return Section(title=title, lines=(*lines, "", *packs.lines), holds=holds and packs.holds)


def run_cudnn(setting: Setting) -> None:
    """Time new lengths in this process, and print the rows as JSON."""
    rows = []
    other = TorchVarlen()
    for tokens in NEW_LENGTHS:
        given = drawn([tokens], 32, 8, setting.device)
        synchronize(setting.device)
        began = time.perf_counter()
        out, lse = cudnn_long.forward(given.call)
        cudnn_long.backward(given.call, given.dout, out, lse)
        synchronize(setting.device)
        first_ms = 1e3 * (time.perf_counter() - began)
        later = milliseconds(given, cudnn_long.forward, cudnn_long.backward)
        wanted, _ = other.launch_forward(given.call)
        cells = [f"{tokens:,}", f"{first_ms:.0f}", f"{later[0]:.2f} + {later[1]:.2f}"]
        rows.append([*cells, f"{cudnn_long.difference(out, wanted):.1e}"])
    print(json.dumps({"rows": rows, "variable": os.environ.get(AVOID_RECOMPILE)}))


def _front_end(setting: Setting) -> Section:
    """Compare cuDNN's own front end on packs with FlashAttention-2, and time both."""
    if importlib.util.find_spec("cudnn") is None:
        return Section.not_run("", "cuDNN on packs: pip install nvidia-cudnn-frontend")
    from gpu_checks.cudnn_packs import PackedAttention

    other = TorchVarlen()
    rows = []
    holds = True
    for lengths in PACKS:
        given = drawn(list(lengths), 32, 8, setting.device)
        began = time.perf_counter()
        packed = PackedAttention(given.call, given.dout)
        found = (packed.forward(), *packed.backward())
        synchronize(setting.device)
        planning_s = time.perf_counter() - began
        out, lse = other.launch_forward(given.call)
        wanted = (out, *other.launch_backward(given.call, given.dout, out, lse))
        error = max(cudnn_long.difference(x, y) for x, y in zip(found, wanted, strict=True))
        is_close = error <= cudnn_long.CLOSE
        holds = holds and is_close
        mine = [1e3 * median_s(run, setting.device) for run in (packed.forward, packed.backward)]
        its = milliseconds(given, other.launch_forward, other.launch_backward)
        speeds = [teraflops(lengths, 32, *one) for one in (mine, its)]
        shape = f"{len(lengths)} of at most {max(lengths):,}"
        rows.append([shape, *speeds, f"{planning_s:.2f}", f"{error:.1e}", verdict(is_close)])
    columns = ["pack", "cuDNN", "FlashAttention-2", "plans, s", "off by", ""]
    return Section(title="", lines=table(columns, rows), holds=holds)
