"""Jobs that are killed while they save a checkpoint, and resumed.

    python scripts/benchmarks/saves.py                    20 kills, under DDP
    python scripts/benchmarks/saves.py --job pipeline --kills 5

A job saves after every step. All of its ranks are killed (kill -9) at a random moment of a random
save, between its marker and its manifest. Another job then goes on with
`resume_from_checkpoint=True`, to the end. Each row is such a kill, and says

    saving     the checkpoint that was being written
    written    its files at the moment of the kill, of those that it has when it is whole
    from       the checkpoint that the other job went on from
    losses     whether the losses of all steps are, to the last bit, those of a job that nothing
               happened to

A kill that comes before the marker or after the manifest does not count, and is tried again.
All ranks are on this machine, over gloo.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common import argument_parser, load_average, machine, table_head, table_row, write_record
from forked import main_or_rank, start_ranks
from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.steps.manifest import MANIFEST, MARKER, inspect, is_torn

RANKS = 2
STEPS = 6
VOCABULARY = 512
TIMEOUT_S = 60  # of every exchange
PATIENCE_S = 120  # for a job to end
POLL_S = 0.0005
LOOKAHEAD = 0  # the planner is no part of this, and a second process of it would be left to end
COLUMNS = ("kill", "saving", "written", "from", "losses")
NUMBERS = (0,)

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "communication_data_type": "fp32",
    "zero_optimization": {"stage": 3},
}
JOBS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero3": {"deepspeed": ZERO3},
    "pipeline": {"pipeline_parallel_size": 2},
}


# ---- a rank


def train(job: str, folder: Path, resume: bool, rank: int) -> None:
    """Do the work of a rank, and write down the losses on the first.

    resume: from the newest whole checkpoint in `folder`.
    """
    if job == "zero3":
        import deepspeed  # an extra

        deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    args = FlexSeqConfig(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        save_steps=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_tokens_per_rank=100,
        lookahead=LOOKAHEAD,
        cost_model="estimate",
        **JOBS[job],
    )
    trainer = FlexSeqTrainer(model=LlamaForCausalLM(config), args=args, train_dataset=documents())
    trainer.train(resume_from_checkpoint=resume)
    if rank == 0:
        history = trainer.state.log_history
        losses = [entry["loss"] for entry in history if "loss" in entry]
        resumed = trainer._flexseq_resumed
        found = {"losses": losses, "from": resumed and Path(resumed.folder).name}
        (folder / "ended.json").write_text(json.dumps(found))


def documents() -> list[dict[str, list[int]]]:
    """Return examples of very unequal lengths."""
    numbers = random.Random(0)
    examples = []
    for index in range(4 * STEPS):
        length = 1 + (index * index * 7) % 90
        tokens = [numbers.randrange(VOCABULARY) for _ in range(length)]
        examples.append({"input_ids": tokens, "labels": tokens})
    return examples


# ---- jobs


def run_on(job: str, folder: Path) -> dict[str, Any]:
    """Run a job from the newest whole checkpoint to its end; return its losses and the checkpoint
    that it went on from. Raises RuntimeError for one that fails."""
    return ended(start_ranks(RANKS, partial(train, job, folder, True), folder, TIMEOUT_S), folder)


def ended(pids: list[int], folder: Path) -> dict[str, Any]:
    """Wait for the end of a job and return what its first rank has written down.

    Raises RuntimeError for one that fails.
    """
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1] != 0]
    if failed:
        raise RuntimeError(f"a job failed: see {folder}/rank*.log")
    found: dict[str, Any] = json.loads((folder / "ended.json").read_text())
    return found


def kill_while_saving(
    job: str, folder: Path, checkpoint: str, numbers: random.Random, save_s: float
) -> bool:
    """Start a job, kill all its ranks while they save `checkpoint`, and tell if that came off.

    save_s: about how long a save takes.
    """
    pids = start_ranks(RANKS, partial(train, job, folder, False), folder, TIMEOUT_S)
    saved = folder / checkpoint
    deadline = time.monotonic() + PATIENCE_S
    while not (saved / MARKER).exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(numbers.uniform(0, save_s))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return is_torn(saved)


def run_untouched(job: str, folder: Path) -> tuple[list[float], float]:
    """Run a job that nothing happens to; return its losses, and the mean seconds between marker
    and manifest of its checkpoints."""
    pids = start_ranks(RANKS, partial(train, job, folder, False), folder, TIMEOUT_S)
    began: dict[Path, float] = {}
    took: dict[Path, float] = {}
    folders = [folder / f"checkpoint-{step}" for step in range(1, STEPS + 1)]
    deadline = time.monotonic() + PATIENCE_S
    while len(took) < STEPS and time.monotonic() < deadline:
        for path in folders:
            if path not in began and (path / MARKER).exists():
                began[path] = time.monotonic()
            if path in began and path not in took and (path / MANIFEST).exists():
                took[path] = time.monotonic() - began[path]
        time.sleep(POLL_S)
    losses: list[float] = ended(pids, folder)["losses"]
    return losses, sum(took.values()) / len(took)


# ---- kills


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A job that was killed while it saved, and resumed."""

    saving: str
    """The checkpoint that was being written."""

    written: int
    """Its files at the moment of the kill, with those under partial names."""

    whole: int
    """The files that it has when it is whole."""

    resumed: str
    """The checkpoint that the other job went on from."""

    is_equal: bool
    """Whether all losses are those of a job that nothing happened to."""


def one_kill(
    job: str, folder: Path, wanted: list[float], numbers: random.Random, save_s: float
) -> Kill:
    """Kill a job while it saves, resume it, and compare.

    wanted: the losses of a job that nothing happened to.
    """
    while True:
        checkpoint = f"checkpoint-{numbers.randrange(2, STEPS + 1)}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if kill_while_saving(job, folder, checkpoint, numbers, save_s):
            break
    written = files_in(folder / checkpoint)
    found = run_on(job, folder)
    assert inspect(folder / checkpoint).problem is None, "the resumed job saves it again"
    return Kill(
        saving=checkpoint,
        written=written,
        whole=files_in(folder / checkpoint),
        resumed=found["from"],
        is_equal=found["losses"] == wanted,
    )


def files_in(folder: Path) -> int:
    """Return the number of files in a checkpoint, those of its subfolders included."""
    return sum(path.is_file() for path in folder.rglob("*"))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--job", choices=tuple(JOBS), default="ddp")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    numbers = random.Random(asked.seed)
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="saves_"))
    (folder / "whole").mkdir()
    print(f"on {machine('torch', 'transformers')}, load {load_average()}\n")
    wanted, save_s = run_untouched(asked.job, folder / "whole")

    print(f"{asked.job} on {RANKS} ranks; a save takes {1000 * save_s:.0f} ms\n")
    print(table_head(COLUMNS, NUMBERS))
    kills = []
    for number in range(1, asked.kills + 1):
        kill = one_kill(asked.job, folder / "killed", wanted, numbers, save_s)
        kills.append(kill)
        losses = "equal" if kill.is_equal else "DIFFER"
        written = f"{kill.written} of {kill.whole} files"
        print(table_row((number, kill.saving, written, kill.resumed, losses)), flush=True)

    equal = sum(kill.is_equal for kill in kills)
    seconds = time.perf_counter() - began
    print(f"\n{equal} of {len(kills)} resumed with equal losses; {seconds:.0f} s in all")
    print(f"load at the end {load_average()}")
    write_record(
        asked.json,
        {
            "job": asked.job,
            "save_s": save_s,
            "losses": wanted,
            "kills": [asdict(kill) for kill in kills],
            "seconds": seconds,
        },
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main_or_rank(main)
