"""What all benchmarks share: options, Markdown tables, and a record of the raw figures.

Every benchmark prints a page for a reader and, with `--json FILE`, writes what the page was made
of: the raw figures, the command line, the date, the machine and the versions of the libraries.

A benchmark is a program of its own, so that its folder is the first entry of `sys.path`: no file
here may have the name of a module that a benchmark or a library imports.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDED = ("numpy", "torch", "transformers", "accelerate", "deepspeed", "highspy")


# ---- options


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser that shows `description` as it is written, with the option `--json`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the raw figures, the command line, the machine and the versions to FILE",
    )
    return parser


def command_line() -> str:
    """Return the command that started this program, with paths relative to the repository."""
    script = Path(sys.argv[0]).resolve()
    if script.is_relative_to(ROOT):
        script = script.relative_to(ROOT)
    return shlex.join(["python", str(script), *sys.argv[1:]])


# ---- the machine


def cpu_model() -> str:
    """Return the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def machine(*libraries: str) -> str:
    """Return one line: the processor, its cores, and the versions of Python and `libraries`."""
    words = [cpu_model(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    for library in libraries:
        words.append(f"{library} {metadata.version(library)}")
    return ", ".join(words)


def load_average() -> str:
    """Return the load averages of the last 1, 5 and 15 minutes."""
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


# ---- another trainer


def alst_options(ranks: int, attention: str) -> dict[str, Any]:
    """Connect the ranks; return the training arguments of DeepSpeed's ALST over all of them.

    attention: the model's.
    """
    import deepspeed
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    deepspeed.init_distributed("gloo")
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation=attention
    )
    config = ParallelismConfig(sp_backend="deepspeed", sp_size=ranks, sp_handler=handler)
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}
    return {"parallelism_config": config, "deepspeed": zero | dict.fromkeys(names, "auto")}


# ---- the record


def write_record(path: Path | None, figures: Any) -> None:
    """Write the raw figures of a run to `path`, with what a reader needs to repeat it.

    path: None where no `--json` was given, and nothing is written.
    figures: numbers, strings, lists and dicts of them; units stand in the names.
    """
    if path is None:
        return
    record = {
        "command": command_line().replace(str(path), path.name),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "load": list(os.getloadavg()),
            "system": platform.system(),
            "ranks": os.environ.get("WORLD_SIZE", "1"),
            "ranks_per_node": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        },
        "versions": {"python": platform.python_version()} | installed(RECORDED),
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of those `libraries` that are installed."""
    versions = {}
    for library in libraries:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """Return the repository's commit, "-dirty" behind it where files differ; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# ---- tables


def table_head(columns: Sequence[str], numbers: Sequence[int] = ()) -> str:
    """Return the first two lines of a Markdown table.

    numbers: indices of the columns that hold numbers, which stand at the right.
    """
    rules = ["---:" if index in numbers else "---" for index in range(len(columns))]
    return f"{table_row(columns)}\n|{'|'.join(rules)}|"


def table_row(cells: Iterable[object]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def table(
    columns: Sequence[str], rows: Iterable[Iterable[object]], numbers: Sequence[int] = ()
) -> str:
    """Return a whole Markdown table."""
    return "\n".join([table_head(columns, numbers), *(table_row(row) for row in rows)])


# ---- figures


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> list[float]:
    """Return the ratios of neighbouring runs, round by round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Return "median (lowest to highest)"."""
    ordered = sorted(values)
    middle = statistics.median(ordered)
    return f"{middle:.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"
