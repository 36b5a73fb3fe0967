"""One recurrent mixer layer of a long document, on one process and on two.

    torchrun --nproc_per_node 2 scripts/benchmarks/mixers.py
    torchrun --nproc_per_node 2 scripts/benchmarks/mixers.py --layers gated_delta --stock

Forward and backward of the whole layer of transformers, 2,048 wide: projections, convolution,
scan, norm; one thread a process, in float32. The ways take turns; medians.

    stock        as transformers computes it in torch, on rank 0 alone; with --stock, once
    one          the same layer with hf_flexseq, on rank 0 alone
    contiguous   a slice of the document on each rank
    zigzag       two slices on each rank, as a zigzag's attention wants them

`processor` is what all ranks together spend over what one does: the second pass that a rank needs
for its summaries, and what is exchanged.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import BambaConfig, KimiLinearConfig, Qwen3NextConfig
from transformers.models.bamba.modeling_bamba import BambaMixer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from common import argument_parser, machine, table_head, table_row, write_record
from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.recurrent import attach_recurrent
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard

CPU = torch.device("cpu")
WIDTH = 2048
COLUMNS = ("layer", "way", "seconds", "one over it", "processor")


def gated_delta() -> nn.Module:
    """Return a mixer of Qwen3-Next: 16 key heads and 32 value heads of 128."""
    config = Qwen3NextConfig(
        hidden_size=WIDTH, num_hidden_layers=1, layer_types=["linear_attention"]
    )
    return Qwen3NextGatedDeltaNet(config, 0)


def kimi_delta() -> nn.Module:
    """Return a mixer of Kimi Linear: 16 heads of 128."""
    config = KimiLinearConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_heads=16,
        linear_head_dim=128,
    )
    return KimiLinearDeltaAttention(config, 0)


def mamba2() -> nn.Module:
    """Return a mixer of Bamba: 64 heads of 64, states of 128."""
    config = BambaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=1,
        attn_layer_indices=[],
        mamba_expand=2,
        mamba_n_heads=64,
        mamba_d_head=64,
        mamba_d_state=128,
    )
    return BambaMixer(config, 0)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gated_delta": gated_delta,
    "mamba2": mamba2,
    "kimi_delta": kimi_delta,
}
STRATEGIES = {"one": "local", "contiguous": "ulysses", "zigzag": "zigzag"}


def seconds_of(
    layer: nn.Module, way: str, tokens: int, world: Communicator
) -> tuple[float, float]:
    """Return the seconds of a forward and a backward: on the slowest rank, and those of all
    processors. Collective."""
    ranks = (0,) if way in ("stock", "one") else tuple(range(world.world_size))
    dist.barrier()
    spent = torch.zeros(2, dtype=torch.float64)
    if world.rank in ranks:
        keywords: dict[str, Any] = {}
        own = tokens
        if way != "stock":
            group = Group(ranks=ranks, sequences=(0,), strategy=STRATEGIES[way])
            shard = make_shard(MicroBatch(groups=(group,)), [tokens], world.rank)
            kernel = choose_kernel(CPU, torch.float32, 64)
            keywords["seq_ctx"] = SequenceContext(shard, world, kernel, CPU)
            own = shard.linear_tokens
        hidden = torch.randn(1, own, WIDTH, requires_grad=True)  # [1, tokens, WIDTH]
        wall, processor = time.perf_counter(), time.process_time()
        out = layer(hidden, **keywords)  # [1, tokens, WIDTH]
        out.backward(torch.ones_like(out))
        spent[0] = time.perf_counter() - wall
        spent[1] = time.process_time() - processor
    by_rank = [torch.zeros_like(spent) for _ in range(world.world_size)]
    dist.all_gather(by_rank, spent)
    layer.zero_grad()
    walls, processors = zip(*(one.tolist() for one in by_rank), strict=True)
    return max(walls), sum(processors)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stock", action="store_true", help="also transformers' own way, once")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = Communicator()
    rows = []
    if world.rank == 0:
        print(f"on {machine('torch', 'transformers')}; {asked.tokens:,} tokens\n")
        print(table_head(COLUMNS))
    for name in asked.layers:
        torch.manual_seed(0)
        layer = LAYERS[name]().train()
        taken: dict[str, list[tuple[float, float]]] = {}
        if asked.stock:
            taken["stock"] = [seconds_of(layer, "stock", asked.tokens, world)]
        attached = attach_recurrent(layer)
        for _ in range(asked.rounds):
            for way in STRATEGIES:
                taken.setdefault(way, []).append(seconds_of(layer, way, asked.tokens, world))
        attached.detach()
        one_s, one_processor_s = (statistics.median(x) for x in zip(*taken["one"], strict=True))
        for way, runs in taken.items():
            wall_s, processor_s = (statistics.median(x) for x in zip(*runs, strict=True))
            rows.append({"layer": name, "way": way, "seconds": runs})
            if world.rank == 0:
                cells = (name, way, f"{wall_s:.2f}", f"{one_s / wall_s:.2f}")
                print(table_row((*cells, f"{processor_s / one_processor_s:.2f}")), flush=True)
    if world.rank == 0:
        write_record(asked.json, {"rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
