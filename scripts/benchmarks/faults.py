"""What becomes of a training job of which one rank is lost.

    python scripts/benchmarks/faults.py                  every fault, under every kind of sharding
    python scripts/benchmarks/faults.py --kinds DDP      under one of them

A rank is killed (kill -9), stopped (kill -STOP) or raises an exception in the middle of a forward.
Each row is such a job, and says

    others ended   seconds after the fault until all other ranks have ended by themselves
    they say       the last line of the first of them, which should name the lost rank
    left           processes (ranks, planners, workers of dataloaders) that are there seconds after
                   all ranks have ended; a stopped rank is killed then, as its launcher would do
    resumed        whether the losses of all steps, after the job was started again from its last
                   checkpoint, are those of a job that nothing happened to

All ranks are on this machine, over gloo, with a worker for their dataloader and a planner beside
rank 0. A job of plain FSDP2 is not resumed: on CPUs transformers cannot. Exits with 1 where a rank
hung or did not name the lost one, a process was left, or losses differ.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from common import (
    ROOT,
    argument_parser,
    load_average,
    machine,
    table_head,
    table_row,
    write_record,
)
from forked import children, main_or_rank, reap, start_ranks
from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.distributed.hosts import ERROR_LINE, last_error

sys.path.append(str(ROOT))
from tests.hf.tiny import documents, tiny_llama

FAULTS = ("killed", "stopped", "raises")
STEPS = 10
FAULT_STEP = 5
SAVE_STEPS = 2
TIMEOUT_S = 8  # of every exchange, as `ddp_timeout`
PATIENCE_S = TIMEOUT_S + 40  # for the others to end
LINGER_S = 12  # for planners and workers to end; a worker looks for its parent every 5 s
MESSAGE_CHARACTERS = 150  # that are shown
COLUMNS = ("job", "lost rank", "fault", "others ended, s", "they say", "left", "resumed")
MOST_TOKENS = 64  # of a document

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 3},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A way of spreading a model over ranks."""

    ranks: int = 2
    options: dict[str, Any]
    """Of `FlexSeqConfig`."""
    resumes: bool = True


KINDS = {
    "DDP": Kind(options={}),
    "FSDP2": Kind(options={"save_strategy": "no"}, resumes=False),
    "ZeRO-3": Kind(options={"deepspeed": ZERO3}),
    "pipeline": Kind(options={"pipeline_parallel_size": 2}),
    "pipeline, FSDP2": Kind(
        ranks=4,
        options={"pipeline_parallel_size": 2, "fsdp": True, "fsdp_config": {"version": 2}},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to one rank."""

    kind: str
    rank: int
    step: int = FAULT_STEP
    """Of the optimizer, counted from 0."""


# ---- a rank


def model_of(kind: str, folder: Path) -> torch.nn.Module:
    """Return a model of two layers. folder: of the whole job; keeps the weights for FSDP2."""
    if kind != "FSDP2":
        return tiny_llama(torch.float32)
    return LlamaForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(fsdp_size=KINDS[kind].ranks)
    )


def train(rank: int, *, kind: str, folder: Path, fault: Fault | None, resume: bool) -> None:
    """Train on one rank and write the losses that were logged, by rank 0."""
    if "deepspeed" in KINDS[kind].options:
        import deepspeed

        deepspeed.init_distributed("gloo")
    options = {
        "save_strategy": "steps",
        "save_steps": SAVE_STEPS,
        "logging_steps": 1,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lookahead": 3,
        "max_tokens_per_rank": MOST_TOKENS,
        "cost_model": "estimate",
        "dataloader_num_workers": 1,
        "ddp_timeout": TIMEOUT_S,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        **KINDS[kind].options,
    }
    trainer = FlexSeqTrainer(
        model=model_of(kind, folder),
        args=FlexSeqConfig(output_dir=str(folder / "run"), **options),
        train_dataset=documents(lengths(STEPS * 2 * KINDS[kind].ranks)),
    )
    if fault is not None and fault.rank == rank:
        arrange(fault, trainer, folder)
    trainer.train(resume_from_checkpoint=resume)
    if rank == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        (folder / "losses.json").write_text(json.dumps(losses))


def lengths(count: int) -> list[int]:
    """Return the tokens of documents, most of them short, the same every time."""
    draw = random.Random(0)
    return [min(MOST_TOKENS, max(2, int(draw.lognormvariate(3, 1)))) for _ in range(count)]


def arrange(fault: Fault, trainer: FlexSeqTrainer, folder: Path) -> None:
    """Let a fault happen to this rank."""

    def happen() -> None:
        if trainer.state.global_step != fault.step:
            return
        (folder / "fault").write_text(str(time.time()))
        match fault.kind:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raises":
                raise ValueError("this rank has a fault of its own")

    for layer in trainer.model.model.layers:
        if next(layer.parameters(), None) is not None:  # one that this rank has
            layer.register_forward_hook(lambda *_: happen())


# ---- a job


def run(kind: str, folder: Path, *, fault: Fault | None = None, resume: bool = False) -> list[int]:
    """Start a job and return the numbers of its processes, by rank."""
    work = partial(train, kind=kind, folder=folder, fault=fault, resume=resume)
    return start_ranks(KINDS[kind].ranks, work, folder, TIMEOUT_S)


def wait(pids: list[int], seconds: float) -> dict[int, float]:
    """Return when each process had ended, by its number; those that have not after so many seconds
    are left out."""
    ended: dict[int, float] = {}
    deadline = time.time() + seconds
    while len(ended) < len(pids) and time.time() < deadline:
        for pid in pids:
            if pid not in ended and os.waitpid(pid, os.WNOHANG)[0]:
                ended[pid] = time.time()
        time.sleep(0.02)
    return ended


def losses_of(kind: str, folder: Path, *, resume: bool = False) -> list[float] | None:
    """Run a job to its end and return its losses; None where it does not come to its end."""
    pids = run(kind, folder, resume=resume)
    ended = wait(pids, 120)
    for pid in pids:
        if pid not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    file = folder / "losses.json"
    return json.loads(file.read_text()) if file.exists() else None


def folder_of(kind: str, root: Path, name: str) -> Path:
    """Return a new folder for a job, with what its ranks want to find there."""
    folder = root / name
    folder.mkdir()
    if kind == "FSDP2":
        model_of("DDP", folder).save_pretrained(folder / "model")
    return folder


def faulty_run(kind: str, fault: Fault, folder: Path) -> dict[str, Any]:
    """Run a job with a fault to its end, kill what does not end, and return what was seen."""
    pids = run(kind, folder, fault=fault)
    others = [pid for rank, pid in enumerate(pids) if rank != fault.rank]
    ended = wait(others, PATIENCE_S + 20)  # until the fault, too
    happened = float((folder / "fault").read_text())
    lost = pids[fault.rank]
    found: dict[str, Any] = {"seconds": None, "hung": len(others) - len(ended)}
    if not found["hung"]:
        found["seconds"] = max(ended.values()) - happened
    for pid in (*others, lost):
        if pid not in ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    speaker = 0 if fault.rank else 1
    found["message"] = last_error((folder / f"rank{speaker}.log").read_text())
    is_error = ERROR_LINE.match(found["message"]) is not None  # else the last lines
    names_it = re.search(rf"\brank {fault.rank}\b", found["message"]) is not None
    found["named"] = is_error and names_it
    found["left_s"], found["left"] = left_over()
    return found


def is_bad(found: dict[str, Any]) -> bool:
    """Tell if a job did not end as it should."""
    is_unequal = found.get("resumed") is False
    return bool(found["hung"] or found["left"] or is_unequal or not found["named"])


def left_over() -> tuple[float, list[str]]:
    """Wait for processes that are left of a job, and end those that stay.

    Returns after how many seconds the last one ended by itself, and what those that stayed ran.
    """
    began = time.time()
    reap()
    while (found := children()) and time.time() < began + LINGER_S:
        time.sleep(0.05)
        reap()
    seconds = time.time() - began
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    while children():
        time.sleep(0.05)
    reap()
    return seconds, list(found.values())


# ---- the tables


def fault_rows(kinds: list[str], faults: list[str], root: Path) -> list[dict[str, Any]]:
    """Run every fault under every kind of sharding, on the first and on the last rank; print a
    table."""
    print(table_head(COLUMNS, numbers=(3,)))
    rows = []
    for kind in kinds:
        wanted = losses_of(kind, folder_of(kind, root, f"{kind} whole"))
        assert wanted is not None, f"a job without a fault failed: see {root}/{kind} whole"
        left_over()
        for rank in (0, KINDS[kind].ranks - 1):
            for name in faults:
                folder = folder_of(kind, root, f"{kind} {rank} {name}")
                found = faulty_run(kind, Fault(kind=name, rank=rank), folder)
                if KINDS[kind].resumes:
                    found["resumed"] = losses_of(kind, folder, resume=True) == wanted
                    left_over()
                found |= {"job": kind, "rank": rank, "fault": name}
                rows.append(found)
                print(table_row(cells(found)), flush=True)
    return rows


def cells(found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    seconds = f"{found['hung']} hung" if found["hung"] else f"{found['seconds']:.1f}"
    message = found["message"]
    if len(message) > MESSAGE_CHARACTERS:
        message = message[:MESSAGE_CHARACTERS] + " ..."
    left = "; ".join(found["left"]) or f"none after {found['left_s']:.1f} s"
    resumed = {True: "equal", False: "NO", None: "-"}[found.get("resumed")]
    job, rank = found["job"], str(found["rank"])
    return [job, rank, found["fault"], seconds, message.replace("|", "/"), left, resumed]


def options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument(
        "--keep", action="store_true", help="keep logs and checkpoints, and say where they are"
    )
    return parser.parse_args()


def load_deepspeed() -> None:
    """Import DeepSpeed, an extra, so that forks have it."""
    import deepspeed

    # Ranks would compile its shared memory transfers, one while the others wait for it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    asked = options()
    if "ZeRO-3" in asked.kinds:
        load_deepspeed()

    print(f"on {machine('torch', 'transformers')}, load {load_average()}\n")
    root = Path(tempfile.mkdtemp(prefix="faults_"))
    rows = fault_rows(asked.kinds, asked.faults, root)
    write_record(asked.json, {"faults": rows})
    if asked.keep:
        print(f"logs and checkpoints are in {root}")
    else:
        shutil.rmtree(root)
    bad = sum(is_bad(row) for row in rows)
    if bad:
        sys.exit(f"{bad} of {len(rows)} jobs did not end as they should")


if __name__ == "__main__":
    main_or_rank(main)
