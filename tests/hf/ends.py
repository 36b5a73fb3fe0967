"""A training script of a user's own, run by `test_lifetime.py` on two ranks.

    python ends.py KIND DESTROY FOLDER    with RANK, WORLD_SIZE and LOCAL_WORLD_SIZE set

KIND: trainer, engine for a loop of its own, or nothing, which ends after its imports. DESTROY:
whether it destroys the process group. Its last line prints the time.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

from hf_flexseq import (
    DataCollatorForFlexSeq,
    FlexSeqArguments,
    FlexSeqConfig,
    FlexSeqEngine,
    FlexSeqTrainer,
)
from tests.hf.tiny import documents, tiny_llama

OPTIONS = {"cost_model": "estimate", "max_tokens_per_rank": 40}


def with_a_trainer(model, examples, folder):
    args = FlexSeqConfig(
        output_dir=folder, max_steps=3, use_cpu=True, report_to="none", save_strategy="no",
        per_device_train_batch_size=2, disable_tqdm=True, **OPTIONS,
    )  # fmt: skip
    FlexSeqTrainer(model=model, args=args, train_dataset=examples, eval_dataset=examples).train()


def with_a_loop(model, examples):
    """A loop that stops in the middle of the data, and does not detach."""
    accelerator = Accelerator(cpu=True)
    engine = FlexSeqEngine(accelerator, FlexSeqArguments(**OPTIONS))
    engine.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(examples, batch_size=2, collate_fn=DataCollatorForFlexSeq())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, planned in enumerate(engine.steps(loader)):
        planned.backward(model)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            break


def main(kind, destroy, folder):
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    examples = documents([5 + index % 30 for index in range(40)])
    if kind == "trainer":
        with_a_trainer(tiny_llama(torch.float32), examples, folder)
    else:
        with_a_loop(tiny_llama(torch.float32), examples)
    if destroy == "destroy":
        dist.destroy_process_group()


if sys.argv[1] != "nothing":
    main(*sys.argv[1:])
print("last line at", time.time(), flush=True)
