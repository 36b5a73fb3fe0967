"""Measured: what a loss that is computed at home costs, with TRL's DPOTrainer in one process.

    python scripts/benchmarks/objective_time.py --json objective_time.json

The plain trainer and the same with FlexSeqMixin in front train the same model on the same pairs,
with a reference model, and take turns step by step, so that a noisy machine is noisy for both:

    one micro-batch    sequences of equal lengths, the step is one batch: at most 1.05 times
    four               the same, four batches are accumulated, and a plan has as many micro-batches
                       of as many tokens. All but one of them run forward once more: at most
                       3/4 of the forward that is measured in the plain trainer, and 5 %
    lengths 1:4        of every pair one sequence is four times as long as the other, which the
                       plain trainer pads: less than 1

A turn is a whole optimizer step with all around it: drawing, collating and planning, the
optimizer, callbacks. Ratios are those of the medians. The wall clock decides; the time of the
lane's own thread on the processor stands beside it, because other work on the machine does not
show in it.
**Run it on a machine that does nothing else.**

Bytes are the most that are alive at once in a step, as torch's profiler reports them, with
weights, optimizer and reference: at most 1.05 times those of the plain trainer where lengths are
equal, less where they are not. They are counted, and do not depend on the machine's load.

Exits with 1 where a bound is broken.
"""

import os

# before torch is imported; one core, as a rank has on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import contextlib
import io
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer

from common import ROOT, argument_parser, load_average, machine, table, write_record
from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from overhead import Relay, Turn
from peak_bytes import _peak_and_rest as peak_and_rest

sys.path.append(str(ROOT))
from tests.hf.objectives import word_tokenizer, words_of

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS = 2048, 256, 2, 4, 2
PROMPT = 64  # tokens of every prompt
LONG = 512  # tokens of a sequence that is long, its prompt included
STOCK, OURS = "stock", "ours"


class FlexSeqDPOTrainer(FlexSeqMixin, DPOTrainer):
    """DPOTrainer with FlexSeqMixin in front."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Steps that both lanes take."""

    name: str
    steps: int = 0
    accumulation: int = 1
    pairs: int = 2
    """Of a batch."""
    ratio: int = 1
    """How many times as long one sequence of a pair is as the other; which one alternates."""

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch, padded."""
        return 2 * self.pairs * LONG

    def rows(self) -> list[dict[str, str]]:
        """Return random pairs."""
        rng = random.Random(0)
        end = 1  # token that the trainer adds
        found = []
        for index in range(self.steps * self.accumulation * self.pairs):
            sizes = [LONG - PROMPT - end, LONG // self.ratio - PROMPT - end]
            if index % 2:
                sizes.reverse()
            chosen, rejected = (" " + words_of(rng, size, VOCAB) for size in sizes)
            prompt = words_of(rng, PROMPT, VOCAB)
            found.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        return found


WORKS = (
    Work(name="one micro-batch"),
    Work(name="four", accumulation=4),
    Work(name="lengths 1:4", ratio=4),
)


# ---- the lanes


def llama(seed: int) -> LlamaForCausalLM:
    """Return a small model."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=HIDDEN * 11 // 4,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=LONG,
        )
    )


def make_trainer(lane: str, work: Work, folder: Path, callback: TrainerCallback) -> Any:
    """Return a lane's trainer."""
    args = DPOConfig(
        output_dir=str(folder / lane),
        per_device_train_batch_size=work.pairs,
        gradient_accumulation_steps=work.accumulation,
        train_sampling_strategy="sequential",
        max_steps=work.steps,
        max_length=None,
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    given: dict[str, Any] = {}
    if lane == OURS:
        given["flexseq_args"] = FlexSeqArguments(max_tokens_per_rank=work.batch_tokens)
    trainer = (FlexSeqDPOTrainer if lane == OURS else DPOTrainer)(
        model=llama(0),
        ref_model=llama(1),
        args=args,
        train_dataset=datasets.Dataset.from_list(work.rows()),
        processing_class=word_tokenizer(VOCAB),
        callbacks=[callback],
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class Forwards:
    """Times the forwards of a model that keep a graph. `seconds` has the clocks of each."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: list[tuple[float, float]] = []
        self._began = (0.0, 0.0)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def _begin(self, *args: Any) -> None:
        self._began = (time.perf_counter(), time.thread_time())

    def _end(self, *args: Any) -> None:
        if torch.is_grad_enabled():
            wall, cpu = self._began
            self.seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))


# ---- seconds


def measured_s(work: Work, warmup: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of each lane's steps behind the first `warmup`, by the wall clock and on
    the processor, those of the plain trainer's forward in a step, and how many micro-batches ours
    has run in the last."""
    relay = Relay([STOCK, OURS])
    forwards: list[Forwards] = []
    micro_batches: list[float] = []

    def lane(name: str) -> Callable[..., float]:
        def run(turn: Turn, work: Work, folder: Path) -> float:
            trainer = make_trainer(name, work, folder, turn)
            if name == STOCK:
                forwards.append(Forwards(trainer.model))
            loss: float = trainer.train().training_loss
            if name == OURS:
                log = trainer.state.log_history
                micro_batches.extend(
                    entry["flexseq/micro_batches"]
                    for entry in log
                    if "flexseq/micro_batches" in entry
                )
            return loss

        return run

    losses = relay.run({STOCK: lane(STOCK), OURS: lane(OURS)}, work, folder)  # type: ignore[arg-type]
    kept = forwards[0].seconds[warmup * work.accumulation :]
    found: dict[str, Any] = {"losses": losses, "micro_batches": micro_batches[-1]}
    for clock, name in enumerate(("wall_s", "cpu_s")):
        found[name] = {lane: relay.seconds[lane][clock][warmup:] for lane in (STOCK, OURS)}
        of_batches = [seconds[clock] for seconds in kept]
        found[name]["forward"] = statistics.median(of_batches) * work.accumulation
    return found


def ratio_and_bound(seconds: dict[str, Any], work: Work) -> tuple[float, float]:
    """Return ours over stock, of the medians, and what is allowed."""
    stock = statistics.median(seconds[STOCK])
    ours = statistics.median(seconds[OURS])
    if work.ratio > 1:
        return ours / stock, 1.0
    again = (work.accumulation - 1) / work.accumulation
    return ours / stock, 1.05 + again * seconds["forward"] / stock


# ---- bytes


class Peak(TrainerCallback):
    """Profiles the memory of the last step, from its first batch on."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._profile: profile | None = None
        self.peak = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin behind the last step but one, and end behind the last."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.peak, _ = peak_and_rest(self._profile)
            self._profile = None
        elif state.global_step == self._steps - 1:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()


def peak_bytes(lane: str, work: Work, folder: Path) -> int:
    """Return the most bytes that are alive at once in the second of two steps."""
    work = replace(work, steps=2)
    peak = Peak(work.steps)
    trainer = make_trainer(lane, work, folder, peak)
    trainer.train()
    alive = 0
    for model in (trainer.model, trainer.ref_model):
        alive += sum(p.numel() * p.element_size() for p in model.parameters())
    for state in trainer.optimizer.state.values():
        alive += sum(x.numel() * x.element_size() for x in state.values() if torch.is_tensor(x))
    return alive + peak.peak


# ---- the page


def main() -> int:
    """Print the tables, and return 1 where a bound is broken."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of every lane")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    print(f"on {machine('torch', 'transformers', 'trl')}, load {load_average()}\n")

    figures: dict[str, Any] = {}
    times, sizes = [], []
    is_broken = False
    for work in WORKS:
        said = io.StringIO()  # what trainers print at each step
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(said):
            folder = Path(name)
            timed = replace(work, steps=asked.warmup + asked.steps)
            found = measured_s(timed, asked.warmup, folder)
            found["bytes"] = {lane: peak_bytes(lane, work, folder) for lane in (STOCK, OURS)}
        figures[work.name] = found
        wall, bound = ratio_and_bound(found["wall_s"], work)
        cpu, _ = ratio_and_bound(found["cpu_s"], work)
        more = found["bytes"][OURS] / found["bytes"][STOCK]
        more_allowed = 1.05 if work.ratio == 1 else 1.0
        is_broken |= wall > bound or more > more_allowed
        times.append(
            (
                work.name,
                f"{found['micro_batches']:.0f}",
                f"{statistics.median(found['wall_s'][STOCK]):.3f}",
                f"{statistics.median(found['wall_s'][OURS]):.3f}",
                f"{wall:.3f}",
                f"{cpu:.3f}",
                f"{bound:.3f}",
            )
        )
        millions = [f"{found['bytes'][lane] / 1e6:.1f}" for lane in (STOCK, OURS)]
        sizes.append((work.name, *millions, f"{more:.3f}", f"{more_allowed:.2f}"))

    columns = (
        "steps",
        "micro-batches",
        "stock, s",
        "ours, s",
        "ratio",
        "on the processor",
        "bound",
    )
    print(table(columns, times, range(1, 7)))
    print()
    print(table(("steps", "stock, MB", "ours, MB", "ratio", "bound"), sizes, range(1, 5)))
    print(f"\nload at the end {load_average()}")
    write_record(asked.json, figures)
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
