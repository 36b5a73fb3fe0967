"""`fit`: the longest sequence that fits on all ranks of a cluster, and the costs of each choice
for its activations.

A model is described by its sizes: a preset's, without torch, or a configuration's,
which transformers reads. With a device they make a cost model; a measured one has both in it.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_flexseq.base.values import quoted
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import MODELS, PRESETS, load_cost_model
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.planner.fit import Fit, fastest, ladder, next_levers, ranks_for

if TYPE_CHECKING:
    from hf_flexseq.hf.engine.layer_trial import CountedBytes

# Bytes of a number by the name of its dtype.
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}

# Options that describe what a measured cost model has in it, and their defaults.
DESCRIPTION: dict[str, Any] = {
    "device": "H100",
    "zero_stage": 3,
    "checkpointing": False,
    "dtype": "bfloat16",
    "lora_rank": None,
    "expert_ranks": 1,
}

# Columns of the table, and their widths; the last one is as wide as it has to be.
COLUMNS = {
    "tokens a rank": 13,
    "longest": 13,
    "seconds": 9,
    "device GiB": 10,
    "host GiB": 8,
}


def fit(options: Namespace) -> None:
    """Print the ladder of choices, and ways to fit a longer sequence."""
    cost = _cost(options)
    rungs = ladder(cost, options.topology, options.length)
    if not rungs:
        raise ValueError(
            f"model states take {_states_gib(options, cost):.1f} GiB of the "
            f"{cost.budget_bytes / 2**30:.1f} of a rank, which leaves no room for a token: "
            f"{_more_room(options)}"
        )
    lines = next_levers(cost, options.topology, rungs)
    if options.json is not None:
        _write(options, cost, rungs, lines)
    if options.json != "-":
        print(_title(options, cost))
        for line in _table(rungs, options.length):
            print(line)
        for line in lines:
            print(line)
        if options.length is not None:
            print(_answer(options, cost))


def _more_room(options: Namespace) -> str:
    """Return the remaining ways to make model states smaller, in words."""
    ways = ["use more ranks"]
    if options.model is not None:
        if options.zero_stage in (0, 1, 2):
            ways.append("shard them (--zero-stage 3)")
        if options.lora_rank is None:
            ways.append("train adapters (--lora-rank)")
    return ", or ".join(ways)


# ---- the cost model


def _cost(options: Namespace) -> CostModel:
    """Return the cost model of the options. Raises ValueError for options that do not go
    together, and for a cost model that does not know the bytes of activations."""
    if (options.model is None) == (options.cost_model is None):
        raise ValueError("give either MODEL or --cost-model PATH")
    cost = _named(options) if options.model is None else _estimated(options)
    activations = cost.activations
    assert activations is not None, "checked by _named, made by _estimated"
    if options.host_bytes is not None:
        cost = replace(cost, activations=replace(activations, host_bytes=options.host_bytes))
    return cost


def _named(options: Namespace) -> CostModel:
    """Return the cost model of a file."""
    for name in DESCRIPTION:
        if getattr(options, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} goes with MODEL: --cost-model has it already"
            )
    cost = load_cost_model(options.cost_model)
    if cost.activations is None:
        raise ValueError(
            f"cost model {cost.name!r} does not know the bytes of activations: measure it again "
            "with `flexseq calibrate`, or give MODEL and --device"
        )
    return cost


def _estimated(options: Namespace) -> CostModel:
    """Return the cost model of a model's sizes on a device. Bytes of layers are counted where
    transformers makes the model, else computed from the sizes."""
    chosen: dict[str, Any] = {}
    for name, default in DESCRIPTION.items():
        given = getattr(options, name)
        chosen[name] = default if given is None else given
    shape, counted = _sizes(options.model, chosen["dtype"])
    if chosen["lora_rank"] is not None:
        shape = shape.with_adapters(chosen["lora_rank"])
    cost = analytic_cost_model(
        shape,
        DEVICES[chosen["device"]],
        options.topology,
        checkpointing=chosen["checkpointing"],
        zero_stage=chosen["zero_stage"],
        expert_ranks=chosen["expert_ranks"],
    )
    if counted is None:
        return cost
    assert cost.activations is not None, "an estimate has them"
    imbalance = 1.0 if cost.experts is None else cost.experts.imbalance
    activations = counted.in_place_of(cost.activations, shape, imbalance)
    return replace(
        cost, activations=activations, token_bytes=activations.token_bytes(activations.as_set)
    )


def _sizes(model: str, dtype: str) -> tuple[ModelShape, "CountedBytes | None"]:
    """Return the sizes of a model, and the bytes that its layers are counted to hold. Raises
    ValueError for a model that is none."""
    if model in MODELS:
        return replace(MODELS[model], dtype_bytes=DTYPES[dtype]), None
    if model in PRESETS:
        raise ValueError(
            f"{model!r} is a cost model: give a model, such as one of {', '.join(MODELS)}, and "
            "--device"
        )
    try:
        from hf_flexseq.hf.trainer.synthetic_models import read_model
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"MODEL={quoted(model)} is none of {', '.join(MODELS)}; others need torch and "
            f"transformers: pip install torch transformers accelerate ({error})"
        ) from error
    return read_model(model, dtype)


# ---- what is printed


def _title(options: Namespace, cost: CostModel) -> str:
    """Describe the model, the ranks, and their memory in a line."""
    assert cost.activations is not None, "checked when it was made"
    host_gib = cost.activations.host_bytes / 2**30
    experts = cost.experts_text(options.topology.world_size, before=", ")
    return (
        f"{options.model or cost.name} on {options.topology}, "
        f"{cost.name}{experts}: {cost.budget_bytes / 2**30:.1f} GiB a rank to plan with, "
        f"model states {_states_gib(options, cost):.1f}; of the host {host_gib:.1f} GiB a rank"
    )


def _states_gib(options: Namespace, cost: CostModel) -> float:
    """Return the GiB of a rank's model states."""
    return (cost.budget_bytes - cost.free_bytes(options.topology.world_size)) / 2**30


def _table(rungs: Sequence[Fit], length: int | None) -> list[str]:
    """Return the lines of the table. length: tokens of the sequence that seconds and bytes are of,
    left out of a rung that does not hold it; None for the longest of each rung."""
    lines = [_line(tuple(COLUMNS), "choice")]
    for rung in rungs:
        cells = [f"{rung.tokens_per_rank:,}", f"{rung.longest:,}", "-", "-", "-"]
        if length is None or length <= rung.longest:
            cells[2:] = [
                f"{rung.seconds:.2f}",
                f"{rung.device_bytes / 2**30:.1f}",
                f"{rung.host_bytes / 2**30:.1f}",
            ]
        lines.append(_line(cells, str(rung.choice)))
    return lines


def _line(cells: Sequence[str], choice: str) -> str:
    """Return one line of the table."""
    return "  ".join([*map(str.rjust, cells, COLUMNS.values()), choice])


def _answer(options: Namespace, cost: CostModel) -> str:
    """Say how the sequence of --length runs fastest, or how many ranks it needs."""
    length = options.length
    found = fastest(cost, options.topology, length)
    if found is not None:
        return (
            f"{length:,} tokens: {found.seconds:.2f} s at {found.device_bytes / 2**30:.1f} GiB "
            f"of the device and {found.host_bytes / 2**30:.1f} of the host, {found.choice}"
        )
    ranks = ranks_for(cost, options.topology, length)
    needs = "no number of ranks holds them" if ranks is None else f"they need {ranks} ranks"
    return f"{length:,} tokens do not fit under any choice here: {needs}"


def _write(
    options: Namespace, cost: CostModel, rungs: Sequence[Fit], lines: Sequence[str]
) -> None:
    """Write the figures as JSON. options.json: a file; `-` is stdout."""
    record = {
        "model": options.model or cost.name,
        "topology": [options.topology.nodes, options.topology.ranks_per_node],
        "cost_model": cost.to_record(),
        "ladder": [asdict(rung) for rung in rungs],
        "next": list(lines),
    }
    if options.length is not None:
        found = fastest(cost, options.topology, options.length)
        record["fastest"] = None if found is None else asdict(found)
    text = json.dumps(record, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    else:
        Path(options.json).write_text(text, encoding="utf-8")
