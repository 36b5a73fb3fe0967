"""NCCL in a world of one GPU: what a post costs the host, and whether a transfer that is posted
before an attention call runs beside it.

The host is ahead of the device, as in a step: a transfer and a kernel become ready together,
behind some matrix products. Without priority the kernel would take all multiprocessors, and the
transfer begin with its last wave (`distributed/nccl.py`). So the row of the package's own options
should hide most of the transfer. On one GPU an all-to-all is a copy by NCCL's kernel, which shows
when it runs, and not how fast links are. Nothing is judged.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gpu_checks.rates import drawn, has_cudnn, median_s, synchronize
from gpu_checks.report import Section, Setting, table
from hf_flexseq.kernels import cudnn_long
from hf_flexseq.kernels.choose import choose_kernel

POSTS = 50
PRODUCTS = 3  # before each measurement, so that the host is ahead
SIZES = {"tokens": 16384, "sent": 256 << 20, "square": 8192}
SHORT = {"tokens": 64, "sent": 1 << 10, "square": 16}


def nccl_section(setting: Setting) -> Section:
    """Post all-to-alls before attention, with every priority and cluster size."""
    device = setting.device
    sizes = SHORT if setting.rehearse else SIZES
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    backend = "gloo" if setting.rehearse else "nccl"
    dist.init_process_group(backend, rank=0, world_size=1)
    given = drawn([sizes["tokens"]], 32, 8, device)
    kernel = choose_kernel(device, torch.bfloat16, given.call.q.shape[2])
    calls = {kernel.name: lambda: kernel.forward(given.call)}
    if has_cudnn(device):
        calls["cuDNN"] = lambda: cudnn_long.forward(given.call)
    sent = torch.zeros(sizes["sent"], dtype=torch.bfloat16, device=device)
    received = torch.empty_like(sent)
    square = torch.zeros(sizes["square"], sizes["square"], dtype=torch.bfloat16, device=device)
    rows = []
    for name, options in _options(backend).items():
        free_before = _free_bytes(device)
        group = dist.new_group([0], backend=backend, pg_options=options())
        post_us = 1e6 * _host_s(group, device)
        took = (free_before - _free_bytes(device)) / 2**20

        def post(group: Any = group) -> Any:
            return dist.all_to_all_single(received, sent, group=group, async_op=True)

        alone_s = median_s(lambda post=post: post().wait(), device)
        cells = []
        for attend in calls.values():
            cells.append(_hidden(post, attend, square, alone_s, device))
        rows.append([name, f"{post_us:.0f}", f"{took:.0f}", f"{1e3 * alone_s:.2f}", *cells])
    dist.destroy_process_group()
    hidden = [f"hidden by {name}" for name in calls]
    return Section(
        title=f"{backend} in a world of one: an all-to-all of {sizes['sent'] * 2 >> 20:,} MiB "
        f"posted before attention over {sizes['tokens']:,} tokens",
        lines=table(["options", "us of a post", "MiB", "ms alone", *hidden], rows),
    )


def _options(backend: str) -> dict[str, Callable[[], Any]]:
    """Return what makes options of a group, by name."""
    if backend != "nccl":
        return {"-": lambda: None}

    def make(*, high: bool, cluster: int | None) -> Any:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high)
        if cluster is not None:
            options.config.cga_cluster_size = cluster
        return options

    return {
        "torch's own": lambda: make(high=False, cluster=None),
        "high priority": lambda: make(high=True, cluster=None),
        "hf_flexseq's": lambda: make(high=True, cluster=1),
    }


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _host_s(group: Any, device: torch.device) -> float:
    """Return the median seconds that the host takes to post a small all-to-all and wait for it."""
    sent = torch.zeros(64, device=device)
    received = torch.empty_like(sent)
    seconds = []
    for _ in range(POSTS):
        synchronize(device)
        began = time.perf_counter()
        dist.all_to_all_single(received, sent, group=group, async_op=True).wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _hidden(
    post: Callable[[], Any],
    attend: Callable[[], object],
    square: torch.Tensor,
    alone_s: float,
    device: torch.device,
) -> str:
    """Return the share of a transfer that attention hides, and milliseconds of attention."""

    def run(*, posts: bool) -> None:
        for _ in range(PRODUCTS):
            square @ square
        work = post() if posts else None
        attend()
        if work is not None:
            work.wait()

    both_s = median_s(lambda: run(posts=True), device)
    without_s = median_s(lambda: run(posts=False), device)
    hidden = 1 - (both_s - without_s) / alone_s
    return f"{hidden:.0%} ({1e3 * median_s(attend, device):.2f} ms)"
