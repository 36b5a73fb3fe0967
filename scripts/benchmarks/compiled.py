"""Measured: FlexSeqTrainer with torch_compile=True, against itself without, on one process.

    python scripts/benchmarks/compiled.py
    python scripts/benchmarks/compiled.py --hidden 512 --tokens 512 --rounds 7

MLPs and norms are compiled, for any number of tokens; attention, embeddings and head run as they
are. Each round trains the same steps once without and once with it, and its ratio is the median
over steps of the same number. The first round compiles, and does not count.
"""

import os

# before torch is imported; one core, as a rank has on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

from common import argument_parser, machine, table, write_record
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer

VOCABULARY = 512
LAYERS = 4


class Clock(TrainerCallback):
    """Notes the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def documents(asked: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Return four documents for each step, of a quarter to all of the longest length."""
    draws = random.Random(0)
    rows = []
    for _ in range(4 * asked.steps):
        length = draws.randint(asked.tokens // 4, asked.tokens)
        ids = [draws.randrange(VOCABULARY) for _ in range(length)]
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def trained(
    asked: argparse.Namespace, folder: str, **settings: Any
) -> tuple[list[float], torch.Tensor]:
    """Return the seconds of each step, and what they have added to all weights, in one row."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=asked.hidden,
        intermediate_size=3 * asked.hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    options = FlexSeqConfig(
        output_dir=folder,
        use_cpu=True,
        max_steps=asked.steps,
        per_device_train_batch_size=4,
        optim="sgd",
        learning_rate=0.1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        cost_model="estimate",
        **settings,
    )
    clock = Clock()
    model = LlamaForCausalLM(config)
    before = weights_of(model)
    trainer = FlexSeqTrainer(
        model,
        options,
        data_collator=DataCollatorForFlexSeq(),
        train_dataset=documents(asked),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    # accelerate would give its state, and what is compiled, to the next trainer
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_DYNAMO_BACKEND", None)
    return clock.seconds, weights_of(model) - before


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    """Return a copy of all weights in one row."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def main() -> None:
    """Train both in turn, and print the ratios."""
    parser = argument_parser(__doc__)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--tokens", type=int, default=1024, help="longest document")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of a round")
    parser.add_argument("--rounds", type=int, default=8, help="the first one compiles")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(asked.rounds):
            plain, update = trained(asked, folder)
            compiled, other = trained(asked, folder, torch_compile=True)
            ratios = [one / other for one, other in zip(compiled, plain, strict=True)]
            apart = float((other - update).norm() / update.norm())
            rounds.append({"plain": plain, "compiled": compiled, "apart": apart})
            print(f"round {len(rounds)}: {statistics.median(ratios):.3f}", flush=True)
    counted = [
        one / other
        for found in rounds[1:]
        for one, other in zip(found["compiled"], found["plain"], strict=True)
    ]
    first = rounds[0]["compiled"][0] - rounds[1]["compiled"][0]
    rows = [
        ("seconds of a step, compiled over not", f"{statistics.median(counted):.3f}"),
        ("seconds that the first step takes longer", f"{first:.1f}"),
        ("weights apart, of the update", f"{max(found['apart'] for found in rounds):.1e}"),
    ]
    print(f"\n{machine('torch', 'transformers')}\n\n{table(('figure', 'seen'), rows, (1,))}")
    write_record(asked.json, {"rounds": rounds})


if __name__ == "__main__":
    main()
