"""Training scripts of a user's own, as `test_lifetime.py` starts them: one process for each rank.

    python -m tests.hf.ends KIND FOLDER

KIND: trainer; engine, a loop of its own, which destroys the process group; nothing, which has the
same imports. Prints when its last line runs.
"""

import os
import sys
import time
from pathlib import Path

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
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no"}
    settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True}
    args = FlexSeqConfig(output_dir=folder, **settings, **OPTIONS)
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


kind, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
examples = documents([5 + index % 30 for index in range(40)])
if kind != "nothing":
    meeting = f"file://{folder}/{kind}-rendezvous"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=int(os.environ["RANK"]), world_size=2
    )
if kind == "trainer":
    with_a_trainer(tiny_llama(torch.float32), examples, folder)
elif kind == "engine":
    with_a_loop(tiny_llama(torch.float32), examples)
    dist.destroy_process_group()
print("last line at", time.time(), flush=True)
