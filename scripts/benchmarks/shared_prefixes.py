"""Seconds of steps whose rows share prefixes, beside the same steps row by row.

    python scripts/benchmarks/shared_prefixes.py                              one process
    torchrun --nproc_per_node 2 scripts/benchmarks/shared_prefixes.py         two

FlexSeqTrainer trains a small Llama on groups of rows, one group for each rank and step, with
`shared_prefixes="off"` and "auto" in turns. The bound is the ratio of the floating-point
operations of both: 2 x (linear weights + head) for each token, 4 x width x layers for each pair of
a query and a key; the backward takes twice as many, of attention 2.5 times. Activations are the
bytes of all tensors that the forward of a step saves for its backward. The last case shares
nothing: its ratio is what looking for prefixes costs.
"""

import argparse
import contextlib
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, set_seed

from common import argument_parser, machine, table, write_record
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer

Row = dict[str, list[int]]
VOCAB, HIDDEN, LAYERS, INNER, HEADS, KV_HEADS = 4096, 256, 4, 768, 8, 4
WARMUP = 1  # steps that are not timed


class Case(NamedTuple):
    """A group of rows: (tokens of the shared prefix, own tokens) of each, or an agent's calls."""

    prompt: int
    answers: tuple[int, ...]
    grows: bool = False
    """Whether every row begins with the whole row before it."""

    def rows(self, rng: random.Random) -> list[Row]:
        """Return the rows, with random tokens; the answers have labels."""
        prefix = rng.choices(range(VOCAB), k=self.prompt)
        rows = []
        for tokens in self.answers:
            answer = rng.choices(range(VOCAB), k=tokens)
            ids = prefix + answer
            rows.append({"input_ids": ids, "labels": [-100] * len(prefix) + answer})
            if self.grows:
                prefix = ids
        return rows

    def operations(self, *, shared: bool) -> float:
        """Return the floating-point operations of a step, forward and backward."""
        before = self.prompt
        tokens = self.prompt if shared else 0
        pairs = _pairs(0, self.prompt) if shared else 0.0
        for answer in self.answers:
            first = before if shared else 0
            tokens += before + answer - first
            pairs += _pairs(first, before + answer)
            before += answer * self.grows
        linear = LAYERS * (HIDDEN * HIDDEN * (2 + 2 * KV_HEADS / HEADS) + 3 * HIDDEN * INNER)
        dense = 2 * (linear + HIDDEN * VOCAB) * tokens
        return 3 * dense + 3.5 * 4 * HIDDEN * LAYERS * pairs


def _pairs(first: int, stop: int) -> float:
    return (stop * (stop + 1) - first * (first + 1)) / 2


CASES = {
    "DPO: 2,048 + 2 x 128": Case(2048, (128,) * 2),
    "GRPO: 2,048 + 8 x 512": Case(2048, (512,) * 8),
    "an agent: ten calls of 1,024 + 256": Case(1024, (256,) * 10, grows=True),
    "256 + 8 x 1,024": Case(256, (1024,) * 8),
    "nothing shared": Case(0, (700, 1500, 60, 300, 900, 2000, 128, 450)),
}


class Trained(NamedTuple):
    """What one training has shown."""

    step_s: float
    """Median."""
    saved_bytes: int
    """Of a step, kept between forward and backward."""
    spared: float
    """Tokens of a step that were not computed again."""


@contextlib.contextmanager
def counting_saved(counted: list[int]) -> Iterator[None]:
    """Add up the bytes of different tensors that are saved for a backward."""
    seen: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen and not isinstance(tensor, torch.nn.Parameter):
            seen.add(storage.data_ptr())
            counted.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def train(rows: list[Row], mode: str, steps: int, *, counts_bytes: bool = False) -> Trained:
    """Train on the same rows in every step. Collective over the world."""
    set_seed(0)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=65536,
        )
    )
    saved: list[int] = []
    around = counting_saved(saved) if counts_bytes else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, around:
        args = FlexSeqConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=len(rows) // world,
            learning_rate=1e-4,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            cost_model="estimate",
            shared_prefixes=mode,
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        trainer = FlexSeqTrainer(
            model=model,
            args=args,
            train_dataset=rows * steps,
            data_collator=DataCollatorForFlexSeq(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    seconds = [line["flexseq/measured_s"] for line in log]
    return Trained(
        step_s=statistics.median(seconds[WARMUP:] or seconds),
        saved_bytes=sum(saved),
        spared=log[-1].get("flexseq/tokens_spared", 0.0),
    )


def steps_page(asked: argparse.Namespace) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Train every case in turns; return rows of the table, and raw figures."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    lines = []
    figures = []
    for name, case in CASES.items():
        if asked.cases and not any(name.startswith(one) for one in asked.cases):
            continue
        rng = random.Random(0)
        rows = [row for _ in range(world) for row in case.rows(rng)]
        ratios = []
        for _ in range(asked.rounds):
            apart = train(rows, "off", asked.steps)
            shared = train(rows, "auto", asked.steps)
            ratios.append(apart.step_s / shared.step_s)
        bound = case.operations(shared=False) / case.operations(shared=True)
        counted = [train(rows, mode, 1, counts_bytes=True).saved_bytes for mode in ("off", "auto")]
        tokens = sum(len(row["input_ids"]) for row in rows)
        ratio = statistics.median(ratios)
        of_tokens = tokens / (tokens - shared.spared)
        if name == "nothing shared":
            bound = 1.0
        lines.append(
            [
                name,
                f"{apart.step_s:.2f} s",
                f"{shared.step_s:.2f} s",
                f"{ratio:.2f}x",
                f"{bound:.2f}x",
                f"{ratio / bound:.2f}",
                f"{of_tokens:.2f}x",
                f"{counted[0] / counted[1]:.2f}x",
            ]
        )
        figures.append({"case": name, "ratios": ratios, "bound": bound, "bytes": counted})
    return lines, figures


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", help="beginnings of the names of some cases")
    asked = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
    lines, figures = steps_page(asked)
    if int(os.environ.get("RANK", "0")) == 0:
        columns = ("rows of a rank and step", "row by row", "shared", "ratio", "bound")
        columns += ("of the bound", "tokens", "activations")
        print(table(columns, lines))
        print(f"\n{os.environ.get('WORLD_SIZE', '1')} process(es); {machine('torch')}")
        write_record(asked.json, figures)


if __name__ == "__main__":
    main()
