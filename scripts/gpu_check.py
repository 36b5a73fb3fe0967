"""Check hf_flexseq on the CUDA GPUs of this machine, and record what was seen.

    python scripts/gpu_check.py [--out FOLDER]        scripts/benchmarks/results by default
    python scripts/gpu_check.py --parts kernels threads
    python scripts/gpu_check.py --rehearse --plans 2  the same on a CPU, with small sizes

    kernels        every attention kernel in bfloat16 against float32
    fused          Triton's kernels for merging and packing against torch's operations
    speeds         TFLOP/s of attention kernels, FlashAttention-3 and -4 where they are installed
    kinds          layers with windows, chunks, sinks or softcaps, with ranks that are threads
    recurrent      recurrent layers, with ranks that are threads
    threads        random plans of all strategies on one GPU, with ranks that are threads
    pipelines      pipelines on one GPU, with ranks that are threads
    several        the same plans over NCCL, one rank per GPU: DDP and FSDP2; from two GPUs on
    hsdp           and under accelerate's own HSDP, from four GPUs on
    lost           a rank is killed, and the others must name it; from two GPUs on
    calibration    a fitted cost model against micro-batches held out of the fit
    memory         the memory model against the peak of training steps
    host           the host's share of a layer, for one rank of eight
    training       FlexSeqTrainer against the stock Trainer

The modules in `gpu_checks/` say what each of them holds against what. A part that cannot run here
says why. A rehearsal shows that the checks run, and nothing of a GPU; its page is written only
where --out says so.

The page is printed and written to a dated file under --out. Exits with 0 when all checks hold, 1
when one does not, and 2 without a CUDA GPU.
"""

import argparse
import datetime
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_checks import (
    figures,
    fused,
    kernels,
    kinds,
    lost_rank,
    one_device,
    recurrent,
    several,
    training,
)
from gpu_checks.report import Section, Setting, launch, this_script

RESULTS = Path(__file__).resolve().parent / "benchmarks/results"
PLANS = 200
PART_S = 7200.0  # after which a part is given up

PARTS: dict[str, Callable[[Setting], Section]] = {
    "kernels": kernels.kernel_errors_section,
    "fused": fused.fused_section,
    "speeds": kernels.kernel_seconds_section,
    "kinds": kinds.kinds_section,
    "recurrent": recurrent.recurrent_section,
    "threads": one_device.plans_section,
    "pipelines": one_device.pipelines_section,
    "several": several.plans_section,
    "hsdp": several.hsdp_section,
    "lost": lost_rank.lost_rank_section,
    "calibration": figures.calibration_section,
    "memory": figures.memory_section,
    "host": figures.host_section,
    "training": training.training_section,
}


def main() -> int:
    """Run what the command line asks for, and return the exit status."""
    asked = parser().parse_args()
    if not asked.rehearse and not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    setting = Setting(rehearse=asked.rehearse, plans=asked.plans)
    if asked.part is not None:
        run_part(asked, setting)
        return 0
    sections = []
    for name in asked.parts:
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, *this_script(name, setting)]
        found = launch(command, seconds=PART_S)
        if "error" in found:
            section = Section(title=name, lines=(f"FAILED: {found['error']}",), holds=False)
        else:
            section = Section.from_record(found)
        sections.append(section)
    page = "\n".join([*heading(setting), *(section.text() for section in sections)])
    print(page)
    folder = asked.out
    if folder is None and not setting.rehearse:
        folder = RESULTS
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{datetime.date.today()}_gpu_check.md").write_text(page + "\n")
    return 0 if all(section.holds for section in sections) else 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="folder of the page")
    made.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    made.add_argument(
        "--plans", type=int, default=PLANS, help="random plans for every way of running them"
    )
    made.add_argument("--rehearse", action="store_true", help="on a CPU, with small sizes")
    # its own processes
    made.add_argument("--part", help=argparse.SUPPRESS)
    made.add_argument("--sharding", help=argparse.SUPPRESS)
    made.add_argument("--trainer", help=argparse.SUPPRESS)
    return made


def run_part(asked: argparse.Namespace, setting: Setting) -> None:
    """Run one part, or one process of a part, which prints its findings as JSON."""
    match asked.part:
        case several.RANKS_PART:
            several.run_ranks(setting, asked.sharding)
        case lost_rank.LOST_PART:
            lost_rank.run_rank(setting)
        case training.TRAIN_PART:
            training.run_training(setting, asked.trainer)
        case name:
            print(json.dumps(PARTS[name](setting).to_record()))


def heading(setting: Setting) -> list[str]:
    """Return the first lines of the page: the command, the devices, the versions."""
    command = shlex.join(["python", "scripts/gpu_check.py", *sys.argv[1:]])
    if setting.rehearse:
        return [
            f"# Rehearsal of the GPU check on a CPU, {datetime.date.today()}",
            f"\n    {command}",
            f"\nIt says nothing of a GPU. torch {torch.__version__}",
        ]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        driver = subprocess.check_output(query, text=True).strip()
    return [
        f"# GPU check, {datetime.date.today()}",
        f"\n    {command}",
        f"\n{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver}, torch "
        f"{torch.__version__}, CUDA {torch.version.cuda}",
    ]


if __name__ == "__main__":
    sys.exit(main())
