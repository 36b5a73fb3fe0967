"""Check hf_flexseq on the CUDA GPUs of this machine, and record what was seen.

    python scripts/gpu_check.py [--out FOLDER]        scripts/benchmarks/results by default
    python scripts/gpu_check.py --quick               few plans and rounds, 5 minutes at most
    python scripts/gpu_check.py --parts kernels threads
    python scripts/gpu_check.py --rehearse --plans 2  the same on a CPU, with small sizes

    kernels        every attention kernel in bfloat16 against float32
    fused          Triton's kernels for merging and packing against torch's operations
    speeds         TFLOP/s of attention kernels, FlashAttention-3 and -4 where they are installed
    kinds          layers with windows, chunks, sinks or softcaps, with ranks that are threads
    recurrent      recurrent layers, with ranks that are threads
    scans          milliseconds of recurrent layers' scans and summaries
    threads        random plans of all strategies on one GPU, with ranks that are threads
    pipelines      pipelines on one GPU, with ranks that are threads
    several        the same plans over NCCL, one rank per GPU: DDP and FSDP2; from two GPUs on
    hsdp           and under accelerate's own HSDP, from four GPUs on
    lost           a rank is killed, and the others must name it; from two GPUs on
    calibration    a cost model that steps have corrected, against these steps
    memory         the memory model against the peak of training steps
    host           the host's share of a layer, for one rank of eight
    training       FlexSeqTrainer against the stock Trainer, on packs
    lengths        the same on one sequence a step, of 8,192 to 65,536 tokens
    images         the same on images: a tower that is trained, or frozen and ahead of the step

The modules in `gpu_checks/` say what each of them holds against what. A part that cannot run here
says why. A rehearsal shows that the checks run, and nothing of a GPU; its page is written only
where --out says so.

Every part is a process of its own: one that crashes, hangs or runs out of time is a line of the
page, and the next part runs. Parts that time nothing run side by side, before the others, which
run in the order of --parts. The page is a dated file under --out, written again after every part,
and printed at the end; a .log beside it has all that failed parts said. The last line of the page
sums it up for an issue. All parts together take 30 minutes at most, or as many as --minutes says.
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
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import commit, installed
from gpu_checks.report import (
    LOST_PART,
    RANKS_PART,
    TRAIN_PART,
    Section,
    Setting,
    launch,
    this_script,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts/benchmarks/results"
PLANS, QUICK_PLANS = 200, 8  # for every way of running them
MINUTES, QUICK_MINUTES = 30.0, 5.0  # of all parts together
PACKAGES = (
    *("hf_flexseq", "torch", "triton", "transformers", "accelerate", "flash-attn"),
    *("flash-attn-3", "flash-attn-4", "fla-core", "causal-conv1d", "liger-kernel"),
)

# Parts that time nothing, and take little memory.
UNTIMED = frozenset(("kernels", "kinds", "recurrent", "threads", "pipelines"))

# Where each part is; a process imports that of its own part, and no other.
PARTS = {
    "kernels": "kernels.kernel_errors_section",
    "fused": "fused.fused_section",
    "speeds": "kernels.kernel_seconds_section",
    "kinds": "kinds.kinds_section",
    "recurrent": "recurrent.recurrent_section",
    "scans": "recurrent.scans_section",
    "threads": "one_device.plans_section",
    "pipelines": "one_device.pipelines_section",
    "several": "several.plans_section",
    "hsdp": "several.hsdp_section",
    "lost": "lost_rank.lost_rank_section",
    "calibration": "figures.calibration_section",
    "memory": "figures.memory_section",
    "host": "figures.host_section",
    "training": "training.training_section",
    "lengths": "training.lengths_section",
    "images": "images.images_section",
}

# How the minutes are kept for parts, relative to each other; those that run side by side take the
# largest of theirs. Guesses, from an H100 where a part has run there.
SHARES = {"several": 6, "hsdp": 3, "lost": 2, "scans": 3, "calibration": 3, "training": 5}
SHARES |= {"lengths": 4, "images": 5, "recurrent": 9, "threads": 8, "pipelines": 4}
LEAST_GPUS = {"several": 2, "hsdp": 4, "lost": 2}  # other parts need one


def main() -> int:
    """Run what the command line asks for, and return the exit status."""
    asked = parser().parse_args()
    if not asked.rehearse and not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    plans = asked.plans or (QUICK_PLANS if asked.quick else PLANS)
    setting = Setting(rehearse=asked.rehearse, plans=plans, quick=asked.quick)
    if asked.part is not None:
        run_part(asked, setting)
        return 0
    folder = asked.out
    if folder is None and not setting.rehearse:
        folder = RESULTS
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    page = Page(setting, asked.parts, folder)
    minutes = asked.minutes or (QUICK_MINUTES if asked.quick else MINUTES)
    stages = stages_of(asked.parts)
    end = time.monotonic() + 60 * minutes
    for number, stage in enumerate(stages):
        kept = 60 * minutes * kept_share(stages, number + 1, setting.processes)
        limit = end - kept - time.monotonic()

        def run(name: str, limit: float = limit) -> None:
            print(f"{name} ...", file=sys.stderr, flush=True)
            page.add(name, section_of(name, setting, limit))

        with ThreadPoolExecutor(len(stage)) as pool:
            list(pool.map(run, stage))
    print(page.text(), end="")
    return 0 if page.holds else 1


def stages_of(parts: Sequence[str]) -> list[list[str]]:
    """Return what runs side by side, one after the other: first all parts that time nothing."""
    untimed = [name for name in parts if name in UNTIMED]
    stages = [[name] for name in parts if name not in UNTIMED]
    return [untimed, *stages] if untimed else stages


def kept_share(stages: Sequence[Sequence[str]], first: int, processes: int) -> float:
    """Return the share of all minutes that is kept for the stages from the first of them on.

    processes: GPUs of this machine; what needs more ends at once.
    """
    shares = []
    for stage in stages:
        can_run = [name for name in stage if LEAST_GPUS.get(name, 1) <= processes]
        shares.append(max((SHARES.get(name, 1) for name in can_run), default=0))
    return sum(shares[first:]) / max(sum(shares), 1)


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
        self._lock = threading.Lock()

    def add(self, name: str, section: Section) -> None:
        """Take what a part found, and write the page."""
        with self._lock:
            self._sections[name] = section
            if self._file is None:
                return
            self._file.write_text(self.text())
            if section.said:
                with self._file.with_suffix(".log").open("a") as log:
                    log.write(f"# {name}\n{section.said}\n")

    def text(self) -> str:
        """Return the page as far as parts have ended."""
        sections = [self._sections[name].text() for name in self._done()]
        page = "\n".join([*self._head, *sections])
        return f"{page}\n\n    {summary(self._sections, self._asked)}\n"

    def _done(self) -> list[str]:
        return [name for name in self._asked if name in self._sections]

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
    made.add_argument("--parts", nargs="+", action=_Once, choices=list(PARTS), default=list(PARTS))
    made.add_argument(
        "--plans",
        type=_more_than_none(int),
        help=f"random plans for every way of running them ({PLANS}; with --quick {QUICK_PLANS})",
    )
    made.add_argument("--quick", action="store_true", help="few plans and rounds, in 5 minutes")
    made.add_argument(
        "--minutes",
        type=_more_than_none(float),
        help=f"of all parts together ({MINUTES:g}; with --quick {QUICK_MINUTES:g})",
    )
    made.add_argument("--rehearse", action="store_true", help="on a CPU, with small sizes")
    # its own processes
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--sharding", help=argparse.SUPPRESS)
    made.add_argument("--trainer", help=argparse.SUPPRESS)
    return made


class _Once(argparse.Action):
    """Takes each of several values once, in the order given."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


def _more_than_none(kind: type[int] | type[float]) -> Any:
    """Return what reads a number above 0."""

    def number(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
        return value

    return number


def run_part(asked: argparse.Namespace, setting: Setting) -> None:
    """Run one part, or one process of a part, which prints its findings as JSON."""
    if asked.part == RANKS_PART:
        function_of("several.run_ranks")(setting, asked.sharding)
    elif asked.part == LOST_PART:
        function_of("lost_rank.run_rank")(setting)
    elif asked.part == TRAIN_PART:
        function_of("training.run_training")(setting, asked.trainer)
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
