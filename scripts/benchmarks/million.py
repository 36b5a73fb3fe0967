"""Measured: one sequence of a million tokens, trained on two CPU ranks; its memory per token
against that of a quarter of it.

    python scripts/benchmarks/million.py
    python scripts/benchmarks/million.py --tokens 131072 262144

Every length is a run of its own: two processes under gloo, a FlexSeqTrainer, and a tiny Mistral of
four layers with a window of 1,024 tokens (full attention of a million tokens would take hours of a
CPU). Activation checkpointing has `offload=True`: layers' inputs and attention's outputs go to the
host store, which on a CPU is memory of the same kind, through the code that serves GPUs. The first
optimizer step has a sequence of 64K tokens, the second one the long one, both whole, at degree 2.

"bytes a token" is how much higher the peak of a rank's resident memory is after the second step
than after the first one, over how many more tokens it holds: what is held once, such as a buffer
of logits, is in both. The larger of both ranks counts. The allocator of the C library returns all
blocks of a mebibyte and more at once, so that none of the peak is memory that nothing uses.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, argument_parser, load_average, machine, table, write_record

RANKS = 2
SHORT = 65_536  # tokens of the first step's sequence
WINDOW = 1024
COLUMNS = ("tokens", "bytes a token", "over the shortest", "s", "loss")


# ---- a rank


def train(tokens: int, out: Path) -> None:
    """Train two steps on this rank, and write what it took."""
    import resource
    import time

    import torch
    from transformers import MistralConfig, MistralForCausalLM, TrainerCallback

    from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=64,
            sliding_window=WINDOW,
            max_position_embeddings=max(tokens, SHORT),
        )
    )

    class Memory(TrainerCallback):
        """Notes the peak of resident memory, and the time, at the end of each step."""

        def __init__(self) -> None:
            self.after: list[tuple[int, float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.after.append((peak, time.perf_counter()))

    memory = Memory()
    rows = []
    for length in (SHORT, tokens):
        ids = torch.arange(length).mul_(7).remainder_(61).tolist()
        rows += [{"input_ids": ids, "labels": ids}] + [{"input_ids": [1, 2], "labels": [1, 2]}]
    with tempfile.TemporaryDirectory() as folder:
        trainer = FlexSeqTrainer(
            model=model,
            args=FlexSeqConfig(
                output_dir=folder,
                per_device_train_batch_size=1,
                max_steps=2,
                use_cpu=True,
                activation_checkpointing=True,
                activation_checkpointing_kwargs={"offload": True, "use_reentrant": False},
                train_sampling_strategy="sequential",
                planner="static",
                sp_degree=RANKS,
                max_tokens_per_rank=tokens,
                cost_model="estimate",
                save_strategy="no",
                report_to="none",
                logging_steps=1,
                disable_tqdm=True,
                lookahead=0,
                on_nonfinite="raise",
                host_memory_gib=8.0,
            ),
            train_dataset=rows,
            data_collator=DataCollatorForFlexSeq(),
            callbacks=[memory],
        )
        trainer.train()
    (first_peak, began), (peak, ended) = memory.after
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    figures = {
        "bytes": peak - first_peak,
        "more_tokens": (tokens - SHORT) // RANKS,
        "seconds": ended - began,
        "loss": losses[-1],
    }
    rank = int(os.environ["RANK"])
    (out / f"{rank}.json").write_text(json.dumps(figures))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# ---- all runs


def measured(tokens: int) -> dict[str, float]:
    """Return what a sequence of so many tokens takes, on the rank that takes most."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(RANKS), __file__),
            *("--tokens", str(tokens), "--out", folder),
        ]
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        }
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {
        "tokens": tokens,
        "bytes_a_token": max(one["bytes"] / one["more_tokens"] for one in ranks),
        "seconds": max(one["seconds"] for one in ranks),
        "loss": ranks[0]["loss"],
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[262_144, 1_048_576])
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of a rank
    asked = parser.parse_args()
    if asked.out is not None:
        train(asked.tokens[0], asked.out)
        return
    if min(asked.tokens) <= SHORT:
        parser.error(f"--tokens {min(asked.tokens)}: give more than the first step's {SHORT}")
    print(f"million.py {' '.join(sys.argv[1:])}\non {machine('torch', 'transformers')}")
    print(f"load {load_average()}\n")
    found = [measured(tokens) for tokens in asked.tokens]
    rows = []
    for one in found:
        rows.append(
            [
                f"{one['tokens']:,}",
                f"{one['bytes_a_token']:,.0f}",
                f"{one['bytes_a_token'] / found[0]['bytes_a_token']:.3f}",
                f"{one['seconds']:.0f}",
                f"{one['loss']:.4f}",
            ]
        )
    print(table(COLUMNS, rows))
    write_record(asked.json, {"runs": found})


if __name__ == "__main__":
    main()
