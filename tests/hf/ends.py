"""Training scripts of a user's own, run by `test_lifetime.py` on two ranks each.

    python ends.py FOLDER KIND-DESTROY ...

KIND: trainer, or engine for a loop of its own. DESTROY: keep or destroy, what it does with the
process group. Beside them runs a script that does nothing. Each is a fork of this process, which
has imported everything once, and goes on to the end of this file as any script does: its
interpreter ends by itself. All run at the same time, and write what they say into FOLDER.

Prints JSON: of each process its script, exit code, seconds from its last line to its end and what
it said. A process that does not end is killed, and has None for its exit code.
"""

import json
import os
import signal
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


def main(rank, kind, destroy, folder):
    folder.mkdir(exist_ok=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    examples = documents([5 + index % 30 for index in range(40)])
    if kind == "trainer":
        with_a_trainer(tiny_llama(torch.float32), examples, folder)
    else:
        with_a_loop(tiny_llama(torch.float32), examples)
    if destroy == "destroy":
        dist.destroy_process_group()


SECONDS = 120  # in which all have to end


def ended(forks):
    """What became of the forks, a list of (script, file of what it said, process id)."""
    results = {}
    deadline = time.monotonic() + SECONDS
    while len(results) < len(forks):
        for script, said, process in forks:
            done, status = (0, 0) if process in results else os.waitpid(process, os.WNOHANG)
            if done:
                *lines, last = said.read_text().split("last line at ")
                seconds = time.time() - float(last) if lines else None
                code = os.waitstatus_to_exitcode(status)
                results[process] = (script, code, seconds, said.read_text())
            elif process not in results and time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                results[process] = (script, None, None, said.read_text())
        time.sleep(0.02)
    return list(results.values())


folder, scripts = Path(sys.argv[1]), sys.argv[2:]
forks = []
for script, rank in [("nothing", 0), *((script, rank) for script in scripts for rank in range(2))]:
    said = folder / f"{script}-{rank}"
    process = os.fork()
    if process == 0:
        with said.open("w") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
        if script != "nothing":
            main(rank, *script.split("-"), folder / script)
        print("last line at", time.time(), flush=True)
        break
    forks.append((script, said, process))
else:
    print(json.dumps(ended(forks)))
