"""Predicted against executed seconds of micro-batches, on CPU ranks with one thread each.

    torchrun --nproc_per_node 2 scripts/benchmarks/predictions.py
    torchrun --nproc_per_node 2 scripts/benchmarks/predictions.py --window 512
    torchrun --nproc_per_node 2 scripts/benchmarks/predictions.py --recurrent --budget 12

The model, the corpus and the plans are the quickstart's; with --window the model is a Gemma 3 of
the same sizes with twice the layers, five of six with such a window; with --recurrent it is a
Qwen3.5 of eight layers, three of four of them Gated DeltaNet. The cost model is calibrated
on the same ranks; then the micro-batches of some optimizer steps are planned with it and executed,
forward and backward, all ranks starting together. Both are done in turns, so that a machine that
others use as well is as busy for the one as for the other.

Predicted is the closed form: the slowest rank plus the constant. Executed is the slowest rank's
median. The reduction of gradients at a step's end, which no plan changes, is in neither.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from common import ROOT, argument_parser, table, write_record
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqConfig, FlexSeqEngine
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.plan import MicroBatch
from hf_flexseq.profiler.design import Effort
from hf_flexseq.profiler.measure import median_seconds
from hf_flexseq.steps.inputs import Inputs

sys.path.append(str(ROOT / "recipes"))

from arguments import parse
from launch import device_defaults
from model import load_model
from sft import prepare

QUICKSTART = ROOT / "recipes/quickstart/small_llama.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One micro-batch that was planned and executed."""

    kind: str
    """Its widest group, and whether ranks also work alone."""
    predicted_s: float
    executed_s: float

    @property
    def error(self) -> float:
        """The error relative to the executed seconds."""
        return abs(self.predicted_s - self.executed_s) / self.executed_s


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    model_args, data_args, training = parse(
        ["--config", str(QUICKSTART)], FlexSeqConfig, device_defaults()
    )
    tokenizer, sequences, _ = prepare(model_args, data_args, training)
    # after the training arguments, which reset accelerate's state
    accelerator = Accelerator(cpu=True)
    if args.window is not None:
        model_args.model_config |= gemma_3(model_args.model_config, args.window)
    if args.recurrent:
        model_args.model_config |= qwen3_5(model_args.model_config)
    model = load_model(model_args, tokenizer)
    loader = torch.utils.data.DataLoader(
        sequences.select_columns(["input_ids", "labels"]),
        batch_size=training.per_device_train_batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(training.seed),
        collate_fn=DataCollatorForFlexSeq(),
    )
    batches = iter(accelerator.prepare(loader))
    pairs: list[Pair] = []
    records: list[dict[str, Any]] = []
    for turn in range(args.turns):
        began = time.perf_counter()
        effort = Effort(budget_s=args.budget, rounds=args.rounds, held_out=8)
        record = calibrate(
            model.config.to_dict(), dtype="float32", checkpointing=False, effort=effort
        )
        line = calibration_line(turn, record, time.perf_counter() - began)
        engine = calibrated_engine(
            accelerator, record, args.strategy, training.max_tokens_per_rank
        )
        pairs += execute(engine, model, batches, args)
        records.append(record)
        if accelerator.is_main_process:
            print("\n".join([line] if turn else [*heading(args, record), line]))
    if accelerator.is_main_process:
        print(f"\n{error_table(pairs)}")
        figures = {"micro_batches": [asdict(pair) for pair in pairs], "calibrations": records}
        write_record(args.json, figures)
    accelerator.end_training()


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--turns", type=int, default=4, help="calibrations, each followed by some steps"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        help="optimizer steps of a turn whose micro-batches are executed",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="times that each run is timed, after one that is not"
    )
    parser.add_argument(
        "--budget", type=float, default=4.0, help="estimated seconds of the calibration"
    )
    parser.add_argument("--window", type=int, help="tokens; a Gemma 3 instead of a Llama")
    parser.add_argument(
        "--recurrent", action="store_true", help="a Qwen3.5 with Gated DeltaNet instead"
    )
    parser.add_argument("--strategy", default="auto", help="as in FlexSeqArguments")
    return parser.parse_args()


def gemma_3(sizes: dict[str, Any], window: int) -> dict[str, Any]:
    """Return what a Gemma 3 of these sizes has in another way: five layers with a window to a full
    one."""
    return {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2 * sizes["num_hidden_layers"],
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "sliding_window": window,
    }


def qwen3_5(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what a Qwen3.5 of these sizes has in another way: three layers of Gated DeltaNet to a
    full one, whose keys are as wide as the hidden states, and values twice."""
    key_heads = sizes["num_key_value_heads"]
    key_dim = sizes["hidden_size"] // key_heads
    return {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 8,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": 2 * key_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": key_dim,
    }


def calibrated_engine(
    accelerator: Accelerator, record: dict[str, Any], strategy: str, max_tokens_per_rank: int
) -> FlexSeqEngine:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cost.json"
        CostModel.from_record(record["cost_model"]).save(path)
        options = {
            "sync": "lockstep",
            "lookahead": 0,
            "strategy": strategy,
            "max_tokens_per_rank": max_tokens_per_rank,
        }
        return FlexSeqEngine(accelerator, FlexSeqArguments(cost_model=str(path), **options))


def execute(
    engine: FlexSeqEngine, model: nn.Module, batches: Iterator[Any], args: argparse.Namespace
) -> Iterator[Pair]:
    """Execute the next steps, and yield every micro-batch's seconds. Collective."""
    with engine.attached(model.train()):
        assert engine.cost is not None, "an attached engine has a cost model"
        for step in islice(engine.steps(batches), args.steps):
            micro_batches = engine.micro_batches(step.step, model)
            for index, inputs in zip(step.step.indices, micro_batches, strict=True):
                run = partial(forward_backward, model, inputs, step.step.targets)
                (by_rank,) = median_seconds(
                    [run], engine.communicator, engine.accelerator.device, args.rounds
                )
                micro_batch = step.plan.micro_batches[index]
                predicted = lockstep_ns(
                    engine.cost, [micro_batch], step.plan.lengths, engine.communicator.topology
                )
                yield Pair(
                    kind=kind(micro_batch), predicted_s=predicted[0] / 1e9, executed_s=max(by_rank)
                )
                step.step.add(torch.zeros(()))  # a loss that nobody reads


def forward_backward(model: nn.Module, inputs: Inputs, targets: int) -> None:
    model(**inputs, use_cache=False, num_items_in_batch=max(targets, 1)).loss.backward()


def kind(micro_batch: MicroBatch) -> str:
    """Name the widest group, and say whether ranks also work alone."""
    widest = micro_batch.groups[0]
    if widest.degree == 1:
        return "every rank alone"
    beside = " beside ranks alone" if micro_batch.groups[-1].degree == 1 else ""
    return f"{widest.strategy} of {widest.degree}{beside}"


def heading(args: argparse.Namespace, record: dict[str, Any]) -> list[str]:
    return [
        f"{record['device']}, {os.cpu_count()} cores; {record['topology'][1]} ranks, "
        f"{record['threads']} thread each; "
        f"torch {record['torch']}, {record['dtype']}",
        f"{args.turns} turns of a calibration and {args.steps} steps, strategy {args.strategy}; "
        f"medians of "
        f"{args.rounds} runs",
        "",
    ]


def calibration_line(turn: int, record: dict[str, Any], seconds: float) -> str:
    held_out = record["hold_out"]
    return (
        f"* calibration {turn + 1}, load {os.getloadavg()[0]:.1f}: {seconds:.1f} s, at most "
        f"{record['tokens']} tokens a rank; {len(held_out['errors'])} micro-batches held out: "
        f"{held_out['median']:.1%} off at the median"
    )


def error_table(pairs: list[Pair]) -> str:
    """Return one row for all micro-batches and one for each kind."""
    columns = (
        "micro-batches",
        "number",
        "executed, median s",
        "predicted / executed, median",
        "error, median",
        "p90",
    )
    by_kind = {"all": pairs}
    for name in sorted({pair.kind for pair in pairs}):
        by_kind[name] = [pair for pair in pairs if pair.kind == name]
    rows = []
    for name, chosen in by_kind.items():
        errors = sorted(pair.error for pair in chosen)
        seconds = statistics.median(pair.executed_s for pair in chosen)
        ratio = statistics.median(pair.predicted_s / pair.executed_s for pair in chosen)
        p90 = errors[int(0.9 * (len(errors) - 1))]
        row = [name, len(chosen), f"{seconds:.3f}", f"{ratio:.3f}"]
        rows.append([*row, f"{statistics.median(errors):.1%}", f"{p90:.1%}"])
    return table(columns, rows, numbers=(1, 2, 3, 4, 5))


if __name__ == "__main__":
    main()
