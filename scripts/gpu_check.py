"""Check hf_flexseq on a CUDA GPU, and record what was seen.

    python scripts/gpu_check.py [--out FOLDER]        scripts/benchmarks/results by default

1. Every CUDA attention kernel that serves this machine, in bfloat16, forward and backward, against
   the plain float32 softmax. Its largest error may be twice that of the same softmax written
   plainly in bfloat16.
2. A small Llama on long-tailed lengths: FlexSeqTrainer against the stock Trainer with packed
   sequences, plain and under FSDP2, each in a process of its own. Losses must agree to 1 % at
   every step; tokens per second and peak memory are reported.

The report is printed and written to a dated file under --out. Exits with 0 when all checks hold, 1
when one does not, and 2 without a CUDA GPU.
"""

import argparse
import datetime
import json
import math
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import CANDIDATES
from hf_flexseq.kernels.flash_attn import FlashAttn
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "benchmarks/results"
FSDP2 = HERE.parent / "recipes/accelerate_configs/fsdp2.yaml"
HEADS, KV_HEADS, HEAD_DIM, SCALE = 8, 2, 128, 128**-0.5
LENGTHS = [1, 0, 17, 1021, 128, 64, 2053]
SEGMENTS = {
    "causal": (LENGTHS, LENGTHS, True),
    "causal, with earlier keys": (LENGTHS, [n + 100 for n in LENGTHS], True),
    "rectangles, some without queries or keys": (LENGTHS, [5, 33, 0, 509, 4096, 1, 0], False),
    "one query at most": ([1, 0, 1], [300, 7, 64], False),
}
TENSORS = ("out", "dq", "dk", "dv")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=HERE / "benchmarks/results", help="folder of the report"
    )
    # one of its own processes
    parser.add_argument("--train", choices=["stock", "flexseq"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    if args.train:
        print(json.dumps(train(args.train, FULL)))
        return 0
    kernels, kernels_hold = kernel_report(torch.device("cuda"))
    runs = {name: launch(command) for name, command in train_commands().items()}
    training, training_holds = training_report(runs)
    report = "\n".join([*heading(), *kernels, *training])
    print(report)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{datetime.date.today()}_gpu_check.md").write_text(report + "\n")
    return 0 if kernels_hold and training_holds else 1


def heading() -> list[str]:
    """Return the first lines of the report: the command, the device, the versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = "unknown"
    if shutil.which("nvidia-smi"):
        driver = subprocess.check_output(query, text=True).strip()
    return [
        f"# GPU check, {datetime.date.today()}",
        f"\n    {shlex.join(['python', 'scripts/gpu_check.py', *sys.argv[1:]])}",
        f"\n{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}",
    ]


# ---- kernels


def kernel_report(device: torch.device) -> tuple[list[str], bool]:
    """Compare every kernel of the device; return a table of errors, and whether all are small."""
    lines = [
        "\n## Attention kernels in bfloat16: largest error against float32 (of a plain "
        "bfloat16 softmax)\n"
    ]
    lines += [
        f"| kernel | case | {' | '.join(TENSORS)} | |",
        "|---|---|" + "---|" * (len(TENSORS) + 1),
    ]
    holds = True
    for kernel in CANDIDATES[device.type]:
        refusal = kernel.why_not(device, torch.bfloat16, HEAD_DIM)
        if refusal:
            lines.append(f"| {kernel.name} | not run: {refusal} |")
            continue
        for case, (q_lens, k_lens, causal) in SEGMENTS.items():
            errors, ok = kernel_errors(
                kernel, Segments(q_lens, k_lens, causal=causal, device=device)
            )
            cells = " | ".join(f"{mine:.1e} ({plain:.1e})" for mine, plain in errors)
            lines.append(f"| {kernel.name} | {case} | {cells} | {'ok' if ok else 'FAILED'} |")
            holds = holds and ok
    return lines, holds


def kernel_errors(kernel: Kernel, segments: Segments) -> tuple[list[tuple[float, float]], bool]:
    """Return (error of kernel, error of plain softmax) for each of `TENSORS`, and a verdict.

    The verdict is True when every error of the kernel is within its bound.
    """
    make = torch.Generator(segments.device).manual_seed(0)
    q = _normal((segments.total_q, HEADS, HEAD_DIM), make)  # [tokens, heads, head_dim]
    dout = _normal((segments.total_q, HEADS, HEAD_DIM), make)
    k = _normal((segments.total_k, KV_HEADS, HEAD_DIM), make)
    v = _normal((segments.total_k, KV_HEADS, HEAD_DIM), make)
    out, lse, *grads = _run(kernel, q, k, v, dout, segments)
    true_out, true_lse, *true_grads = _run(
        Reference(), *(x.float() for x in (q, k, v, dout)), segments
    )
    errors = []
    for mine, plain, true in zip(
        (out, *grads),
        plain_softmax(q, k, v, dout, segments),
        (true_out, *true_grads),
        strict=True,
    ):
        errors.append((_error(mine, true), _error(plain, true)))
    # The log-sum-exp is float32 in both, so it only differs by the order of its sums; -inf must be
    # where it should.
    lse_agrees = torch.allclose(lse, true_lse, rtol=1e-4, atol=1e-4)
    return errors, lse_agrees and all(error <= 2 * bound for error, bound in errors)


def plain_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, segments: Segments
) -> list[torch.Tensor]:
    """Return out, dq, dk, dv of softmax attention in the dtype of its inputs, by autograd.

    q and dout [tokens, heads, head_dim], k and v [keys, kv_heads, head_dim]; the results have the
    shapes of q, q, k and v.
    """
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    lq = leaves[0]
    lk = leaves[1].repeat_interleave(HEADS // KV_HEADS, 1)  # [keys, heads, head_dim]
    lv = leaves[2].repeat_interleave(HEADS // KV_HEADS, 1)
    out = torch.zeros_like(q)
    for rows, keys in segments.blocks():
        scores = torch.einsum("nhd,mhd->hnm", lq[rows], lk[keys]) * SCALE  # [heads, n, m]
        if segments.causal:
            earlier = scores.shape[2] - scores.shape[1]  # keys in front of the first query
            later = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + earlier)
            scores = scores.masked_fill(later, -torch.inf)
        out[rows] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), lv[keys])
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def _run(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, ...]:
    """Return out, lse, dq, dk, dv of a kernel, in its shapes."""
    out, lse = kernel.forward(q, k, v, segments, scale=SCALE)
    return out, lse, *kernel.backward(dout, q, k, v, out, lse, segments, scale=SCALE)


def _normal(shape: tuple[int, ...], make: torch.Generator) -> torch.Tensor:
    """Return normal numbers in bfloat16, of this shape."""
    return torch.randn(shape, generator=make, device=make.device).to(torch.bfloat16)


def _error(got: torch.Tensor, true: torch.Tensor) -> float:
    """Return the largest difference of two tensors of one shape."""
    return (got.float() - true).abs().max().item()


# ---- training


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


FULL = Sizes(layers=12, hidden=1024, longest=8192, batch=8, steps=20, warmup=5)


def train_commands() -> dict[str, list[str]]:
    """Return a command for every row of the training table."""
    accelerate = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        f"--config_file={FSDP2}",
        "--num_processes=1",
    ]
    launchers = {"": [sys.executable], ", FSDP2": accelerate}
    return {
        f"{trainer}{how}": [*launcher, str(HERE / "gpu_check.py"), "--train", trainer]
        for how, launcher in launchers.items()
        for trainer in ("stock", "flexseq")
    }


def launch(command: list[str]) -> dict[str, Any]:
    """Run a command; return the measurements of its last line, or `error`, its last words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": " / ".join(done.stderr.strip().splitlines()[-3:])}
    return json.loads(done.stdout.strip().splitlines()[-1])


def training_report(runs: dict[str, dict[str, Any]]) -> tuple[list[str], bool]:
    """Return a table of the runs, and whether all of them have the losses of the stock Trainer."""
    lines = [
        f"\n## Training on one GPU: {FULL.layers} layers of {FULL.hidden}, up to "
        f"{FULL.longest} tokens\n"
    ]
    lines += [
        "| run | attention | tokens/s | peak GiB | loss, first and last | |",
        "|---|---|---|---|---|---|",
    ]
    stock = runs["stock"]
    holds = True
    for name, run in runs.items():
        ok = (
            "error" not in run
            and "error" not in stock
            and losses_agree(run["losses"], stock["losses"])
        )
        holds = holds and ok
        if "error" in run:
            lines.append(f"| {name} | FAILED: {run['error']} |")
            continue
        verdict = "ok" if ok else "FAILED: losses differ"
        losses = f"{run['losses'][0]:.4f}, {run['losses'][-1]:.4f} | {verdict}"
        speed = f"{run['tokens_per_s']:,.0f} | {run['peak_gib']:.2f}"
        lines.append(f"| {name} | {run['attention']} | {speed} | {losses} |")
    return lines, holds


def losses_agree(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= 0.01 * y for x, y in zip(a, b, strict=True))


def train(trainer_name: str, sizes: Sizes, **options: Any) -> dict[str, Any]:
    """Train with the `stock` or the `flexseq` trainer and return what was measured.

    options: for the training arguments.
    """
    flexseq = trainer_name == "flexseq"
    with tempfile.TemporaryDirectory() as folder:
        args = (FlexSeqConfig if flexseq else TrainingArguments)(
            output_dir=folder,
            per_device_train_batch_size=sizes.batch,
            max_steps=sizes.steps,
            bf16=True,
            logging_steps=1,
            include_num_input_tokens_seen="all",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        set_seed(0)
        packed = "flash_attention_2"
        if FlashAttn().why_not(args.device, torch.bfloat16, HEAD_DIM):
            packed = "sdpa"
        clock = Clock(sizes.warmup)
        trainer = (FlexSeqTrainer if flexseq else Trainer)(
            model=small_llama(sizes, packed),
            args=args,
            train_dataset=list(examples(sizes)),
            data_collator=DataCollatorForFlexSeq() if flexseq else DataCollatorWithFlattening(),
            callbacks=[clock],
        )
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"attention": "flexseq" if flexseq else packed, "losses": losses} | clock.measured()


def small_llama(sizes: Sizes, attention: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=8192,
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
    """Yield random sequences of CommonCrawl-like, log-normal lengths, enough for one pass."""
    rng = random.Random(0)
    for _ in range(sizes.batch * sizes.steps):
        length = min(max(int(rng.lognormvariate(math.log(950), 1.75)), 2), sizes.longest)
        tokens = rng.choices(range(8192), k=length)
        yield {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """A clock of the steps after the first `warmup`."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.marks: list[tuple[float, int]] = []  # seconds and tokens so far, after each step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, *others: Any, **kwargs: Any
    ) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), state.num_input_tokens_seen))

    def measured(self) -> dict[str, float]:
        """Return tokens per second, and the peak memory in GiB."""
        start, tokens_before = self.marks[self.warmup - 1]
        stop, tokens = self.marks[-1]
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {"tokens_per_s": (tokens - tokens_before) / (stop - start), "peak_gib": peak}


if __name__ == "__main__":
    sys.exit(main())
