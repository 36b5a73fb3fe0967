"""Simulated: published figures of very long sequences, as published, as modelled, as we plan them.

    python scripts/benchmarks/published.py --json published.json

Modelled are the publisher's own settings by the cost model: degree, recomputation, what is on the
host, kernels, optimizer state and dtype (`published_rows.py`); the bytes of a layer are counted
from the publisher's code (`peer_bytes.py`). Planned is what a plan does with the same sequence on
the same GPUs, with model states where the publisher has them, at no more bytes of a device than
the publisher's: attention is not recomputed, and its outputs go to the host where that is needed.

Two constants are fitted, each on one row, and predict the others: the share of an H100's 989.4
TFLOP/s that a step achieves with cuDNN's attention, and that with FlashAttention 2. Longest
sequences are those of 85 % of a device's memory, as plans have it. FLOPs are those executed, with
what is recomputed, of causal pairs: arithmetic of ours, which no source prints.

Bytes and lengths are no blind prediction: some of what layers of other stacks hold was found in
their code only after a row had been missed. No number was chosen to meet a row.

No figure is measured here: no GPU and no torch is used.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from common import HERE, argument_parser, table, write_record
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import MEMORY_FRACTION, analytic_cost_model
from hf_flexseq.cost.devices import DEVICES, DeviceSpec
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.plan import PlanInfeasible
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.fit import Fit, fit_of, ladder
from lengths import DOCUMENTS, WIKIPEDIA, Draw, K, batch, common_crawl_like
from peer_bytes import Stack, layer_of, peer_cost
from published_rows import (
    CUDNN,
    FLASH2,
    FLEXSP,
    FLEXSP_STEPS,
    LONGEST,
    QWEN3_8B,
    QWEN25_3B,
    STEPS,
    SWIFT,
    SWIFT_35,
    SWIFT_ROW,
    SWIFT_RUNS,
    TRL_STACK,
    ZEPPELIN,
    ZEPPELIN_GAIN,
    Longest,
    M,
    Row,
    Step,
)

PEAK = 989.4e12  # FLOP/s of an H100 or H200, dense, bfloat16
GB = 1e9
GPUS_PER_NODE = 8
# Bytes of a node's host in the planned column. ArcticTraining's runs had 1.9 TB (README of its
# recipes), as an AWS p5 has; the others do not say.
NODE_BYTES = 1.9e12
ADAM_BYTES = 16  # of a parameter's states, which take their share of a host that holds them


# ---- the machine


def topology_of(gpus: int) -> Topology:
    """Return the nodes of eight that so many GPUs make."""
    return Topology(nodes=max(1, gpus // GPUS_PER_NODE), ranks_per_node=min(gpus, GPUS_PER_NODE))


def device_of(name: str, share: float) -> DeviceSpec:
    """Return a device that achieves a share of its FLOP/s, in attention as well."""
    achieved = share * PEAK
    return replace(DEVICES[name], flops=achieved, attention_flops=achieved, kernel=None)


@cache
def shares() -> dict[str, float]:
    """Return the share of FLOP/s of each kernel, fitted on its one row."""
    found = {}
    for row in STEPS:
        if row.fits:
            assert row.seconds is not None, "a constant is fitted on seconds"
            found[row.fits] = modelled_step(row, 1.0).seconds / row.seconds
    return found


def share_of(row: Step | Longest) -> float:
    """Return the share of FLOP/s of the kernel that a row ran."""
    return shares()[FLASH2 if row.stack.is_flash else CUDNN]


# ---- one long sequence


def modelled_step(row: Step, share: float) -> Fit:
    """Return the figures of a published step under its own settings."""
    topology = topology_of(row.gpus)
    cost = peer_cost(row.model, row.stack, device_of(row.device, share), topology)
    choice = row.stack.choice(row.model.shape.layers)
    return fit_of(cost, topology, choice, row.tokens, strategy=row.stack.strategy)


def our_cost(row: Step | Longest, device: str, budget: float) -> CostModel:
    """Return our cost model of a row's model on its GPUs, with the same kernels, and with model
    states where the publisher has them.

    budget: bytes of a device.
    """
    topology = topology_of(row.gpus)
    device_spec = device_of(device, share_of(row))
    cost = analytic_cost_model(
        row.model.shape, device_spec, topology, zero_stage=3, checkpointing=False
    )
    peer = peer_cost(row.model, row.stack, device_spec, topology)
    activations = cost.activations
    assert activations is not None, "the estimate has activations"
    host_bytes = NODE_BYTES / topology.ranks_per_node
    if row.states_on_host:
        host_bytes -= ADAM_BYTES * row.model.shape.params / row.gpus
    ours = replace(activations, host_bytes=host_bytes)
    if row.stack.kernels == "fused":
        ours = replace(ours, kinds=(layer_of(row.model, Stack(kernels="fused", is_flash=True)),))
    return replace(
        cost,
        activations=ours,
        token_bytes=ours.token_bytes(ours.as_set),
        sharded_state_bytes=peer.sharded_state_bytes,
        state_bytes=cost.state_bytes + peer.state_bytes,
        budget_bytes=budget,
    )


def planned_step(row: Step, *, budget: float | None = None) -> Fit | None:
    """Return the figures of our plan for a published step; None if no choice holds it.

    budget: bytes of a device; None for those of the published row, if it has them.
    """
    bound = MEMORY_FRACTION * DEVICES[row.device].memory_bytes
    if budget is None:
        budget = bound if row.gigabytes is None else min(bound, row.gigabytes * GB)
    cost, topology = our_cost(row, row.device, budget), topology_of(row.gpus)
    try:
        plan = make_plan([row.tokens], topology, cost)
    except PlanInfeasible:
        return None
    assert cost.activations is not None, "the estimate has activations"
    choice = plan.micro_batches[0].memory or cost.activations.as_set
    return replace(fit_of(cost, topology, choice, row.tokens), seconds=plan.objective_s)


def step_rows() -> tuple[list[Row], list[Row]]:
    """Return the rows of seconds, and those of bytes."""
    seconds, gigabytes = [], []
    for row in STEPS:
        modelled = modelled_step(row, share_of(row))
        planned = planned_step(row)
        where = f"{row.gpus} {row.device}"
        what = f"{row.model.name}, {tokens_text(row.tokens)} tokens, {where}"
        note = "no choice holds it"
        if planned is not None:
            note = str(planned.choice)
            bound = MEMORY_FRACTION * DEVICES[row.device].memory_bytes
            wider = planned_step(row, budget=bound)
            if wider is not None and wider.seconds < 0.99 * planned.seconds:
                note += f"; {wider.seconds:,.0f} s at {wider.device_bytes / GB:.1f} GB"
        if row.seconds is not None:
            made = Row(
                what=what,
                source=row.source,
                unit="s",
                published=row.seconds,
                modelled=modelled.seconds,
                planned=None if planned is None else planned.seconds,
                note=note,
                is_fitted=bool(row.fits),
            )
            seconds.append(made)
        if row.gigabytes is not None:
            made = Row(
                what=what,
                source=row.source,
                unit="GB",
                published=row.gigabytes,
                modelled=modelled.device_bytes / GB,
                planned=None if planned is None else planned.device_bytes / GB,
                note="" if row.stack.inputs_on_host else "inputs of layers on the device",
            )
            gigabytes.append(made)
    return seconds, gigabytes


def tokens_text(tokens: int) -> str:
    """Return tokens in words: 4M are 4 x 1,048,576."""
    return f"{tokens // M}M" if tokens % M == 0 else f"{tokens:,}"


def longest_rows() -> list[Row]:
    """Return the rows of longest sequences."""
    rows = []
    for row in LONGEST:
        topology = topology_of(row.gpus)
        device = device_of("H100", share_of(row))
        budget = MEMORY_FRACTION * device.memory_bytes
        cost = replace(peer_cost(row.model, row.stack, device, topology), budget_bytes=budget)
        modelled = fit_of(cost, topology, row.stack.choice(row.model.shape.layers))
        planned = ladder(our_cost(row, "H100", budget), topology)[-1]
        made = Row(
            what=f"{row.model.name}, {row.gpus} H100, {row.with_}",
            source=row.source,
            unit="tokens",
            published=row.tokens,
            modelled=modelled.longest,
            planned=planned.longest,
            note=str(planned.choice),
            is_at_least=row.is_at_least,
        )
        rows.append(made)
    return rows


# ---- many sequences


def swift_rows() -> list[Row]:
    """Return the seconds of a run whose rows all have one degree, over those of degree 1."""
    topology = topology_of(8)
    cost = analytic_cost_model(QWEN25_3B.shape, device_of("H100", shares()[CUDNN]), topology)
    lengths = [SWIFT_ROW] * 64
    seconds = {}
    for degree in SWIFT_RUNS:
        options = PlanOptions(
            planner="static", sp_degree=degree, max_tokens_per_rank=-(-SWIFT_ROW // degree)
        )
        seconds[degree] = make_plan(lengths, topology, cost, options).objective_s
    rows = []
    for degree, (published, _) in SWIFT_RUNS.items():
        if degree == 1:
            continue
        made = Row(
            what=f"{QWEN25_3B.name} with LoRA, {SWIFT_ROW:,} tokens a row, all of degree {degree}",
            source=SWIFT,
            unit="x degree 1",
            published=published / SWIFT_RUNS[1][0],
            modelled=seconds[degree] / seconds[1],
            planned=1.0,
            note="rows that fit on one rank stay there",
        )
        rows.append(made)
    return rows


def flexsp_rows() -> list[Row]:
    """Return the rows of FlexSP: seconds where its lengths are public, and gains elsewhere."""
    cost = load_cost_model("flexsp-gpt-7b-a100")
    topology = Topology(nodes=8, ranks_per_node=8)
    kept = json.loads((HERE / "data" / "flexsp_figures.json").read_text())
    limit = 64 * cost.max_tokens_per_rank(64)
    rows = []
    for name, draw, context, of in (
        ("Wikipedia, 192K", WIKIPEDIA, 192 * K, "wikipedia"),
        ("CommonCrawl, 384K", common_crawl_like, limit, "cc-like"),
    ):
        solved = kept[of]["seconds"]
        static, ours = [], []
        for seed in range(len(solved)):
            lengths = batch(draw, context, 512, seed)
            options = PlanOptions(planner="static", sp_degree=64)
            static.append(make_plan(lengths, topology, cost, options).objective_s)
            ours.append(make_plan(lengths, topology, cost).objective_s)
        deepspeed, flexsp = FLEXSP_STEPS[name]
        means = [statistics.mean(each) for each in (static, solved, ours)]
        if of == "wikipedia":
            what = f"GPT-7B, {name}, 64 A100, a step"
            for stack, published, modelled in (
                ("DeepSpeed, one degree", deepspeed, means[0]),
                ("FlexSP", flexsp, means[1]),
            ):
                made = Row(
                    what=f"{what}, {stack}",
                    source=FLEXSP,
                    unit="seconds",
                    published=published,
                    modelled=modelled,
                    planned=means[2],
                    note="read off a figure; the constants leave ZeRO's transfers out",
                )
                rows.append(made)
        made = Row(
            what=f"GPT-7B, {name}, 64 A100, FlexSP over one degree",
            source=FLEXSP,
            unit="x",
            published=deepspeed / flexsp,
            modelled=means[0] / means[1],
            planned=means[0] / means[2],
            note="" if of == "wikipedia" else "our own lengths, a log-normal like CommonCrawl",
        )
        rows.append(made)
    return rows


def zeppelin_rows() -> list[Row]:
    """Return the row of Zeppelin: its gain over even rings over all ranks."""
    topology = Topology(nodes=8, ranks_per_node=8)
    cost = load_cost_model("llama-3.1-8b-a800")
    gains, ours = [], []
    draws: Sequence[Draw] = (WIKIPEDIA, DOCUMENTS, common_crawl_like)
    for draw in draws:
        for seed in range(4):
            lengths = batch(draw, 64 * K, 64, seed)
            seconds = []
            for options in (
                PlanOptions(planner="static", sp_degree=64, strategy="zigzag"),
                PlanOptions(planner="zeppelin"),
                PlanOptions(),
            ):
                seconds.append(make_plan(lengths, topology, cost, options).objective_s)
            gains.append(seconds[0] / seconds[1])
            ours.append(seconds[0] / seconds[2])
    made = Row(
        what="Zeppelin over even rings, 64 A800",
        source=ZEPPELIN,
        unit="x",
        published=ZEPPELIN_GAIN,
        modelled=statistics.mean(gains),
        planned=statistics.mean(ours),
        note="a mean over other models, clusters and lengths, which are not public",
    )
    return [made]


# ---- the page

COLUMNS = ("", "source", "published", "modelled", "error", "planned", "planned with, or note")
TITLES = {
    "seconds": "Seconds of a step with one sequence",
    "gigabytes": "Peak GB of a device in these steps",
    "longest": "Tokens of the longest sequence",
    "batches": "Steps of many sequences",
}


def all_rows() -> dict[str, list[Row]]:
    """Return the rows of each table."""
    seconds, gigabytes = step_rows()
    return {
        "seconds": seconds,
        "gigabytes": gigabytes,
        "longest": longest_rows(),
        "batches": [*swift_rows(), *flexsp_rows(), *zeppelin_rows()],
    }


def median_error(rows: Iterable[Row]) -> float:
    """Return the median of the rows' errors without their signs."""
    return statistics.median(abs(row.error) for row in rows if row.counts)


def at_50_gb() -> Fit | None:
    """Return our figures of Qwen3-8B on 1M tokens and 8 H100, with 50 GB of a device as plans
    count them: gathered weights are left to the 15 % of a device that no plan uses."""
    row = next(one for one in STEPS if one.model is QWEN3_8B and one.stack is TRL_STACK)
    topology = topology_of(row.gpus)
    gathered = peer_cost(row.model, row.stack, DEVICES[row.device], topology).state_bytes
    found = planned_step(row, budget=50 * GB + gathered)
    if found is None:
        return None
    return replace(found, device_bytes=found.device_bytes - gathered)


def page(rows: dict[str, list[Row]]) -> str:
    """Return the page in Markdown."""
    fitted = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares().items())
    lines = [f"Shares of 989.4 TFLOP/s, each fitted on one row: {fitted}.", ""]
    for name, of_table in rows.items():
        lines += [f"## {TITLES[name]} (simulated)", ""]
        lines += [table(COLUMNS, [row.cells() for row in of_table], (2, 3, 4, 5)), ""]
        lines += [f"Median error {100 * median_error(of_table):.1f} %.", ""]
    everything = [row for of_table in rows.values() for row in of_table]
    lines.append(f"Median error of all rows: {100 * median_error(everything):.1f} %.")
    ours = at_50_gb()
    if ours is not None:
        lines.append(
            f"\nQwen3-8B, 1M tokens, 8 H100, in 50 GB: planned {ours.seconds:.0f} s at "
            f"{ours.device_bytes / GB:.1f} GB, without gathered weights, and "
            f"{ours.host_bytes / GB:.0f} GB of the host, {ours.choice}."
        )
    lines.append(
        f"\nNot modelled: ms-swift's [Qwen3.5-4B]({SWIFT_35}) on 8 H800, 18.97 s a step at 68 "
        "GiB. Its 65,536 tokens are the most of a row; the lengths of the rows are not published."
    )
    return "\n".join(lines)


def main() -> None:
    """Print the page."""
    asked = argument_parser(__doc__).parse_args()
    rows = all_rows()
    print(page(rows))
    figures: dict[str, Any] = {"shares": shares(), "rows": {}}
    for name, of_table in rows.items():
        figures["rows"][name] = [{**asdict(row), "error": row.error} for row in of_table]
    ours = at_50_gb()
    figures["qwen3-8b in 50 GB"] = None if ours is None else asdict(ours)
    write_record(asked.json, figures)


if __name__ == "__main__":
    main()
