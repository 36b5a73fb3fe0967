"""The two runs of a case.

A stock run is kept for the life of the process, and serves every case that differs in nothing
that the stock trainer reads. Models here have thousands of weights, so that all runs together take
a few megabytes.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.state import AcceleratorState, GradientState

from tests.differential.case import Case, make_trainer
from tests.hf.trainers import Run, assert_logged_alike, trained, weights_apart
from tests.ranks import run_cases

_stock_runs: dict[Any, tuple[Case, Run]] = {}  # the case keeps the objects of its key alive


def run(rank: int, world_size: int, case: Case, folder: Path, is_ours: bool = True) -> Run:
    """Train the trainer of a case, stock or ours, on this rank."""
    datasets.disable_progress_bars()
    begin_anew(0)
    with case.around() if is_ours else nullcontext():
        trainer = make_trainer(case, folder, is_ours=is_ours, ranks=world_size)
        if is_ours:
            case.prepare(trainer)
        return trained(trainer, evaluates=case.evaluates)


def begin_anew(seed: int) -> None:
    """Have a training begin as in a process of its own, whatever trainer has run in this one."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(seed)


def stock_run(case: Case, folder: Path) -> Run:
    """Return the run of the stock trainer of a case in one process."""
    parts = (case.base, case.model, case.of_model, case.settings, case.stock_settings)
    key = _key((*parts, case.stock_loss, case.batch, case.evaluates))
    if key not in _stock_runs:
        _stock_runs[key] = case, run(0, 1, case, folder, is_ours=False)
    return _stock_runs[key][1]


def _key(value: Any) -> Any:
    """Return what is equal for equal plain values, and otherwise for one and the same object
    alone."""
    if isinstance(value, Mapping):
        return tuple((name, _key(value[name])) for name in sorted(value))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_key, value))
    if isinstance(value, functools.partial):
        return _key((value.func, value.args, value.keywords))
    if isinstance(value, str | int | float | None):
        return type(value), value
    return "id", id(value)


def here(case: Case, folder: Path) -> tuple[Run, Run]:
    """Return the runs of stock and ours of a case, both in this process."""
    return stock_run(case, folder), run(0, 1, case, folder)


def both(
    cases: Mapping[Any, Case], folder: Path, *, ranks: int = 2, **options: Any
) -> Iterator[tuple[Any, Run, list[Run]]]:
    """Yield the name of each case, the run of its stock trainer in one process, and those of ours
    by rank. options: of `run_ranks`."""
    by_case = run_cases(run, ranks, [(case, folder) for case in cases.values()], **options)
    for (name, case), ours in zip(cases.items(), by_case, strict=True):
        yield name, stock_run(case, folder), ours


def assert_alike(
    cases: Mapping[Any, Case],
    folder: Path,
    *,
    weights: float,
    figures: Sequence[str] = ("loss",),
    rel: float = 1e-5,
    **options: Any,
) -> None:
    """Compare ours of each case on each rank with the stock trainer in one process.

    weights: bound of their difference. figures: of the log. options: of `both`.
    """
    for name, stock, by_rank in both(cases, folder, **options):
        for ours in by_rank:
            assert weights_apart(stock, ours) < weights, name
            assert_logged_alike(stock, ours, figures, rel=rel)


def both_on_ranks(
    cases: Mapping[Any, Case], folder: Path, *, ranks: int = 2, **options: Any
) -> Iterator[tuple[Any, Run, Run]]:
    """Yield, for each case and each rank, the name of the case and the runs of stock and ours: for
    losses that depend on a rank's own batch. options: of `run_ranks`."""
    arguments = [(case, folder, is_ours) for case in cases.values() for is_ours in (False, True)]
    by_case = run_cases(run, ranks, arguments, **options)
    for name, wanted, found in zip(cases, by_case[::2], by_case[1::2], strict=True):
        for stock, ours in zip(wanted, found, strict=True):
            yield name, stock, ours
