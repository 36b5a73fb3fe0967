"""What a process holds after many trainers, and how a script ends."""

import gc
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from tests.hf.tiny import documents, tiny_llama
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

# In one process; with 50 of them: FLEXSEQ_TRAINERS=50 pytest tests/hf/test_lifetime.py -s
TRAINERS = int(os.environ.get("FLEXSEQ_TRAINERS", "7"))
SECONDS = 60 + 20 * TRAINERS
WARM = 4  # trainers after which nothing may be added
MOST_MB_EACH = 1.5  # by a trainer: allocators keep what they have, a group's threads take more


def held():
    """Descriptors, threads, child processes and resident megabytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = os.listdir("/proc/self/task")
    children = 0
    for thread in threads:
        children += len(Path(f"/proc/self/task/{thread}/children").read_text().split())
    descriptors = len(os.listdir("/proc/self/fd"))
    return descriptors, len(threads), children, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def train_again_and_again(rank, world_size, folder, options):
    """What this process holds after each trainer."""
    examples = documents([5 + index % 20 for index in range(8)])
    figures = []
    for _ in range(TRAINERS):
        model = tiny_llama(torch.float32)
        args = FlexSeqConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            cost_model="estimate",
            lookahead=1,
            **options,
        )
        trainer = FlexSeqTrainer(
            model=model, args=args, train_dataset=examples, eval_dataset=examples
        )
        trainer.train()
        trainer.evaluate()
        del trainer, model, args
        figures.append(held())
    return figures


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    "options",
    [{"max_tokens_per_rank": 40}, {"pipeline_parallel_size": 2}],
    ids=["whole", "pipeline"],
)
def test_trainers_one_after_the_other_hold_no_more_than_one(options, tmp_path):
    by_rank = run_ranks(train_again_and_again, 2, str(tmp_path), options, seconds=SECONDS)
    for rank, figures in enumerate(by_rank):
        *warm, warm_mb = figures[WARM]
        *last, last_mb = figures[-1]
        print(f"rank {rank}: descriptors, threads, children, MB: {figures[WARM]} {figures[-1]}")
        assert last == warm, figures
        assert last_mb - warm_mb < MOST_MB_EACH * (len(figures) - 1 - WARM), figures


# ---- the end of a script


ENDS_S = 2  # seconds after the last line, beside those of an interpreter with the same imports
SCATTER = 1.5  # of the seconds that an interpreter takes to end, on a busy machine


def run_scripts(folder, kind, destroy):
    """Exit code, seconds from the last line to the end, and what was said: by both ranks, and by
    a script that does nothing, at the same time."""
    processes = []
    for rank, own_kind in enumerate((kind, kind, "nothing")):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": 2}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.hf.ends", own_kind, destroy, str(folder)],
            env=os.environ | {name: str(value) for name, value in variables.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
    ended = {}
    deadline = time.monotonic() + 120
    try:
        while len(ended) < len(processes) and time.monotonic() < deadline:
            for index, process in enumerate(processes):
                if index not in ended and process.poll() is not None:
                    ended[index] = time.time()
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
    results = []
    for index, process in enumerate(processes):
        said = process.communicate()[0]
        last = re.search(r"last line at ([\d.]+)", said)
        assert last is not None, said
        assert index in ended, f"process {index} did not end:\n{said}"
        results.append((process.returncode, ended[index] - float(last[1]), said))
    return results


@pytest.mark.parametrize(("kind", "destroy"), [("trainer", "keep"), ("engine", "destroy")])
def test_a_script_ends_soon_after_its_last_line(tmp_path, kind, destroy):
    *ranks, (_, without_s, _) = run_scripts(tmp_path, kind, destroy)
    for code, seconds, said in ranks:
        print(f"{kind}, {destroy}: {seconds:.2f} s after the last line, {without_s:.2f} without")
        assert code == 0, said
        assert seconds < SCATTER * without_s + ENDS_S, said
