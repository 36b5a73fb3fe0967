"""What FlexSeqTrainer costs where there is nothing to split: one process, against the plain Trainer.

    python scripts/bench_overhead.py

Four lanes train the same model on the same documents, and take turns step by step, so that a noisy machine is noisy
for all of them:

    packed      the plain Trainer on one packed row, sdpa. transformers gives packed rows a mask of tokens x tokens, and
                so pays for attention between documents, too
    same work   the plain Trainer on the same row with the attention kernel and the chunked loss that FlexSeqTrainer
                uses, one document at a time: what is left to differ is our own bookkeeping
    bare loop   that again without a Trainer: forward, backward, clip, optimizer step
    flexseq     FlexSeqTrainer, with look-ahead and a plan trace

Every lane is a thread that runs only when it is its turn. A turn is a whole optimizer step with all around it: drawing
and collating the documents, planning, the optimizer, callbacks. The wall clock decides; the time of the lane's own
thread on the processor stands beside it, because other work on the machine does not show in it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; one core, as a rank has on a busy machine

import argparse
import math
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from transformers import (
    AttentionInterface,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf import engine, lookahead, rows, trace
from hf_flexseq.hf.chunked_loss import choose_backend
from hf_flexseq.hf.loss import attach_chunked_loss

# Drawn from a log-normal with mu = ln 950 and sigma = 1.75, as CommonCrawl's documents are.
LENGTHS = (2087, 718, 630, 320, 190, 181, 56, 21)
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS = 2048, 256, 2, 4, 2
OURS = "flexseq"
PARTS = {  # where our own time goes: what is timed in the flexseq lane
    "planning, exposed": [(lookahead.Lookahead, "_plan")],
    "gather of lengths": [(lookahead, "gather_ints")],
    "batches to one row": [(lookahead, "source_row")],
    "exchange of tokens": [(rows.RowExchange, "__call__")],
    "shards and contexts": [(engine, "shards_of"), (engine, "model_inputs")],
    "trace and figures": [(trace.PlanTrace, "record")],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="measured steps of every lane")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    args = parser.parse_args()
    lanes = {"packed": packed, "same work": same_work, "bare loop": bare_loop, OURS: flexseq}
    relay = Relay(list(lanes))
    with timed_parts() as parts, tempfile.TemporaryDirectory() as folder:
        losses = relay.run(lanes, args.warmup + args.steps, Path(folder))
    wall, cpu = (relay.medians(kind, args.warmup) for kind in ("wall", "cpu"))
    print("\n".join([*heading(args), *table(wall, cpu, losses), *split(parts, args.warmup, wall["same work"])]))


class Relay:
    """Lanes that take turns. `seconds` holds what every turn took, by lane and clock."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.turns = {name: threading.Semaphore(0) for name in names}
        self.seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in names}
        self._started: tuple[float, float] = (0.0, 0.0)

    def run(self, lanes: dict[str, Callable[..., float]], steps: int, folder: Path) -> dict[str, float]:
        """Run every lane to its end; returns their mean losses."""

        def lane(name: str) -> float:
            torch.set_num_threads(1)
            self.wait(name)  # setting up changes the seeds and accelerate's state, which all lanes share
            try:
                return lanes[name](Turn(self, name), steps, folder / name)
            finally:
                self.hand_on(name)

        with ThreadPoolExecutor(len(lanes)) as pool:
            found = {name: pool.submit(lane, name) for name in lanes}
            self.turns[self.names[0]].release()
            return {name: future.result() for name, future in found.items()}

    def wait(self, name: str) -> None:
        self.turns[name].acquire()
        self._started = time.perf_counter(), time.thread_time()

    def stop(self, name: str) -> None:
        wall, cpu = self._started
        self.seconds[name]["wall"].append(time.perf_counter() - wall)
        self.seconds[name]["cpu"].append(time.thread_time() - cpu)

    def hand_on(self, name: str) -> None:
        self.turns[self.names[(self.names.index(name) + 1) % len(self.names)]].release()

    def medians(self, clock: str, warmup: int) -> dict[str, float]:
        return {name: statistics.median(seconds[clock][warmup:]) for name, seconds in self.seconds.items()}


class Turn(TrainerCallback):
    """Ends a lane's turn when it is set up, and at the end of each of its steps."""

    def __init__(self, relay: Relay, name: str) -> None:
        self.relay, self.name = relay, name

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.relay.hand_on(self.name)
        self.relay.wait(self.name)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.relay.stop(self.name)
        self.on_train_begin()


# ---- the lanes


def packed(turn: Turn, steps: int, folder: Path) -> float:
    return train(Trainer, TrainingArguments, llama("sdpa"), DataCollatorWithFlattening(), turn, steps, folder)


def same_work(turn: Turn, steps: int, folder: Path) -> float:
    model = llama("per_document")
    attach_chunked_loss(model)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    return train(Trainer, TrainingArguments, model, collator, turn, steps, folder)


def flexseq(turn: Turn, steps: int, folder: Path) -> float:
    options = {"plan_trace": str(folder / "plans.jsonl")}
    return train(FlexSeqTrainer, FlexSeqConfig, llama("sdpa"), DataCollatorForFlexSeq(), turn, steps, folder, **options)


def train(
    trainer: type[Trainer],
    arguments: type[TrainingArguments],
    model: LlamaForCausalLM,
    collator: Callable[..., Any],
    turn: Turn,
    steps: int,
    folder: Path,
    **options: Any,
) -> float:
    args = arguments(
        output_dir=str(folder),
        per_device_train_batch_size=len(LENGTHS),
        train_sampling_strategy="sequential",
        max_steps=steps,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    run = trainer(model=model, args=args, train_dataset=documents(steps), data_collator=collator, callbacks=[turn])
    return run.train().training_loss


def bare_loop(turn: Turn, steps: int, folder: Path) -> float:
    model = llama("per_document").train()
    attach_chunked_loss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    loader = torch.utils.data.DataLoader(documents(steps), batch_size=len(LENGTHS), collate_fn=collator)
    total = 0.0
    turn.on_train_begin()
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += float(loss.detach())
        turn.on_step_end()
    return total / steps


def llama(attention: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=max(LENGTHS),
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def documents(steps: int) -> list[dict[str, list[int]]]:
    """Random tokens; every step has documents of the same lengths."""
    rng = random.Random(0)
    rows = [rng.choices(range(VOCAB), k=length) for _ in range(steps) for length in LENGTHS]
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
    """The plainest attention that keeps documents apart and computes no more than it must; on the CPU torch runs it
    on the kernel that FlexSeqTrainer uses. query [1, H, T, D] -> [1, T, H, D]"""
    lengths = cu_seq_lens_q.diff().tolist()
    triples = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outs = [F.scaled_dot_product_attention(*qkv, is_causal=True, scale=scaling, enable_gqa=True) for qkv in triples]
    return torch.cat([out.transpose(1, 2) for out in outs], dim=1), None


AttentionInterface.register("per_document", per_document_attention)


# ---- the report


@contextmanager
def timed_parts() -> Iterator[dict[str, list[list[float]]]]:
    """Inside this block every call of the functions in `PARTS` is timed: a list of seconds for each function."""
    found: dict[str, list[list[float]]] = {part: [] for part in PARTS}

    def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - started)

        return call

    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                found[part].append([])
                stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name), found[part][-1])))
        yield found


def heading(args: argparse.Namespace) -> list[str]:
    weight = torch.empty(VOCAB, HIDDEN)
    loss = choose_backend(weight, weight).name
    return [
        f"{cpu_model()}, {os.cpu_count()} cores, one thread; python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}",
        f"Llama of {LAYERS} layers, {HIDDEN} wide, {VOCAB} words, float32, AdamW; {len(LENGTHS)} documents of "
        f"{', '.join(map(str, LENGTHS))} tokens a step, {sum(LENGTHS):,} in all; chunked loss by {loss}",
        f"{args.steps} steps of every lane in turn, after {args.warmup}; medians",
        "",
    ]


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(wall: dict[str, float], cpu: dict[str, float], losses: dict[str, float]) -> list[str]:
    reference = losses["packed"]
    assert all(math.isclose(loss, reference, rel_tol=1e-3) for loss in losses.values()), f"losses differ: {losses}"
    lines = ["| lane | ms per step | flexseq / lane | ms on the processor | flexseq / lane | mean loss |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for name in wall:
        cells = [f"{1e3 * clock[name]:.1f} | {clock[OURS] / clock[name]:.3f}" for clock in (wall, cpu)]
        lines.append(f"| {name} | {' | '.join(cells)} | {losses[name]:.5f} |")
    return lines


def split(parts: dict[str, list[list[float]]], warmup: int, step_s: float) -> list[str]:
    """Our own time per step, by part."""
    lines = ["", "| part of flexseq | ms per step | % of a step of `same work` |", "|---|---:|---:|"]
    for part, calls in parts.items():
        seconds = sum(statistics.median(function[warmup:]) for function in calls)
        lines.append(f"| {part} | {1e3 * seconds:.3f} | {100 * seconds / step_s:.3f} |")
    return lines


if __name__ == "__main__":
    main()
