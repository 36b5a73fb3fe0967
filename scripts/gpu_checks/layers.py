"""Four layers of Llama-3.1-8B and its head in bfloat16: milliseconds of a micro-batch, and where
they go.

One long-tailed pack and one sequence of as many tokens, with layers as they are, checkpointed,
compiled in regions, and with Liger's kernels where they are installed. The host's share is the
time until it has handed all work to the device. Attention must not make it wait, or the row fails.
A profile says what the device does: matrix products, attention, what hf_flexseq's own kernels do
between attention calls, copies, all else (norms, rotary embeddings, activations, residuals, the
loss), and how long it is idle.
"""

import importlib.util
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from gpu_checks.one_rank import FOUR_LAYERS, TINY, OneRank, host_waits_nowhere
from gpu_checks.rates import LONG_TAIL, synchronize
from gpu_checks.report import Section, Setting, table
from hf_flexseq.hf.model.compiled_regions import compiled_regions
from hf_flexseq.hf.model.liger import liger_kernels

ROUNDS, WARM_UP = 4, 2
WAYS = ("plain", "checkpointed", "compiled", "Liger")
LIGER = "liger_kernel"
# By kind of kernel, parts of their names; the first kind that fits is taken.
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "mha_"),
    "ours": ("merge_kernel", "rows_kernel"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas"),
    "copies": ("memcpy", "memset", "copy"),
}
OTHER, IDLE = "other", "idle"


def layers_section(setting: Setting) -> Section:
    """Time micro-batches in every way, and profile each."""
    pack = (9, 4, 3) if setting.rehearse else LONG_TAIL
    works = {"pack": pack, "one sequence": (sum(pack),)}
    config = LlamaConfig(**(TINY if setting.rehearse else FOUR_LAYERS))
    rows: list[list[str]] = []
    holds = True
    for way in WAYS:
        if way == "Liger" and (setting.rehearse or importlib.util.find_spec(LIGER) is None):
            rows.append([way, "not run: it needs liger-kernel and a GPU"])
            continue
        rank = OneRank(config, setting.device, torch.bfloat16, checkpointing=way == "checkpointed")
        with _changed(rank, way, setting):
            for name, lengths in works.items():
                try:
                    cells = _measured(rank, lengths)
                except RuntimeError as error:  # so does torch report a host that waits
                    rows.append([way, name, f"FAILED: {str(error).splitlines()[0]}"])
                    holds = False
                    continue
                rows.append([way, name, *cells])
        del rank
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    columns = ["way", "rows", "ms", "tokens/s", "host ms", *KINDS, OTHER, IDLE]
    return Section(
        title=f"{config.num_hidden_layers} layers of {config.hidden_size} and a head, "
        f"{sum(pack):,} tokens: ms of a micro-batch, and of the device by kind of kernel",
        lines=table(columns, rows),
        holds=holds,
    )


@contextmanager
def _changed(rank: OneRank, way: str, setting: Setting) -> Iterator[None]:
    """Compile the regions of a model or give it Liger's kernels, for a block."""
    change: AbstractContextManager[Any] = nullcontext()
    if way == "compiled":
        backend = "eager" if setting.rehearse else "inductor"
        accelerator = Accelerator(cpu=setting.rehearse, dynamo_backend=backend)
        change = compiled_regions(rank.model, accelerator)
    elif way == "Liger":
        change = liger_kernels(rank.model, {})
    with change:
        yield


def _measured(rank: OneRank, lengths: Sequence[int]) -> list[str]:
    """Return the cells of a row: medians, and a profile of one more round."""
    totals, hosts = [], []
    on_gpu = rank.device.type == "cuda"
    for number in range(WARM_UP + ROUNDS):
        synchronize(rank.device)
        began = time.perf_counter()
        with host_waits_nowhere(on_gpu and number >= WARM_UP):
            rank.forward_backward(lengths)
        handed_over = time.perf_counter()
        synchronize(rank.device)
        if number >= WARM_UP:
            hosts.append(handed_over - began)
            totals.append(time.perf_counter() - began)
    total_s = statistics.median(totals)
    cells = [f"{1e3 * total_s:.1f}", f"{sum(lengths) / total_s:,.0f}"]
    cells.append(f"{1e3 * statistics.median(hosts):.1f}")
    kinds = _profiled(rank, lengths) if on_gpu else None
    if kinds is None:
        return [*cells, *["-"] * (len(KINDS) + 2)]
    shown = [kinds[kind] for kind in (*KINDS, OTHER)]
    return [*cells, *(f"{one:.1f}" for one in shown), f"{1e3 * total_s - sum(shown):.1f}"]


def _profiled(rank: OneRank, lengths: Sequence[int]) -> Counter[str]:
    """Return milliseconds of the device by kind of kernel, in one micro-batch."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        rank.forward_backward(lengths)
        synchronize(rank.device)
    kinds: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            kinds[kind_of(event.name)] += event.self_device_time_total / 1e3
    return kinds


def kind_of(name: str) -> str:
    """Return the kind of a kernel, by its name."""
    for kind, parts in KINDS.items():
        if any(part in name.lower() for part in parts):
            return kind
    return OTHER
