"""Modelled: plans by the kinds of a model's layers, against plans by one s^2 coefficient.

    python scripts/benchmarks/kinds.py
    python scripts/benchmarks/kinds.py --context 1024 --cap 16384 --batches 20

    by kind     the preset itself: windows and full layers each with their pairs, halos and all
    one, bytes  the coefficient of s^2 that is nearest, by least squares over all sequences of the
                same batches, to the attention seconds of all kinds; bytes as of full layers
    relative    the same, but relative errors are squared, as `flexseq calibrate` does it
    all full    every layer priced as a full one: windows are not known

Batches are CommonCrawl-like (log-normal, median 950, sigma 1.75; longer draws than the context are
drawn again), on 8 x 8 ranks. All plans are priced by kind; the table has the seconds of the others
over those of the plan by kind. Planning times are CPU time of the thread, in turns; one
kind is the plan by one coefficient.

"equal plans" counts the batches whose plan by one coefficient is that by kind; "widest" is the
mean over the batches of the widest degree.

A second table says what the steps by kind are made of: the constants of micro-batches (with FSDP
mostly the gathering of parameters), linear layers, attention of full layers and of windows, and
the rest, which is transfers and ranks that wait. With --hidden-gathers all parameters are gathered
beside the arithmetic, and cost nothing.

Last, the groups of the plans by kind are priced once more, each with the cheapest strategy for its
full layers beside the cheapest for its window layers, over the same ranks: what a strategy per
kind inside a group could gain at most. Such strategies may cut sequences differently, so that
tokens would have to move between layers, which this leaves out.
"""

import argparse
import sys
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from hf_flexseq.cost import CostModel, Int64Array, step_ns
from hf_flexseq.cost.analytic import DEVICES
from hf_flexseq.cost.kinds import doubled_pairs
from hf_flexseq.cost.presets import SHAPES, load_cost_model
from hf_flexseq.plan import Plan
from hf_flexseq.planner import make_plan
from hf_flexseq.topology import Topology
from lengths import K, batch, common_crawl_like

TOPOLOGY = Topology(nodes=8, ranks_per_node=8)
PRESETS = (
    "gemma-3-27b-h100",
    "gemma-3-27b-h200",
    "gpt-oss-120b-h100",
    "gpt-oss-120b-h200",
    "qwen3-30b-a3b-h100",
    "qwen3-30b-a3b-h200",
)
BASELINES = ("one coefficient", "relative", "all full")
COLUMNS = (
    "preset",
    "tokens per rank",
    "by kind, s",
    *(f"{name}: mean" for name in BASELINES),
    "one coefficient: least",
    "most",
    "equal plans",
    "widest: by kind, by one",
    "time over one kind's",
)


SHARES = ("constants", "linear layers", "full attention", "windows", "transfers, waiting")


class Found(NamedTuple):
    """One batch as planned by kind and by the models without kinds."""

    seconds: list[float]
    """Of the plan by kind, and of each other: all priced by kind."""
    milliseconds: list[float]
    """CPU time of planning each."""
    equal: bool
    """Whether the plan by one coefficient is that by kind."""
    widest: tuple[int, int]
    """The widest degree by kind, and by one coefficient."""
    mixed: float
    """Seconds of the plan by kind with a strategy per kind inside its groups."""
    shares: list[float]
    """What the seconds of the plan by kind are made of, as in `SHARES`."""


def without_kinds(cost: CostModel, lengths: Int64Array) -> list[CostModel]:
    """Return the models without kinds, in the order of `BASELINES`. lengths: of all sequences."""
    s = lengths.astype(np.float64)
    seconds = cost.attention_s * s * s  # of each sequence's attention
    per_layer = cost.attention_s / cost.full_share if cost.full_share else 0.0
    for kind in cost.kinds:
        seconds = seconds + kind.attention_s * doubled_pairs(kind.reach, s)
    whole = seconds + cost.linear_s * s
    coefficients = [
        nearest(seconds, s * s, np.ones_like(s)),
        nearest(seconds, s * s, 1 / whole),
        per_layer,
    ]
    return [replace(cost, attention_s=one, kinds=()) for one in coefficients]


def nearest(seconds: np.ndarray, squares: np.ndarray, weights: np.ndarray) -> float:
    """Return the a that makes a x squares nearest to seconds, by weighted least squares."""
    rows = weights * squares
    return float((rows * weights * seconds).sum() / (rows * rows).sum())


def planned(lengths: list[int], cost: CostModel, cap: int | None) -> tuple[Plan, float]:
    """Return a plan and the milliseconds of CPU time that it took."""
    began = time.thread_time()
    plan = make_plan(lengths, TOPOLOGY, cost, max_tokens_per_rank=cap)
    return plan, 1e3 * (time.thread_time() - began)


def widest(plan: Plan) -> int:
    return max(group.degree for one in plan.micro_batches for group in one.groups)


def found(lengths: list[int], cost: CostModel, others: list[CostModel], cap: int | None) -> Found:
    """Plan one batch by all models."""
    plans, times = [], []
    for model in (cost, *others):
        plan, milliseconds = planned(lengths, model, cap)
        plans.append(plan)
        times.append(milliseconds)
    seconds = []
    for plan in plans:
        nanoseconds = step_ns(cost, plan.micro_batches, lengths, TOPOLOGY, sync="lockstep")
        seconds.append(nanoseconds / 1e9)
    return Found(
        seconds=seconds,
        milliseconds=times,
        equal=plans[0].micro_batches == plans[1].micro_batches,
        widest=(widest(plans[0]), widest(plans[1])),
        mixed=mixed_s(plans[0], lengths, cost),
        shares=shares_of(plans[0], lengths, cost, seconds[0]),
    )


def shares_of(plan: Plan, lengths: list[int], cost: CostModel, seconds: float) -> list[float]:
    """Return what a plan's seconds are made of, as in `SHARES`: work as if all ranks shared it."""
    s = np.array(lengths, dtype=np.float64)
    windows = [kind.attention_s * doubled_pairs(kind.reach, s).sum() for kind in cost.kinds]
    world = TOPOLOGY.world_size
    parts = [
        len(plan.micro_batches) * cost.micro_batch_s,
        float(cost.linear_s * s.sum()) / world,
        float(cost.attention_s * (s * s).sum()) / world,
        float(sum(windows)) / world,
    ]
    return [part / seconds for part in (*parts, seconds - sum(parts))]


# ---- a strategy per kind inside a group


def parts_of(cost: CostModel) -> list[CostModel]:
    """Return the cost of the full layers alone, with the linear ones, and of each kind's alone."""
    share = cost.full_share
    parts = [of_share(cost, share, ())]
    for kind in cost.kinds:
        part = of_share(cost, kind.share, (replace(kind, share=1.0),))
        parts.append(replace(part, attention_s=0.0, linear_s=1e-15))
    return parts


def of_share(cost: CostModel, share: float, kinds: tuple[Any, ...]) -> CostModel:
    """Return the cost with the bytes and the host's work of a share of the layers."""
    assert cost.ring_bytes is not None, "the presets of kinds know their rings"
    return replace(
        cost,
        kinds=kinds,
        all_to_all_bytes=share * cost.all_to_all_bytes,
        ring_bytes=share * cost.ring_bytes,
        query_bytes=share * cost.query_bytes,
        launch_s=share * cost.launch_s,
        post_s=share * cost.post_s,
        group_s=share * cost.group_s,
    )


def mixed_s(plan: Plan, lengths: list[int], cost: CostModel) -> float:
    """Return the seconds of a plan whose groups have the cheapest strategy for each kind."""
    parts = parts_of(cost)
    total = 0
    for micro_batch in plan.micro_batches:
        busy = np.zeros(TOPOLOGY.world_size, dtype=np.int64)
        for group in micro_batch.groups:
            tokens = np.array([lengths[i] for i in group.sequences], dtype=np.int64)
            spans_nodes = TOPOLOGY.spans_nodes(group.start, group.stop)
            names = ("local",) if group.degree == 1 else cost.strategies("auto")
            together = [cost.group_ns(tokens, group.degree, name, spans_nodes) for name in names]
            apart = 0
            for part in parts:
                apart += min(
                    part.group_ns(tokens, group.degree, name, spans_nodes) for name in names
                )
            busy[group.start : group.stop] += min(apart, *together)
        total += int(busy.max()) + cost.micro_batch_ns
    return total / 1e9


# ---- the table


def row(name: str, cap: int, of_batches: list[Found]) -> str:
    """Return the table's row of some batches."""
    seconds = np.array([one.seconds for one in of_batches])  # [batches, models]
    over = seconds[:, 1:] / seconds[:, :1]
    times = np.array([one.milliseconds for one in of_batches]).sum(axis=0)
    by_kind, by_one = (np.mean([one.widest[i] for one in of_batches]) for i in (0, 1))
    return table_row(
        [
            name,
            f"{cap:,}",
            f"{seconds[:, 0].mean():.2f}",
            *(f"{ratio:.4f}" for ratio in over.mean(axis=0)),
            f"{over[:, 0].min():.4f}",
            f"{over[:, 0].max():.4f}",
            f"{sum(one.equal for one in of_batches)} of {len(of_batches)}",
            f"{by_kind:.1f}, {by_one:.1f}",
            f"{times[0] / times[1]:.2f}",
        ]
    )


def launches_s(preset: str) -> float:
    """Return the constant of a micro-batch of a preset without the gathering of parameters."""
    model, device = preset.rsplit("-", 1)
    return SHAPES[model].layers * DEVICES[device.upper()].layer_s


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--presets", nargs="+", default=PRESETS, metavar="NAME")
    parser.add_argument("--batches", type=int, default=10, help="steps of each preset")
    parser.add_argument("--sequences", type=int, default=512, help="of a step")
    parser.add_argument("--context", type=int, default=384, help="longest sequence, in K tokens")
    parser.add_argument("--hidden-gathers", action="store_true", help="no constants but launches")
    parser.add_argument("--cap", type=int, help="tokens per rank; default: by the memory model")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    print(f"kinds.py {' '.join(sys.argv[1:])}\non {machine('numpy')}")
    print(f"load {load_average()}; {asked.sequences} sequences of at most {asked.context} K\n")
    print(table_head(COLUMNS))
    batches = []
    for seed in range(asked.batches):
        batches.append(batch(common_crawl_like, asked.context * K, asked.sequences, seed))
    all_lengths = np.array([length for one in batches for length in one], dtype=np.int64)
    record: dict[str, Any] = {}
    mixed = []
    shares = []
    for name in asked.presets:
        cost = load_cost_model(name)
        if asked.hidden_gathers:
            cost = replace(cost, micro_batch_s=launches_s(name))
        others = without_kinds(cost, all_lengths)
        cap = asked.cap or cost.max_tokens_per_rank(TOPOLOGY.world_size)
        found(batches[0], cost, others, cap)  # tables that a process makes once
        of_batches = [found(lengths, cost, others, cap) for lengths in batches]
        print(row(name, cap, of_batches), flush=True)
        record[name] = {
            "attention_s": [model.attention_s for model in (cost, *others)],
            "batches": [one._asdict() for one in of_batches],
        }
        parts = np.array([one.shares for one in of_batches]).mean(axis=0)
        shares.append(table_row([name, *(f"{100 * part:.1f} %" for part in parts)]))
        gains = [one.seconds[0] / one.mixed - 1 for one in of_batches]
        mixed.append(f"{name} {100 * np.mean(gains):.2f} % (most {100 * max(gains):.2f} %)")
    print("\n".join(["", table_head(("preset", *SHARES)), *shares]))
    print("\na strategy per kind inside a group would gain at most:", "; ".join(mixed))
    write_record(asked.json, record)


if __name__ == "__main__":
    main()
