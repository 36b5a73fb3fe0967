"""A rank that is killed in the middle of a step: the others must end, and name it.

torchrun would end the others itself, so the ranks are started here, one process each. All of them
train one step on one ring. In the second step the last rank is killed in its forward. Every other
rank must end by itself within the job's timeout and a margin, and one of them at least must say
which rank is gone.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from gpu_checks import several
from gpu_checks.report import LOST_PART, Section, Setting, table, this_script, verdict
from hf_flexseq.distributed.hosts import last_error
from hf_flexseq.plan import Group, MicroBatch, Plan
from tests.hf.tiny import documents

TIMEOUT_S = 20.0  # of the job
MARGIN_S = 30.0  # for a watchdog that looks now and then
START_S = 600.0  # until the rank is killed


def lost_rank_section(setting: Setting) -> Section:
    """Start the ranks, and judge how the others end."""
    title = "A killed rank"
    if setting.processes < 2:
        return Section.not_run(title, "it needs two GPUs")
    lost = setting.processes - 1
    endings = _run(setting, lost)
    names_it = [names(ending, lost) for ending in endings.values()]
    have_ended = all("was still running" not in ending for ending in endings.values())
    holds = have_ended and any(names_it)
    rows = []
    for rank, ending in endings.items():
        rows.append([rank, "yes" if names(ending, lost) else "no", last_error(ending)])
    return Section(
        title=title,
        lines=(
            f"Rank {lost} of {setting.processes} is killed in its second step; the job's timeout "
            f"is {TIMEOUT_S:g} s: {verdict(holds)}.",
            "",
            *table(["rank", f"names rank {lost}", "its last words"], rows),
        ),
        holds=holds,
    )


def names(ending: str, lost: int) -> bool:
    """Return whether a rank's last words name the rank that is lost."""
    return re.search(rf"\branks? \[?{lost}\b", last_error(ending)) is not None


def _run(setting: Setting, lost: int) -> dict[int, str]:
    """Return what every rank but the lost one has said, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = str(setting.processes)
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *this_script(LOST_PART, setting)]
    endings = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(setting.processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = Path(folder, f"{rank}.txt").open("w")  # noqa: SIM115 (the process has it)
            process = subprocess.Popen(
                command, env=os.environ | shared | own, stdout=words, stderr=words
            )
            words.close()
            processes.append(process)
        _late(processes[lost], time.monotonic() + START_S)
        deadline = time.monotonic() + TIMEOUT_S + MARGIN_S
        for rank, process in enumerate(processes):
            if rank != lost:
                late = _late(process, deadline)
                endings[rank] = Path(folder, f"{rank}.txt").read_text() + late
    return endings


def _late(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for a process until a time of `time.monotonic`; end it then, and say so."""
    try:
        process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"\nit was still running {TIMEOUT_S + MARGIN_S:g} s after the other one was killed"
    return ""


# ---- one rank


class OneRing(several.PlansInPlace):
    """A planner that puts all sequences on one ring of all ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = tuple(range(ranks))

    def plan_of(self, lengths: list[int]) -> Plan:
        """See `PlansInPlace.plan_of`."""
        sequences = tuple(range(len(lengths)))
        group = Group(ranks=self._ranks, sequences=sequences, strategy="zigzag")
        return Plan(
            lengths=tuple(lengths),
            micro_batches=(MicroBatch(groups=(group,)),),
            objective_s=0.0,
            lower_bound_s=0.0,
            planner="one ring",
            planning_s=0.0,
        )


def run_rank(setting: Setting) -> None:
    """Train two steps as one rank; the last rank kills itself in the second."""
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=TIMEOUT_S))
    accelerator = Accelerator(cpu=setting.rehearse, kwargs_handlers=[timeout])
    ranks = accelerator.num_processes
    model = several.small_llama(accelerator.device)
    _, precision = several.precisions(accelerator.device)
    runner = several.Runner(
        accelerator,
        model,
        documents(several.SHORT_LENGTHS if setting.rehearse else several.LENGTHS),
        several.Combination(sharding="DDP", sync="lockstep", blocks=False),
        precision,
        OneRing(ranks),
    )
    wrapped = runner.attach()
    runner.step(wrapped, may_wait=True)
    if accelerator.process_index == ranks - 1:
        runner.model.model.layers[-1].register_forward_pre_hook(_die)
    # A second step may end on some ranks; a third cannot.
    for _ in range(2):
        runner.step(wrapped, may_wait=True)


def _die(*hooked: Any) -> None:
    """Kill this process, as a machine that fails would."""
    os.kill(os.getpid(), signal.SIGKILL)
