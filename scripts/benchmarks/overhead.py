"""Measured: what FlexSeqTrainer costs where there is nothing to split, against the plain Trainer.

    python scripts/benchmarks/overhead.py
    python scripts/benchmarks/overhead.py --lengths $(yes 32 | head -128)    short documents: the
                                                                             most calls per token

Three lanes train the same model on the same documents in one process, and take turns step by step,
so that a noisy machine is noisy for all of them:

    packed      the plain Trainer on one packed row, sdpa. transformers gives packed rows a mask of
                tokens x tokens, and so pays for attention between documents, too
    same work   the plain Trainer on the same row, with the attention kernel that FlexSeqTrainer
                uses, one document at a time, and its chunked loss: what is left to differ is our
                own bookkeeping
    flexseq     FlexSeqTrainer, with look-ahead and a plan trace

Every lane is a thread that runs only when it is its turn. A turn is a whole optimizer step with
all around it: drawing and collating the documents, planning, the optimizer, callbacks. The wall
clock decides; the time of the lane's own thread on the processor stands beside it, because other
work on the machine does not show in it.
"""

import os

# before torch is imported; one core, as a rank has on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import math
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from common import argument_parser, machine, table, write_record
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf.model.loss import attach_chunked_loss

# Drawn from a log-normal with mu = ln 950 and sigma = 1.75, like CommonCrawl's documents.
LONG_TAILED = (2087, 718, 630, 320, 190, 181, 56, 21)
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS = 2048, 256, 2, 4, 2
OURS = "flexseq"
Clocks = tuple[list[float], list[float]]  # seconds: by the wall clock, and on the processor


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of every lane")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=LONG_TAILED, help="tokens of a step's documents"
    )
    args = parser.parse_args()
    work = Work(lengths=tuple(args.lengths), steps=args.warmup + args.steps)
    lanes = {"packed": packed, "same work": same_work, OURS: flexseq}
    relay = Relay(list(lanes))
    with tempfile.TemporaryDirectory() as folder:
        losses = relay.run(lanes, work, Path(folder))
    measured: dict[str, Clocks] = {}
    for name in lanes:
        wall, cpu = relay.seconds[name]
        measured[name] = (wall[args.warmup :], cpu[args.warmup :])
    print(heading(args))
    print(lane_table(measured, losses))
    write_record(args.json, {"seconds": measured, "losses": losses})


class Work(NamedTuple):
    """The documents that every lane trains on."""

    lengths: tuple[int, ...]
    """Tokens of the documents of a step; all steps are alike."""
    steps: int
    """Optimizer steps, those that warm up included."""


# ---- taking turns


def now() -> tuple[float, float]:
    """Return the seconds by the wall clock, and of this thread on the processor."""
    return time.perf_counter(), time.thread_time()


def add(clocks: Clocks, started: tuple[float, float]) -> None:
    """Append the seconds since `started` to both clocks."""
    for seconds, start, stop in zip(clocks, started, now(), strict=True):
        seconds.append(stop - start)


class Relay:
    """Lanes that take turns, in a new order every round. `seconds` holds the clocks of each."""

    def __init__(self, names: Sequence[str]) -> None:
        self.seconds: dict[str, Clocks] = {name: ([], []) for name in names}
        self._turns = {name: threading.Semaphore(0) for name in names}
        self._running = list(names)
        self._order = self._rounds()
        self._started = (0.0, 0.0)

    def run(
        self, lanes: dict[str, Callable[..., float]], work: Work, folder: Path
    ) -> dict[str, float]:
        """Run every lane to its end and return their mean losses."""

        def lane(name: str) -> float:
            torch.set_num_threads(1)
            # setting up changes the seeds and accelerate's state, which all lanes share
            self.wait(name)
            try:
                return lanes[name](Turn(self, name), work, folder / name)
            finally:
                self._running.remove(name)
                self.hand_on()

        with ThreadPoolExecutor(len(lanes)) as pool:
            found = {name: pool.submit(lane, name) for name in lanes}
            self.hand_on()
            return {name: future.result() for name, future in found.items()}

    def _rounds(self) -> Iterator[str]:
        """Yield the name of the lane that is next, for as long as any lane runs."""
        rng = random.Random(0)
        while self._running:
            for name in rng.sample(self._running, len(self._running)):
                if name in self._running:
                    yield name

    def hand_on(self) -> None:
        """Let the next lane run."""
        following = next(self._order, None)
        if following is not None:
            self._turns[following].release()

    def wait(self, name: str) -> None:
        """Wait for a lane's turn, and start its clocks."""
        self._turns[name].acquire()
        self._started = now()

    def stop(self, name: str) -> None:
        """Stop the clocks of a lane's turn."""
        add(self.seconds[name], self._started)


class Turn(TrainerCallback):
    """Ends a lane's turn when it is set up, and at the end of each of its steps."""

    def __init__(self, relay: Relay, name: str) -> None:
        self.relay = relay
        self.name = name

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.relay.hand_on()
        self.relay.wait(self.name)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.relay.stop(self.name)
        self.on_train_begin()


# ---- the lanes


def packed(turn: Turn, work: Work, folder: Path) -> float:
    return train(
        Trainer, TrainingArguments, llama("sdpa"), DataCollatorWithFlattening(), turn, work, folder
    )


def same_work(turn: Turn, work: Work, folder: Path) -> float:
    model = llama("per_document")
    attach_chunked_loss(model)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return train(Trainer, TrainingArguments, model, collator, turn, work, folder)


def flexseq(turn: Turn, work: Work, folder: Path) -> float:
    options = {"plan_trace": str(folder / "plans.jsonl")}
    model, collator = llama("sdpa"), DataCollatorForFlexSeq()
    return train(FlexSeqTrainer, FlexSeqConfig, model, collator, turn, work, folder, **options)


def train(
    trainer: type[Trainer],
    arguments: type[TrainingArguments],
    model: LlamaForCausalLM,
    collator: Callable[..., Any],
    turn: Turn,
    work: Work,
    folder: Path,
    **options: Any,
) -> float:
    """Train with a Trainer's class and return the mean loss. options: for its arguments."""
    args = arguments(
        output_dir=str(folder),
        per_device_train_batch_size=len(work.lengths),
        train_sampling_strategy="sequential",
        max_steps=work.steps,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    run = trainer(
        model=model,
        args=args,
        train_dataset=documents(work),
        data_collator=collator,
        callbacks=[turn],
    )
    run.remove_callback(PrinterCallback)
    return run.train().training_loss


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=max(LONG_TAILED),
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def documents(work: Work) -> list[dict[str, list[int]]]:
    """Return random documents; every step has documents of the same lengths."""
    rng = random.Random(0)
    rows = [
        rng.choices(range(VOCAB), k=length) for _ in range(work.steps) for length in work.lengths
    ]
    return [{"input_ids": row, "labels": row} for row in rows]


def per_document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each document, and compute no more than that.

    On the CPU torch runs this on the kernel that FlexSeqTrainer uses.
    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]
    -> [1, tokens, heads, head_dim]
    """
    lengths = cu_seq_lens_q.diff().tolist()
    outs = []
    for q, k, v in zip(
        query.split(lengths, dim=2),
        key.split(lengths, dim=2),
        value.split(lengths, dim=2),
        strict=True,
    ):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        outs.append(out.transpose(1, 2))  # [1, heads, n, head_dim] -> [1, n, heads, head_dim]
    return torch.cat(outs, dim=1), None


AttentionInterface.register("per_document", per_document_attention)


# ---- the report


def heading(args: argparse.Namespace) -> str:
    """Return the lines above the tables."""
    counted = []
    for length, count in Counter(args.lengths).items():
        counted.append(f"{count} x {length}" if count > 1 else f"{length}")
    lines = [
        f"{machine('torch', 'transformers')}, one thread",
        "",
        f"Llama of {LAYERS} layers, {HIDDEN} wide, {VOCAB} words, float32, AdamW, chunked loss; "
        f"{len(args.lengths)} documents a step, {sum(args.lengths):,} tokens: "
        f"{', '.join(counted)}",
        "",
        f"{args.steps} steps of every lane in turn, after {args.warmup}: medians (and quartiles) "
        f"in milliseconds",
        "",
    ]
    return "\n".join(lines)


def lane_table(measured: dict[str, Clocks], losses: dict[str, float]) -> str:
    """Return a row for each lane. Raises AssertionError where the lanes' losses differ."""
    reference = losses["packed"]
    for loss in losses.values():
        assert math.isclose(loss, reference, rel_tol=1e-3), f"losses differ: {losses}"
    columns = (
        "lane",
        "wall clock",
        "flexseq / lane",
        "on the processor",
        "flexseq / lane",
        "mean loss",
    )
    rows = []
    for name, clocks in measured.items():
        cells = [name]
        for seconds, ours in zip(clocks, measured[OURS], strict=True):
            first, median, third = (1e3 * s for s in statistics.quantiles(seconds, n=4))
            cells.append(f"{median:.1f} ({first:.1f} to {third:.1f})")
            cells.append(f"{1e3 * statistics.median(ours) / median:.3f}")
        rows.append([*cells, f"{losses[name]:.5f}"])
    return table(columns, rows, numbers=(1, 2, 3, 4, 5))


if __name__ == "__main__":
    main()
