"""What a process holds after many trainers."""

import gc
import os
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from tests.hf.tiny import documents, tiny_llama
from tests.hf.trainers import trainer_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

# In one process; with 50 of them: FLEXSEQ_TRAINERS=50 pytest tests/hf/test_lifetime.py -s
TRAINERS = int(os.environ.get("FLEXSEQ_TRAINERS", "6"))
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
    data = {"train_dataset": examples, "eval_dataset": examples}
    figures = []
    for _ in range(TRAINERS):
        model = tiny_llama(torch.float32)
        flexseq = {"lookahead": 1, **options}
        trainer = trainer_of(Trainer, folder, flexseq=flexseq, model=model, max_steps=1, **data)
        trainer.train()
        trainer.evaluate()
        del trainer, model
        figures.append(held())
    return figures


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_tokens_per_rank": 40}, id="whole"),
        pytest.param({"pipeline_parallel_size": 2}, id="pipeline", marks=pytest.mark.nightly),
    ],
)
def test_trainers_one_after_the_other_hold_no_more_than_one(options, tmp_path):
    by_rank = run_ranks(train_again_and_again, 2, str(tmp_path), options, seconds=SECONDS)
    for rank, figures in enumerate(by_rank):
        *warm, warm_mb = figures[WARM]
        *last, last_mb = figures[-1]
        print(f"rank {rank}: descriptors, threads, children, MB: {figures[WARM]} {figures[-1]}")
        assert last == warm, figures
        assert last_mb - warm_mb < MOST_MB_EACH * (len(figures) - 1 - WARM), figures
