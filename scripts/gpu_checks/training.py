"""A small Llama: FlexSeqTrainer against the stock Trainer.

    training    on long-tailed lengths, packed; under accelerate's FSDP2, too, each in a process
                of its own
    lengths     on one sequence a step, of 8,192 to 65,536 tokens

Losses must agree to 1 % at every step; tokens per second and peak memory are reported.
"""

import gc
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from gpu_checks.report import (
    SCRIPT,
    TRAIN_PART,
    Section,
    Setting,
    launch,
    table,
    this_script,
    verdict,
)
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.kernels.capabilities import CallKind
from hf_flexseq.kernels.flash_attn import FlashAttn

FSDP2 = SCRIPT.parents[1] / "recipes/accelerate_configs/fsdp2.yaml"
HEAD_DIM = 128
VOCAB = 8192


class Sizes(NamedTuple):
    """The model and the run that the trainers are compared on."""

    layers: int
    hidden: int
    longest: int
    """Tokens of the longest sequence."""
    batch: int
    """Sequences per step."""
    steps: int
    warmup: int
    """Steps at the start that are not timed."""
    one_length: bool = False
    """Whether all sequences are as long as the longest; else lengths are long-tailed."""


TRAINERS = ("stock", "flexseq")
FULL = Sizes(layers=12, hidden=1024, longest=8192, batch=8, steps=20, warmup=5)
SHORT = Sizes(layers=1, hidden=128, longest=64, batch=2, steps=3, warmup=1)
QUICK_STEPS = 10
LENGTHS, SHORT_LENGTHS = (8192, 16384, 32768, 65536), (64, 128)  # tokens, in the part `lengths`
STEPS, WARMUP = 6, 2  # there


def training_section(setting: Setting) -> Section:
    """Train in all ways, and compare the losses with those of the stock Trainer."""
    runs = {}
    for name in TRAINERS:
        try:
            runs[name] = train(name, _sizes(setting), **options_of(name, setting))
        except (RuntimeError, ValueError, OSError) as error:
            runs[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    runs |= {name: launch(command) for name, command in fsdp_commands(setting).items()}
    return section_of(runs, _sizes(setting))


def fsdp_commands(setting: Setting) -> dict[str, list[str]]:
    """Return a command for every row under accelerate's FSDP2, which it has not on a CPU."""
    if setting.rehearse:
        return {}
    accelerate = ["-m", "accelerate.commands.launch", f"--config_file={FSDP2}"]
    launcher = [sys.executable, *accelerate, "--num_processes=1"]
    commands = {}
    for trainer in TRAINERS:
        arguments = this_script(TRAIN_PART, setting, "--trainer", trainer)
        commands[f"{trainer}, FSDP2"] = [*launcher, *arguments]
    return commands


def options_of(trainer_name: str, setting: Setting) -> dict[str, Any]:
    """Return training arguments of a trainer: a quick run does not measure a cost model first."""
    options: dict[str, Any] = {"use_cpu": True} if setting.rehearse else {}
    if trainer_name == "flexseq" and setting.quick:
        options["cost_model"] = "estimate"
    return options


def section_of(runs: dict[str, dict[str, Any]], sizes: Sizes) -> Section:
    """Return a table of the runs, by name; "stock" is what the others are compared with."""
    stock = runs["stock"]
    rows = []
    holds = True
    for name, run in runs.items():
        if "error" in run:
            rows.append([name, f"FAILED: {run['error']}"])
            holds = False
            continue
        agrees = "error" not in stock and losses_agree(run["losses"], stock["losses"])
        holds = holds and agrees
        losses = f"{run['losses'][0]:.4f}, {run['losses'][-1]:.4f}"
        speed = f"{run['tokens_per_s']:,.0f}"
        cells = [name, run["attention"], speed, f"{run['peak_gib']:.2f}", losses]
        rows.append([*cells, verdict(agrees)])
    columns = ["run", "attention", "tokens/s", "peak GiB", "loss, first and last", ""]
    return Section(
        title=f"Training on one device: {sizes.layers} layers of {sizes.hidden}, up to "
        f"{sizes.longest} tokens",
        lines=table(columns, rows),
        holds=holds,
    )


def losses_agree(a: list[float], b: list[float]) -> bool:
    """Return whether losses, by step, differ by 1 % at most."""
    return len(a) == len(b) and all(abs(x - y) <= 0.01 * y for x, y in zip(a, b, strict=True))


def lengths_section(setting: Setting) -> Section:
    """Train on one sequence a step, of every length, with both trainers in turns."""
    short = setting.rehearse
    lengths = SHORT_LENGTHS if short else LENGTHS
    sizes = SHORT if short else FULL
    rows = []
    holds = True
    for tokens in lengths:
        alone = sizes._replace(
            longest=tokens, batch=1, steps=STEPS, warmup=WARMUP, one_length=True
        )
        stock, flexseq = (train(one, alone, **options_of(one, setting)) for one in TRAINERS)
        agrees = losses_agree(flexseq["losses"], stock["losses"])
        holds = holds and agrees
        ratio = flexseq["tokens_per_s"] / stock["tokens_per_s"]
        speeds = [f"{run['tokens_per_s']:,.0f}" for run in (stock, flexseq)]
        peaks = [f"{run['peak_gib']:.2f}" for run in (stock, flexseq)]
        rows.append([f"{tokens:,}", *speeds, f"{ratio:.2f}x", *peaks, verdict(agrees)])
    columns = ["tokens", f"stock, {stock['attention']}: tokens/s", "flexseq: tokens/s", "ratio"]
    columns += ["stock: peak GiB", "flexseq: peak GiB", ""]
    return Section(
        title=f"One sequence a step on one device: {sizes.layers} layers of {sizes.hidden}",
        lines=table(columns, rows),
        holds=holds,
    )


def run_training(setting: Setting, trainer_name: str) -> None:
    """Train in one way, and print what was measured as JSON."""
    found = train(trainer_name, _sizes(setting), **options_of(trainer_name, setting))
    print(json.dumps(found))


def _sizes(setting: Setting) -> Sizes:
    """Return the model and the run on long-tailed lengths."""
    if setting.rehearse:
        return SHORT
    return FULL._replace(steps=QUICK_STEPS) if setting.quick else FULL


def train(trainer_name: str, sizes: Sizes, **options: Any) -> dict[str, Any]:
    """Train with the `stock` or the `flexseq` trainer and return what was measured.

    options: for the training arguments.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed = "flash_attention_2"
    if FlashAttn().reason_unsupported(CallKind(device, torch.bfloat16, HEAD_DIM)):
        packed = "sdpa"
    set_seed(0)
    found = measured(
        trainer_name == "flexseq",
        small_llama(sizes, packed),
        list(examples(sizes)),
        DataCollatorWithFlattening(),
        warmup=sizes.warmup,
        per_device_train_batch_size=sizes.batch,
        max_steps=sizes.steps,
        **options,
    )
    return {"attention": "flexseq" if trainer_name == "flexseq" else packed} | found


def measured(
    flexseq: bool,
    model: PreTrainedModel,
    dataset: list[dict[str, Any]],
    collator: Callable[..., Any],
    *,
    warmup: int,
    **options: Any,
) -> dict[str, Any]:
    """Train in bfloat16 with FlexSeqTrainer or the stock Trainer; return losses, tokens per second
    and peak memory.

    collator: of the stock Trainer. warmup: steps that are not timed. options: for the training
    arguments.
    """
    clock = Clock(warmup)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        args = (FlexSeqConfig if flexseq else TrainingArguments)(
            output_dir=folder,
            bf16=True,
            logging_steps=1,
            include_num_input_tokens_seen="all",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        trainer = (FlexSeqTrainer if flexseq else Trainer)(
            model=model,
            args=args,
            train_dataset=dataset,
            data_collator=DataCollatorForFlexSeq() if flexseq else collator,
            callbacks=[clock],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"losses": losses} | clock.measured()


def small_llama(sizes: Sizes, attention: str) -> LlamaForCausalLM:
    """Return a model of these sizes with transformers' own attention of this name."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 11 // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // HEAD_DIM,
        num_key_value_heads=max(sizes.hidden // HEAD_DIM // 4, 1),
        max_position_embeddings=sizes.longest,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def examples(sizes: Sizes) -> Iterator[dict[str, list[int]]]:
    """Yield random sequences, enough for one pass; long-tailed lengths are log-normal as those of
    CommonCrawl are."""
    rng = random.Random(0)
    for _ in range(sizes.batch * sizes.steps):
        length = sizes.longest
        if not sizes.one_length:
            length = min(max(int(rng.lognormvariate(math.log(950), 1.75)), 2), length)
        tokens = rng.choices(range(VOCAB), k=length)
        yield {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """A clock of the steps after the first `warmup`."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.marks: list[tuple[float, int]] = []  # seconds and tokens so far, after each step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any
    ) -> None:
        """Note the time of a step, and the tokens so far."""
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), state.num_input_tokens_seen))

    def measured(self) -> dict[str, float]:
        """Return tokens per second, and the peak memory in GiB."""
        start, tokens_before = self.marks[self.warmup - 1]
        stop, tokens = self.marks[-1]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {"tokens_per_s": (tokens - tokens_before) / (stop - start), "peak_gib": peak}
