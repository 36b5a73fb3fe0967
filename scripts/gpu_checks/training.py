"""FlexSeqTrainer against the stock Trainer, on one GPU in bfloat16.

    training    four layers of Llama-3.1-8B on long-tailed packs of about 33,000 tokens. The stock
                Trainer packs, too, with torch's varlen attention behind transformers' interface
                (`attend_packed`): sdpa would compute a dense mask. FlexSeqTrainer runs on the same
                kernel, and with cuDNN for long sequences, as it is by default on Hopper
    lengths     12 layers of 1,024 on one sequence a step, of 8,192 to 65,536 tokens; the stock
                Trainer with sdpa, as a user without packages would

Losses must agree to 1 % at every step. Tokens per second, ratios and peak memory are reported.
"""

import gc
import inspect
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AttentionInterface,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from gpu_checks.one_rank import FOUR_LAYERS, TINY
from gpu_checks.rates import LONG_TAIL
from gpu_checks.report import Section, Setting, table, verdict
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf.model.attention import packed_rows
from hf_flexseq.kernels import cudnn_long

VOCAB = 8192
PACKED = "varlen"  # torch's varlen attention, by the name that transformers knows it by
NEVER = 1 << 60  # tokens
WIDE = {  # of `lengths`
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 12,
    "max_position_embeddings": 131072,
}
LENGTHS, QUICK_LENGTHS, SHORT_LENGTHS = (8192, 16384, 32768, 65536), (16384, 65536), (64, 128)


class Run(NamedTuple):
    """A model, and the lengths of its sequences step by step."""

    sizes: dict[str, Any]
    steps: list[list[int]]
    warm_up: int
    """Steps at the start that are not timed."""


def training_section(setting: Setting) -> Section:
    """Train on packs with the stock Trainer and in both ways with FlexSeqTrainer."""
    lengths, count = (LONG_TAIL, 8 if setting.quick else 16)
    if setting.rehearse:
        lengths, count = (40, 9, 4, 3), 3
    rng = random.Random(0)
    steps = []
    for _ in range(count):
        steps.append([max(2, int(n * rng.uniform(0.9, 1.0))) for n in lengths])
    sizes = TINY if setting.rehearse else FOUR_LAYERS
    run = Run({**sizes, "vocab_size": VOCAB}, steps, warm_up=1 if setting.rehearse else 3)
    packed = "sdpa" if setting.rehearse else PACKED
    ways = {
        f"stock, {packed}": lambda: trained(False, run, packed, setting),
        "flexseq, without cuDNN": lambda: trained(True, run, packed, setting, long=NEVER),
        "flexseq": lambda: trained(True, run, packed, setting),
    }
    title = (
        f"Training on one device: {sizes['num_hidden_layers']} layers of {sizes['hidden_size']}"
    )
    return compared(f"{title}, packs of about {sum(steps[-1]):,} tokens", ways)


def lengths_section(setting: Setting) -> Section:
    """Train on one sequence a step, of every length, with both trainers in turns."""
    lengths = QUICK_LENGTHS if setting.quick else LENGTHS
    lines: list[str] = []
    holds = True
    for tokens in SHORT_LENGTHS if setting.rehearse else lengths:
        sizes = {**(TINY if setting.rehearse else WIDE), "vocab_size": VOCAB}
        run = Run(sizes, [[tokens]] * 6, warm_up=2)
        ways = {
            f"{tokens:,} tokens: stock, sdpa": lambda run=run: trained(
                False, run, "sdpa", setting
            ),
            f"{tokens:,} tokens: flexseq": lambda run=run: trained(True, run, "sdpa", setting),
        }
        section = compared("", ways)
        lines += section.lines[2 if lines else 0 :]  # one head of the table
        holds = holds and section.holds
    return Section(
        title=f"One sequence a step on one device: {sizes['num_hidden_layers']} layers of "
        f"{sizes['hidden_size']}",
        lines=tuple(lines),
        holds=holds,
    )


def compared(title: str, ways: dict[str, Callable[[], dict[str, Any]]]) -> Section:
    """Train in all ways; return a table in which the first is what others are compared with."""
    rows = []
    holds = True
    stock: dict[str, Any] | None = None
    for name, train in ways.items():
        try:
            found = train()
        except (RuntimeError, ValueError, OSError) as error:
            rows.append([name, f"FAILED: {type(error).__name__}: {error}".splitlines()[0]])
            holds = False
            continue
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if stock is None and not rows:
            stock = found
        agrees = stock is not None and losses_agree(found["losses"], stock["losses"])
        holds = holds and agrees
        ratio = f"{found['tokens_per_s'] / stock['tokens_per_s']:.2f}x" if stock else "-"
        losses = f"{found['losses'][0]:.4f}, {found['losses'][-1]:.4f}"
        speed = f"{found['tokens_per_s']:,.0f}"
        rows.append([name, speed, ratio, f"{found['peak_gib']:.2f}", losses, verdict(agrees)])
    columns = ["trainer", "tokens/s", "ratio", "peak GiB", "loss, first and last", ""]
    return Section(title=title, lines=table(columns, rows), holds=holds)


def losses_agree(a: Sequence[float], b: Sequence[float]) -> bool:
    """Return whether losses, by step, differ by 1 % at most."""
    return len(a) == len(b) and all(abs(x - y) <= 0.01 * y for x, y in zip(a, b, strict=True))


def trained(
    flexseq: bool, run: Run, attention: str, setting: Setting, *, long: int = cudnn_long.LONG
) -> dict[str, Any]:
    """Train with FlexSeqTrainer or the stock Trainer; return losses, tokens per second and peak
    memory.

    attention: of the stock Trainer. long: tokens from which on FlexSeqTrainer leaves sequences to
    cuDNN, where it can run.
    """
    clock = Clock(run.warm_up)
    set_seed(0)
    with torch.device(setting.device):
        model = LlamaForCausalLM(LlamaConfig(**run.sizes, attn_implementation=attention))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    own = {"cost_model": "estimate"} if flexseq else {}
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=attention == PACKED)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(cudnn_long, "LONG", long):
        args = (FlexSeqConfig if flexseq else TrainingArguments)(
            output_dir=folder,
            bf16=True,
            use_cpu=setting.rehearse,
            max_steps=len(run.steps),
            per_device_train_batch_size=len(run.steps[0]),
            train_sampling_strategy="sequential",
            logging_steps=1,
            include_num_input_tokens_seen="all",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **own,
        )
        trainer = (FlexSeqTrainer if flexseq else Trainer)(
            model=model,
            args=args,
            train_dataset=list(examples(run)),
            data_collator=DataCollatorForFlexSeq() if flexseq else collator,
            callbacks=[clock],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"losses": losses} | clock.measured()


def examples(run: Run) -> Iterator[dict[str, list[int]]]:
    """Yield random sequences, step by step."""
    rng = random.Random(0)
    for lengths in run.steps:
        for length in lengths:
            tokens = rng.choices(range(VOCAB), k=length)
            yield {"input_ids": tokens, "labels": tokens}


def attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the sequences of a packed row by torch's own varlen attention.

    query [1, heads, tokens, D], key and value [1, kv_heads, tokens, D] -> [1, tokens, heads, D].
    """
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scaling} if "scale" in known else {}
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = key.shape[1] != query.shape[1]
    cu, most = cu_seq_lens_q.to(torch.int32), int(max_length_q)
    out = varlen_attn(*packed_rows(query, key, value), cu, cu, most, most, **options)
    return out.unsqueeze(0), None


AttentionInterface.register(PACKED, attend_packed)


class Clock(TrainerCallback):
    """A clock of the steps after the first `warm_up`."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
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
        start, tokens_before = self.marks[self.warm_up - 1]
        stop, tokens = self.marks[-1]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {"tokens_per_s": (tokens - tokens_before) / (stop - start), "peak_gib": peak}
