"""Who is exact? Updates of training stacks on two ranks against one process in float64.

    python scripts/benchmarks/who_is_exact.py --stack trainer --row packed
    python scripts/benchmarks/who_is_exact.py --json who.json

Rows are situations that users meet, columns are stacks, each used as its documentation says (see
exact_peers/): one cell is one run on two CPU processes over gloo. Its figure is

    update    || weights - weights of one process || / || update of one process ||

all weights that learn together, after one optimizer step of SGD (five where a run resumes): the
gradient. Models are tiny and train in float32; one process computes in float64, a document at a
time, without batches, padding or a trainer. Rounding of float32 gives 1e-7 to 2e-6. The row `eval`
has the largest relative error of the evaluation's loss over batch sizes instead.

A cell without a figure says why: `refused` and the first line of a stack's own error (ValueError,
NotImplementedError), `fails` and that of any other error, `hangs` after --seconds (three times as
many for a command), `cannot run here` where it needs what a CPU or gloo has not, or where the
stack has no such thing.

axolotl and ms-swift pin other versions: their first cell makes an environment in
build/exact_peers/STACK with the newest version of the package index (minutes).
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; ranks share the cores

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common import ROOT, argument_parser, machine, table, write_record

sys.path.append(str(ROOT))
from exact_peers import command_lines, huggingface
from exact_peers.situations import RANKS, ROWS, Failed, Weights, reference
from tests.ranks import run_ranks

STACKS = {
    "trainer": "Trainer, DDP",
    "trl": "TRL's SFTTrainer, DDP",
    "alst": "Trainer, DeepSpeed ALST",
    "cp": "Trainer, accelerate's context parallelism",
    "ms_swift": "ms-swift",
    "axolotl": "axolotl",
    "ours": "hf_flexseq",
}
NOWHERE = {
    ("trainer", "all_ranks"): "the Trainer computes a sequence on one rank",
    ("trl", "all_ranks"): "the Trainer computes a sequence on one rank",
    ("trl", "dpo"): "the first column is TRL's DPOTrainer",
}
NEEDS_GPU = re.compile(r"CUDA|GPU|MULTI_CPU|Gloo|flash.attention", re.IGNORECASE)
MISSING = ("ModuleNotFoundError", "ImportError", "PackageNotFoundError")
REFUSALS = ("ValueError", "NotImplementedError", "ValidationError")
EXACT = 2e-6  # of the update, in float32


class Cell(NamedTuple):
    """What one stack makes of one row."""

    kind: str
    """figure, refused, fails, hangs or cannot run here."""
    error: float | None
    """Of the update, or of the evaluation's loss; None without a figure."""
    says: str
    """The first line of a message, or a reason; of a figure the factor, if it is not 1."""

    def shown(self, notes: list[str]) -> str:
        """Return the cell as the table shows it; what it says becomes one of the notes."""
        if self.error is not None:
            shown = f"{self.error:.1e}" if self.error <= EXACT else f"**{self.error:.1e}**"
            return f"{shown} ({self.says})" if self.says else shown
        if self.says not in notes:
            notes.append(self.says)
        return f"*{self.kind}* [{notes.index(self.says) + 1}]"


# ---- a cell


def of_one_process(rank: int, world_size: int, row: str) -> Any:
    return reference(row)


@cache
def one_process(row: str) -> tuple[Weights, Weights, float]:
    """Return the weights before and after in one process, and its loss."""
    return run_ranks(of_one_process, 1, row, seconds=120)[0]


def run(stack: str, row: str, folder: Path, seconds: float) -> tuple[Weights, list[float]]:
    """Return a stack's weights after a row, and its losses of evaluations.

    seconds: for a run; a command has three times as many, as it imports all of its stack. Raises
    Failed, or subprocess.TimeoutExpired.
    """
    if stack in command_lines.PACKAGES:
        return command_lines.trained(stack, row, folder, 3 * seconds)
    try:
        for resumes in (False, True) if row == "resume" else (False,):
            given = (stack, row, folder, resumes)
            results = run_ranks(huggingface.trained, RANKS, *given, seconds=seconds)
    except AssertionError as failure:
        if "did not finish in time" in str(failure):
            raise subprocess.TimeoutExpired(stack, seconds) from None
        raise Failed.says(str(failure), -1) from None
    return results[0]


def cell(stack: str, row: str, seconds: float) -> Cell:
    """Run one stack on one row. seconds: after which it hangs."""
    if (stack, row) in NOWHERE:
        return Cell("cannot run here", None, NOWHERE[stack, row])
    start, wanted, loss = one_process(row)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found, losses = run(stack, row, Path(folder), seconds)
        except subprocess.TimeoutExpired as late:
            return Cell("hangs", None, f"after {late.timeout:.0f} s")
        except Failed as failed:
            return unfinished(*failed.args)
    if row == "eval":
        return Cell("figure", max(abs(one - loss) / loss for one in losses), "")
    update, right = updates(start, wanted, found)
    error = float(np.linalg.norm(update - right) / np.linalg.norm(right))
    return Cell("figure", error, "" if error <= EXACT else factor(start, wanted, found))


def updates(start: Weights, wanted: Weights, found: Weights) -> tuple[np.ndarray, np.ndarray]:
    """Return the updates of a stack and of one process, each all weights in one vector."""
    if found.keys() != wanted.keys():
        raise ValueError(f"other weights than one process has: {found.keys() ^ wanted.keys()}")
    parts = [[(by[name] - start[name]).ravel() for name in start] for by in (found, wanted)]
    update, right = map(np.concatenate, parts)
    return update, right


def factor(start: Weights, wanted: Weights, found: Weights) -> str:
    """Return by which factor the update is too long, and how far it is off without the factor;
    "" where the factor is 1, to a thousandth."""
    update, right = updates(start, wanted, found)
    by = update @ right / (right @ right)
    off = np.linalg.norm(update / by - right) / np.linalg.norm(right)
    return "" if abs(by - 1) < 1e-3 else f"{by:.3g} x the update, direction off by {off:.1e}"


def unfinished(kind: str, line: str) -> Cell:
    """Return the cell of a run that ended with an error of some class; line: its first one."""
    if NEEDS_GPU.search(line) or kind in MISSING:
        return Cell("cannot run here", None, line)
    return Cell("refused" if kind in REFUSALS else "fails", None, f"{kind}: {line}")


# ---- the table


def page(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """Return the table, and below it what cells say, by number. cells: by row and stack."""
    notes: list[str] = []
    lines = [
        (f"{ROWS[row].says} (`{row}`)", *(one.shown(notes) for one in of_row.values()))
        for row, of_row in cells.items()
    ]
    head = ("", *(STACKS[stack] for stack in next(iter(cells.values()))))
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([table(head, lines), "", *numbered])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--stack", nargs="+", choices=STACKS, default=list(STACKS))
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seconds", type=float, default=60, help="after which a cell hangs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(machine("torch", "transformers", "accelerate"), "\n")
    cells: dict[str, dict[str, Cell]] = {row: {} for row in asked.row}
    for stack in asked.stack:
        for row in asked.row:
            began = time.monotonic()
            one = cells[row][stack] = cell(stack, row, asked.seconds)
            took = f"({time.monotonic() - began:.0f} s)"
            said = one.says if one.error is None else f"{one.error:.1e} {one.says}"
            print(f"{stack}, {row}: {one.kind}, {said} {took}", file=sys.stderr, flush=True)
    print(page(cells))
    raw = {row: {s: one._asdict() for s, one in of.items()} for row, of in cells.items()}
    write_record(asked.json, raw)


if __name__ == "__main__":
    main()
