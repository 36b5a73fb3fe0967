"""Modelled: what it would save at most if keys that several layers read travelled once.

    python scripts/benchmarks/shared_keys.py
    python scripts/benchmarks/shared_keys.py --overlap 0
    python scripts/benchmarks/shared_keys.py --overlap 0 --inter 1.25e9 --intra 2e10
    python scripts/benchmarks/shared_keys.py --ranks-per-node 1 --inter 1.25e9 --sequences 64

In Gemma 3n and Gemma 4 the last layers, here *readers*, read the keys and values of an earlier
layer. hf_flexseq moves these keys for every layer that reads them. The bound is that readers move
no keys and values at all, and no gradients of them, under any strategy, rings included, which
could not keep what they pass on.

The first table has batches as in `kinds.py`, on 8 nodes of H100 under FSDP: seconds of the plans
made as it is, and of plans made as if readers moved no keys, each by its own prices. The second
has one sequence on 8 ranks and on 16, by strategy. "of the bytes" is the share of a strategy's
bytes that readers' keys are.
"""

import argparse
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from hf_flexseq.cost import CostModel, step_ns
from hf_flexseq.cost.analytic import DEVICES, ModelShape, analytic_cost_model
from hf_flexseq.layers import Reach
from hf_flexseq.planner import make_plan
from hf_flexseq.topology import Topology
from lengths import K, batch, common_crawl_like

NODES = 8
PLANS = ("model", "as it is, s", "saved: mean", "most", "tokens by strategy")
GROUPS = ("model", "ranks", "strategy", "as it is, s", "saved", "of the bytes")


class SharingModel(NamedTuple):
    """A model whose last layers read earlier keys."""

    shape: ModelShape
    readers: int
    """Layers that read the keys of another one."""
    full_width: float
    """Numbers in a head of its full layers, over those of its window layers."""


# Defaults of transformers' Gemma3nTextConfig, which are those of Gemma 3n E4B. Embeddings of each
# layer (2.3 B) are looked up; a head of 537 M is the embedding.
GEMMA_3N_E4B = ModelShape(
    layers=35,
    hidden=2048,
    heads=8,
    kv_heads=2,
    head_dim=256,
    intermediate=16384,
    vocab=262400,
    params=6_835_235_568,
    active_params=6_835_235_568 - 2_348_810_240 + 262400 * 2048,
    reaches=((28, Reach(window=512)),),
)
# `data/checkpoints.json` has its source. Heads of full layers are 512 wide.
GEMMA_4_E2B = ModelShape(
    layers=35,
    hidden=1536,
    heads=8,
    kv_heads=1,
    head_dim=256,
    intermediate=9216,
    vocab=262144,
    params=5_407_137_024,
    active_params=5_407_137_024 - 2_348_810_240 + 262144 * 1536,
    reaches=((28, Reach(window=512)),),
)
MODELS = {
    "gemma-3n-e4b": SharingModel(GEMMA_3N_E4B, 15, 1.0),
    "gemma-4-e2b": SharingModel(GEMMA_4_E2B, 20, 2.0),
}


def key_share(model: SharingModel, strategy: str) -> float:
    """Return the share of a strategy's bytes that readers' keys and values are, at most.

    Under Ulysses each of 8 ranks has one head of queries, keys, values and results, so that keys
    and values are half of all.
    """
    readers = model.readers / model.shape.layers
    return readers / 2 if strategy == "ulysses" else readers


def topology_of(asked: argparse.Namespace) -> Topology:
    return Topology(nodes=NODES, ranks_per_node=asked.ranks_per_node)


def costs_of(model: SharingModel, asked: argparse.Namespace) -> tuple[CostModel, CostModel]:
    """Return the cost of a model as it is, and as if its readers moved no keys."""
    device = DEVICES["H100"]
    device = replace(
        device,
        overlap=asked.overlap,
        inter_bytes=asked.inter or device.inter_bytes,
        intra_bytes=asked.intra or device.intra_bytes,
    )
    shape = model.shape
    cost = analytic_cost_model(shape, device, topology_of(asked), zero_stage=3)
    assert cost.ring_bytes is not None, "analytic models know their rings"
    # Keys and values go to every rank that has a head of queries: as many heads travel.
    heads = (4 * shape.heads) / (2 * shape.heads + 2 * shape.kv_heads)
    now = replace(
        cost,
        all_to_all_bytes=cost.all_to_all_bytes * heads * model.full_width,
        ring_bytes=cost.ring_bytes * model.full_width,
        query_bytes=cost.query_bytes * model.full_width,
    )
    assert now.ring_bytes is not None
    once = replace(
        now,
        all_to_all_bytes=now.all_to_all_bytes * (1 - key_share(model, "ulysses")),
        ring_bytes=now.ring_bytes * (1 - key_share(model, "zigzag")),
    )
    return now, once


def plans_row(name: str, asked: argparse.Namespace, record: dict[str, Any]) -> str:
    """Return the first table's row of a model."""
    now, once = costs_of(MODELS[name], asked)
    topology = topology_of(asked)
    seconds = []
    tokens: dict[str, int] = {}
    for seed in range(asked.batches):
        lengths = batch(common_crawl_like, asked.context * K, asked.sequences, seed)
        priced = []
        for cost in (once, now):
            plan = make_plan(lengths, topology, cost)
            priced.append(step_ns(cost, plan.micro_batches, lengths, topology, sync="lockstep"))
        seconds.append([one / 1e9 for one in priced])
        for one in plan.micro_batches:
            for group in one.groups:
                count = sum(lengths[sequence] for sequence in group.sequences)
                tokens[group.strategy] = tokens.get(group.strategy, 0) + count
    record[name] = {"seconds": seconds, "tokens": tokens}
    by_batch = np.array(seconds)  # [batches, (once, now)]
    saved = 1 - by_batch[:, 0] / by_batch[:, 1]
    shares = [f"{key} {100 * n / sum(tokens.values()):.0f} %" for key, n in tokens.items()]
    return table_row(
        [
            name,
            f"{by_batch[:, 1].mean():.2f}",
            f"{100 * saved.mean():.2f} %",
            f"{100 * saved.max():.2f} %",
            ", ".join(shares),
        ]
    )


def group_rows(name: str, asked: argparse.Namespace) -> list[str]:
    """Return the second table's rows of a model."""
    model = MODELS[name]
    now, once = costs_of(model, asked)
    tokens = np.array([asked.length * K], dtype=np.int64)
    rows = []
    for degree, strategies in (
        (8, ("ulysses", "zigzag", "balanced", "allgather")),
        (16, ("hybrid", "zigzag", "balanced", "allgather")),
    ):
        for strategy in strategies:
            before, after = (
                cost.group_ns(tokens, degree, strategy, degree == 16) for cost in (now, once)
            )
            share = "-" if strategy == "hybrid" else f"{100 * key_share(model, strategy):.0f} %"
            saved = f"{100 * (1 - after / before):.1f} %"
            rows.append(table_row([name, degree, strategy, f"{before / 1e9:.3f}", saved, share]))
    return rows


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, default=10, help="steps of each model")
    parser.add_argument("--sequences", type=int, default=512, help="of a step")
    parser.add_argument("--context", type=int, default=384, help="longest sequence, in K tokens")
    parser.add_argument("--length", type=int, default=128, help="of the second table, in K tokens")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="of the 8 nodes")
    parser.add_argument("--overlap", type=float, default=1.0, help="share of transfers hidden")
    parser.add_argument("--inter", type=float, help="bytes/s to other nodes; default: an H100's")
    parser.add_argument("--intra", type=float, help="bytes/s inside a node; default: an H100's")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    print(f"shared_keys.py {' '.join(sys.argv[1:])}\non {machine('numpy')}")
    print(f"load {load_average()}; {asked.sequences} sequences of at most {asked.context} K\n")
    record: dict[str, Any] = {}
    print(table_head(PLANS))
    for name in MODELS:
        print(plans_row(name, asked, record), flush=True)
    print(f"\none sequence of {asked.length} K tokens\n\n{table_head(GROUPS)}")
    for name in MODELS:
        print("\n".join(group_rows(name, asked)))
    write_record(asked.json, record)


if __name__ == "__main__":
    main()
