"""Check hf_flexseq on the CUDA GPUs of this machine, and record what was seen.

    python scripts/gpu_check.py [--out FOLDER]        scripts/benchmarks/results by default
    python scripts/gpu_check.py --quick               few plans and rounds, 9 minutes at most
    python scripts/gpu_check.py --parts rates tests
    python scripts/gpu_check.py --rehearse --plans 1  the same on a CPU, with small sizes

    rates          TFLOP/s of attention kernels, by heads, tokens and packs
    split          a long-tailed pack, by the length from which on cuDNN has sequences alone
    cudnn          what cuDNN's plans cost, and its speed on packs
    nccl           what posts cost the host, and whether attention hides transfers
    tests          pytest --device cuda: kernels; without --quick all tests that a GPU can run
    lengths        FlexSeqTrainer against the stock Trainer, on one sequence a step
    layers         ms of four layers of Llama-3.1-8B, by kind of kernel, plain and compiled
    training       FlexSeqTrainer against the stock Trainer, on long-tailed packs
    memory         the memory model against the peak of training steps
    calibration    a cost model that steps have corrected, against these steps
    fused          Triton's kernels for merging and packing against torch's operations
    several        random plans over NCCL, one rank per GPU: DDP and FSDP2; from two GPUs on
    hsdp           and under accelerate's own HSDP, from four GPUs on
    lost           a rank is killed, and the others must name it; from two GPUs on

They run in the order of --parts, by default this one: a GPU that is there for a few minutes leaves
the most evidence. The modules in `gpu_checks/` say what each of them holds against what. A part
that cannot run here says why, and has no share of the minutes. A rehearsal shows that the checks
run, and nothing of a GPU; its page is written only where --out says so.

Every part is a process of its own: one that crashes, hangs or runs out of time is a line of the
page, and the next part runs. The page is a dated file under --out, written again after every part,
and printed at the end; a .log beside it has all that failed parts said. The last line of the page
sums it up for an issue. All parts together take 20 minutes at most, or as many as --minutes says.
A share of them is kept for every part (`SHARES`), and one that needs less leaves the rest to those
after it; a part that had no time says so. Exits with 0 when all checks hold, 1 when one does not
or did not run in time, and 2 without a CUDA GPU.
"""

import argparse
import datetime
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import commit, installed
from gpu_checks.report import (
    CUDNN_PART,
    LOST_PART,
    RANKS_PART,
    Section,
    Setting,
    launch,
    this_script,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts/benchmarks/results"
PLANS, QUICK_PLANS = 200, 8  # for every way of running them
MINUTES, QUICK_MINUTES = 20.0, 9.0  # of all parts together
PACKAGES = (
    *("hf_flexseq", "torch", "triton", "transformers", "accelerate", "flash-attn"),
    *("flash-attn-3", "flash-attn-4", "fla-core", "causal-conv1d", "liger-kernel"),
)

# Where each part is; a process imports that of its own part, and no other.
PARTS = {
    "rates": "rates.rates_section",
    "split": "rates.split_section",
    "cudnn": "rates.cudnn_section",
    "nccl": "nccl.nccl_section",
    "tests": "report.tests_section",
    "lengths": "training.lengths_section",
    "layers": "layers.layers_section",
    "training": "training.training_section",
    "memory": "figures.memory_section",
    "calibration": "figures.calibration_section",
    "fused": "fused.fused_section",
    "several": "several.plans_section",
    "hsdp": "several.hsdp_section",
    "lost": "lost_rank.lost_rank_section",
}

# Minutes that are kept for parts, relative to each other. Guesses, from an H100 where a part has
# run there.
SHARES = {"rates": 0.8, "split": 0.4, "cudnn": 1.0, "nccl": 0.5, "tests": 1.0, "lengths": 1.2}
SHARES |= {"layers": 2.0, "training": 1.6, "memory": 0.6, "calibration": 0.9, "fused": 0.4}
SHARES |= {"several": 4.0, "hsdp": 2.0, "lost": 1.5}
LEAST_GPUS = {"several": 2, "hsdp": 4, "lost": 2}  # other parts need one


def main() -> int:
    """Run what the command line asks for, and return the exit status."""
    asked = parser().parse_args()
    if not asked.rehearse and not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    plans = math.ceil(asked.plans or (QUICK_PLANS if asked.quick else PLANS))
    setting = Setting(rehearse=asked.rehearse, plans=plans, quick=asked.quick)
    if asked.part is not None:
        run_part(asked, setting)
        return 0
    folder = asked.out
    if folder is None and not setting.rehearse:
        folder = RESULTS
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    parts = list(dict.fromkeys(asked.parts))
    page = Page(setting, parts, folder)
    minutes = asked.minutes or (QUICK_MINUTES if asked.quick else MINUTES)
    end = time.monotonic() + 60 * minutes
    for number, name in enumerate(parts):
        print(f"{name} ...", file=sys.stderr, flush=True)
        kept = 60 * minutes * kept_share(parts, number + 1, setting.processes)
        began = time.monotonic()
        section = section_of(name, setting, end - kept - began)
        page.add(name, section, time.monotonic() - began)
    print(page.text(), end="")
    return 0 if page.holds else 1


def kept_share(parts: Sequence[str], first: int, processes: int) -> float:
    """Return the share of all minutes that is kept for the parts from the first of them on.

    processes: GPUs of this machine; what needs more ends at once.
    """
    shares = [SHARES[name] * (LEAST_GPUS.get(name, 1) <= processes) for name in parts]
    return sum(shares[first:]) / max(sum(shares), 1e-9)


class Page:
    """The page of one run, which is written again with every part that has ended."""

    def __init__(self, setting: Setting, asked: list[str], folder: Path | None) -> None:
        """asked: parts, in the order of the page. folder: of the page; None for no file."""
        self._head = heading(setting)
        self._asked = asked
        self._file = None
        if folder is not None:
            self._file = folder / f"{datetime.date.today()}_gpu_check.md"
        self._sections: dict[str, Section] = {}
        self._seconds: dict[str, float] = {}

    def add(self, name: str, section: Section, seconds: float) -> None:
        """Take what a part found in so many seconds, and write the page."""
        self._sections[name] = section
        self._seconds[name] = seconds
        if self._file is None:
            return
        self._file.write_text(self.text())
        if section.said:
            with self._file.with_suffix(".log").open("a") as log:
                log.write(f"# {name}\n{section.said}\n")

    def text(self) -> str:
        """Return the page as far as parts have ended."""
        took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self._seconds.items())
        sections = [section.text() for section in self._sections.values()]
        page = "\n".join([*self._head, *sections, f"\nSeconds of each part: {took}."])
        return f"{page}\n\n    {summary(self._sections, self._asked)}\n"

    @property
    def holds(self) -> bool:
        """True if all checks of all parts hold."""
        return all(section.holds for section in self._sections.values())


def section_of(name: str, setting: Setting, seconds: float) -> Section:
    """Run one part in a process of its own, for at most so many seconds."""
    if seconds <= 0:
        line = "NOT RUN: all minutes were used up; run it alone with --parts"
        return Section(title=name, lines=(line,), holds=False)
    found = launch([sys.executable, *this_script(name, setting)], seconds=seconds, is_part=True)
    if "error" in found:
        line = f"FAILED: {found['error']}"
        return Section(title=name, lines=(line,), holds=False, said=found.get("said", ""))
    return Section.from_record(found)


def summary(sections: Mapping[str, Section], asked: list[str]) -> str:
    """Return the page in one line, to be pasted into an issue."""
    ends: dict[str, list[str]] = {"ok": [], "FAILED": [], "not run": []}
    for name in asked:
        ends[sections[name].end if name in sections else "not run"].append(name)
    found = [f"{end}: {' '.join(names)}" for end, names in ends.items() if names]
    return "; ".join(["gpu_check", devices(), *versions(), *found])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="folder of the page")
    made.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    made.add_argument(
        "--plans",
        type=_above_0,
        help=f"random plans for every way of running them ({PLANS}; with --quick {QUICK_PLANS})",
    )
    made.add_argument("--quick", action="store_true", help="few plans and rounds, in 9 minutes")
    made.add_argument(
        "--minutes",
        type=_above_0,
        help=f"of all parts together ({MINUTES:g}; with --quick {QUICK_MINUTES:g})",
    )
    made.add_argument("--rehearse", action="store_true", help="on a CPU, with small sizes")
    # its own processes
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--sharding", help=argparse.SUPPRESS)
    return made


def _above_0(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def run_part(asked: argparse.Namespace, setting: Setting) -> None:
    """Run one part, or one process of a part, which prints its findings as JSON."""
    if asked.part == RANKS_PART:
        function_of("several.run_ranks")(setting, asked.sharding)
    elif asked.part == LOST_PART:
        function_of("lost_rank.run_rank")(setting)
    elif asked.part == CUDNN_PART:
        function_of("rates.run_cudnn")(setting)
    else:
        print(json.dumps(function_of(PARTS[asked.part])(setting).to_record()))


def function_of(place: str) -> Any:
    """Return a function of the checks. place: its module and its name."""
    module, name = place.split(".")
    return getattr(import_module(f"gpu_checks.{module}"), name)


def heading(setting: Setting) -> list[str]:
    """Return the first lines of the page: the command, the devices, the versions."""
    title = f"# GPU check, {datetime.date.today()}"
    if setting.rehearse:
        title = f"# Rehearsal of the GPU check on a CPU, {datetime.date.today()}"
    command = shlex.join(["python", "scripts/gpu_check.py", *sys.argv[1:]])
    lines = [title, f"\n    {command}", f"\n{devices()}; {', '.join(versions())}"]
    if setting.rehearse:
        lines.append("\nIt says nothing of a GPU.")
    return lines


def devices() -> str:
    """Return the devices, their driver and CUDA in words."""
    if not torch.cuda.is_available():
        return "no GPU"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        driver = subprocess.check_output(query, text=True).strip()
    return (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver}, "
        f"CUDA {torch.version.cuda}"
    )


def versions() -> list[str]:
    """Return the packages that are installed, with their versions, and the commit."""
    found = [f"{package} {version}" for package, version in installed(PACKAGES).items()]
    of_repository = commit()
    return found if of_repository is None else [*found, f"commit {of_repository}"]


if __name__ == "__main__":
    sys.exit(main())
