"""`plan`: which ranks work together on which sequences, and the plans that other commands need."""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hf_flexseq.base.lengths import (
    Patches,
    parse_groups,
    parse_images,
    parse_lengths,
    read_lengths,
)
from hf_flexseq.base.reading import read_text
from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.base.values import in_errors, several
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.presets import PRESETS, load_cost_model
from hf_flexseq.plan import Plan
from hf_flexseq.plan.files import PlanOfStages
from hf_flexseq.plan.images import (
    IMAGE,
    VIDEO,
    ImagePlan,
    ImageSize,
    TowerLoad,
    frames_of_parts,
)
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.plan.units import ROOT, Unit
from hf_flexseq.planner import make_plan
from hf_flexseq.planner.images import plan_images
from hf_flexseq.planner.shared_rows import SharedRows


def plan(options: Namespace) -> None:
    """Plan every step of the lengths, write the plans, and print a line for each."""
    cost = load_cost_model(options.cost_model)
    rows = read_rows(options.lengths, options)
    plans = []
    towers = []
    for of_step in in_steps(rows, options):
        plans.append(
            planned(of_step, options, cost, planner=options.planner, sp_degree=options.sp_degree)
        )
        of_images = planned_images(of_step, options, cost)
        towers.append(None if of_images is None else TowerLoad.of(of_images))
    if options.json is not None:
        _write(options.json, plans)
    if options.json != "-":
        for number, (made, tower) in enumerate(zip(plans, towers, strict=True)):
            milliseconds = 1e3 * made.planning_s
            print(f"step {number}: {summary(made, tower)}, planned in {milliseconds:.0f} ms")
            if number == 0:
                for note in made.notes:
                    print(f"    {note}")


def read_rows(path: str, options: Namespace) -> SharedRows:
    """Return the rows of a file of lengths, of groups that share prefixes, or with images."""
    if path == "-" or (Path(path).is_file() and Path(path).suffix != ".parquet"):
        return parse_rows(text_of(path, options), path, options)
    return SharedRows(rows=tuple(read_lengths(path, options.column, options.limits)))


def text_of(path: str, options: Namespace) -> str:
    """Return the text of a file; `-` is stdin. Raises ValueError that names the file."""
    with in_errors(path):
        return read_text(path, options.limits)


def parse_rows(text: str, path: str, options: Namespace) -> SharedRows:
    """Return the rows of the text of such a file. Raises ValueError that names the file."""
    with in_errors(path):
        pictured = None if options.column else parse_images(text, options.limits)
        if pictured is not None:
            return _with_images(pictured, options)
        groups = None if options.column else parse_groups(text, options.limits)
        if groups is None:
            return SharedRows(rows=tuple(parse_lengths(text, options.column, options.limits)))
    rows: list[int] = []
    units = []
    for prefix, branches in groups:
        first = len(rows)
        rows += [prefix + tokens for tokens in branches]
        if len(branches) > 1:
            nodes = [(ROOT, prefix), *((0, tokens) for tokens in branches)]
            ends = [(first + index, index + 1) for index in range(len(branches))]
            units.append(Unit.of(nodes, ends))
    options.limits.refuse_above("lengths", len(rows), f"has {len(rows):,} rows")
    return SharedRows(rows=tuple(rows), units=tuple(units))


def _with_images(
    pictured: Sequence[tuple[int, Sequence[Patches]]], options: Namespace
) -> SharedRows:
    """Return rows of tokens of text and images. Raises ValueError without a tower."""
    if options.cost_model is None:
        raise ValueError(
            "holds images: give --cost-model, whose tower says how many patches are a token"
        )
    cost = load_cost_model(options.cost_model)
    if cost.tower is None:
        able = ", ".join(name for name, model in PRESETS.items() if model.tower is not None)
        raise ValueError(
            f"holds images, and the cost model {cost.name!r} has no vision tower: give "
            f"--cost-model one of {able}, or what `flexseq calibrate` writes for a model with one"
        )
    rows = []
    images: list[ImageSize] = []
    for row, (text, own) in enumerate(pictured):
        tokens = [cost.tower.tokens(one.patches) for one in own]
        rows.append(text + sum(tokens))
        for one, count in zip(own, tokens, strict=True):
            parts = frames_of_parts(one.frames or 1, one.patches // (one.frames or 1))
            number = len(images) + len(parts)
            options.limits.refuse_above("lengths", number, f"has {number:,} images and parts")
            images += _parts(one, parts, row, count)
    return SharedRows(rows=tuple(rows), images=tuple(images))


def _parts(one: Patches, parts: Sequence[int], row: int, tokens: int) -> Iterator[ImageSize]:
    """Yield an image of a row, or the parts of a video, which ranks encode independently. parts:
    frames of each. tokens: of the whole image or video."""
    frames = one.frames or 1
    stop = 0
    for count in parts:
        start, stop = stop, stop + count
        yield ImageSize(
            sequence=row,
            modality=IMAGE if one.frames is None else VIDEO,
            tokens=tokens * stop // frames - tokens * start // frames,
            patches=one.patches * count // frames,
            pairs=one.pairs * count // frames,
            data_bytes=0,  # no pixels
        )


def in_steps(rows: SharedRows, options: Namespace) -> Iterator[SharedRows]:
    """Return the rows of each optimizer step; the last one may hold fewer."""
    count = len(rows.rows)
    size = min(options.sequences_per_step or count, count)
    options.limits.refuse_above(
        "sequences",
        size,
        f"{size:,} sequences in one step: --sequences-per-step makes several steps of them",
    )
    return (rows.part(at, at + size) for at in range(0, count, size))


def planned(
    step: SharedRows,
    options: Namespace,
    cost: CostModel,
    *,
    planner: str,
    sp_degree: int | None = None,
) -> Plan:
    """Plan one step as the options say; planners of published systems plan rows by themselves."""
    of_images = planned_images(step, options, cost)
    return make_plan(
        step.rows,
        options.topology,
        cost,
        replace(plan_options(options), planner=planner, sp_degree=sp_degree),
        units=step.units if PLANNERS[planner].takes_units else (),
        held_tokens=0 if of_images is None else of_images.held_tokens(cost.token_bytes),
    )


def planned_images(step: SharedRows, options: Namespace, cost: CostModel) -> ImagePlan | None:
    """Return how the images of a step are encoded, whatever plans its sequences; None without
    images."""
    if not step.images or cost.tower is None:
        return None
    cost.check_images(step.images)
    return plan_images(
        step.images, step.rows, cost.tower, options.topology, cost, plan_options(options)
    )


def plan_options(options: Namespace) -> PlanOptions:
    """Return the options that all planners of a command have in common."""
    return PlanOptions(
        strategy=options.strategy,
        max_tokens_per_rank=options.max_tokens_per_rank,
        sync=options.sync,
    )


def summary(made: Plan | PlanOfStages, tower: TowerLoad | None = None) -> str:
    """Return a plan in one line: its contents, its parts, and its predicted seconds, including the
    tower's."""
    tokens = several(sum(made.lengths), "token")
    contents = f"{several(len(made.lengths), 'sequence')}, {tokens}"
    if not isinstance(made, Plan):
        return f"{contents} in {made.how} by {made.schedule}, predicted {made.objective_s:.3f} s"
    if made.units:
        rows = sum(len(unit.rows) for unit in made.units)
        contents += (
            f" ({rows:,} of them share prefixes in {len(made.units):,} units, which spares "
            f"{made.tokens_spared:,} tokens)"
        )
    seconds = f"{made.objective_s:.3f} s ({100 * _gap(made):.1f} % above the bound)"
    if tower is not None:
        contents += f" with {several(tower.images, 'image')}"
        seconds = (
            f"{made.objective_s + tower.seconds:.3f} s: {seconds} and {tower.seconds:.3f} s "
            f"of the tower (imbalance {tower.imbalance:.3f})"
        )
        if tower.forwards > 1:
            seconds += ", which runs forward twice: its graph is not kept"
    return (
        f"{contents}, {len(made.micro_batches)} micro-batch(es) by {made.planner}, "
        f"predicted {seconds}"
    )


def _gap(made: Plan) -> float:
    """Return the share by which a plan's seconds exceed their lower bound, 0 without a bound."""
    if made.lower_bound_s < 1e-9:
        return 0.0
    return made.objective_s / made.lower_bound_s - 1


def _write(path: str, plans: Sequence[Plan]) -> None:
    """Write one plan as JSON, several as JSON lines. path: a file; `-` is stdout."""
    text = "".join(plan.to_json() + "\n" for plan in plans)
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
