"""Predicted against executed seconds of micro-batches, on CPU ranks with one thread each.

    torchrun --nproc_per_node 2 scripts/benchmarks/predictions.py
    torchrun --nproc_per_node 2 scripts/benchmarks/predictions.py --window 512
    torchrun --nproc_per_node 2 scripts/benchmarks/predictions.py --recurrent --budget 12
    torchrun --nproc_per_node 2 scripts/benchmarks/predictions.py --experts

The model, the corpus and the plans are the quickstart's; with --window the model is a Gemma 3 of
the same sizes with twice the layers, five of six with such a window; with --recurrent it is a
Qwen3.5 of eight layers, three of four of them Gated DeltaNet. With --experts it is a Qwen3-MoE of
eight experts, two to a token, which transformers puts over the ranks by FSDP2: once with the
experts over all of them, too, and once with all experts on every rank.

The cost model is calibrated on the same ranks, with --experts as `cost_model="auto"` does it when
a model is attached; then the micro-batches of some optimizer steps are planned with it and
executed, forward and backward, all ranks starting together. Both are done in turns, so that a
machine that others use as well is as busy for the one as for the other.

Predicted is the closed form: the slowest rank plus the constant. Executed is the slowest rank's
median. The reduction of gradients at a step's end, which no plan changes, is in neither; FSDP2
gathers weights and reduces gradients in every micro-batch, which is in both. With --processor
seconds are those in which a rank's processor works for it, in the calibration as well: what other
programs take from a busy machine does not count then, nor do waits of one rank for another.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from common import ROOT, argument_parser, cpu_model, table, write_record
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqConfig, FlexSeqEngine
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.hf.calibration import choose
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.plan import MicroBatch
from hf_flexseq.profiler import measure
from hf_flexseq.profiler.design import Effort
from hf_flexseq.profiler.measure import median_seconds
from hf_flexseq.steps.inputs import Inputs

sys.path.append(str(ROOT / "recipes"))

from arguments import parse
from launch import device_defaults
from model import load_model
from sft import prepare

QUICKSTART = ROOT / "recipes/quickstart/small_llama.yaml"
BUDGET_S = 4.0


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model whose micro-batches are predicted and executed."""

    name: str
    """What tells it from the others of this run; "" for the only one."""
    model: PreTrainedModel
    batches: Iterator[Any]
    pairs: list[Pair] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    """What was calibrated, turn by turn."""


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    if args.processor:
        measure.time = SimpleNamespace(perf_counter=time.process_time)
    model_args, data_args, training = parse(
        ["--config", str(QUICKSTART)], FlexSeqConfig, device_defaults()
    )
    tokenizer, sequences, _ = prepare(model_args, data_args, training)
    # after the training arguments, which reset accelerate's state
    plugin = GradientAccumulationPlugin(num_steps=1, sync_each_batch=args.experts)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    if args.window is not None:
        model_args.model_config |= gemma_3(model_args.model_config, args.window)
    if args.recurrent:
        model_args.model_config |= qwen3_5(model_args.model_config)
    if args.experts:
        model_args.model_config |= qwen3_moe(model_args.model_config)
    model = load_model(model_args, tokenizer)
    models = over_ranks(model, accelerator) if args.experts else {"": model}

    def batches() -> Iterator[Any]:
        loader = torch.utils.data.DataLoader(
            sequences.select_columns(["input_ids", "labels"]),
            batch_size=training.per_device_train_batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(training.seed),
            collate_fn=DataCollatorForFlexSeq(),
        )
        return iter(accelerator.prepare(loader))

    subjects = [Subject(name=name, model=one, batches=batches()) for name, one in models.items()]
    tokens = training.max_tokens_per_rank
    if accelerator.is_main_process:
        print("\n".join(heading(args, accelerator)))
    for turn in range(args.turns):
        for subject in subjects:
            if args.experts:
                measure_when_attached(subject, sequences, accelerator, tokens, turn, args)
            else:
                calibrate_first(subject, accelerator, tokens, turn, args)
    if accelerator.is_main_process:
        for subject in subjects:
            print(f"\n{subject.name}\n\n{error_table(subject.pairs)}".replace("\n\n\n", "\n"))
        write_record(args.json, figures(subjects))
    accelerator.end_training()


def figures(subjects: list[Subject]) -> dict[str, Any]:
    """Return what was measured of each model; of the only one by itself."""
    by_name = {}
    for subject in subjects:
        pairs = [asdict(pair) for pair in subject.pairs]
        by_name[subject.name] = {"micro_batches": pairs, "calibrations": subject.records}
    return by_name.get("", by_name)


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
        "--budget", type=float, default=BUDGET_S, help="estimated seconds of the calibration"
    )
    parser.add_argument("--window", type=int, help="tokens; a Gemma 3 instead of a Llama")
    parser.add_argument(
        "--recurrent", action="store_true", help="a Qwen3.5 with Gated DeltaNet instead"
    )
    parser.add_argument(
        "--experts", action="store_true", help="a Qwen3-MoE with experts over all ranks instead"
    )
    parser.add_argument("--strategy", default="auto", help="as in FlexSeqArguments")
    parser.add_argument(
        "--processor", action="store_true", help="seconds of processors, not those that pass"
    )
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


def qwen3_moe(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what a Qwen3-MoE of these sizes has in another way: the experts of a token are
    together as wide as the MLP."""
    return {
        "model_type": "qwen3_moe",
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes["intermediate_size"] // 2,
    }


def over_ranks(model: PreTrainedModel, accelerator: Accelerator) -> dict[str, PreTrainedModel]:
    """Return rank 0's model as transformers loads it over all ranks, by how its experts lie."""
    ranks = accelerator.num_processes
    with tempfile.TemporaryDirectory() as own_folder:
        (folder,) = broadcast_object_list([own_folder])
        if accelerator.is_main_process:
            model.save_pretrained(folder)
        accelerator.wait_for_everyone()
        models = {}
        for name, expert_ranks in ((f"experts over {ranks} ranks", ranks), ("all experts", 1)):
            config = DistributedConfig(fsdp_size=ranks, ep_size=expert_ranks)
            models[name] = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        accelerator.wait_for_everyone()
    return models


def calibrate_first(
    subject: Subject,
    accelerator: Accelerator,
    max_tokens_per_rank: int,
    turn: int,
    args: argparse.Namespace,
) -> None:
    """Calibrate copies of the model, then execute steps by the result. Collective."""
    began = time.perf_counter()
    record = calibrate(
        subject.model.config.to_dict(),
        dtype="float32",
        checkpointing=False,
        effort=Effort(budget_s=args.budget, rounds=args.rounds, held_out=8),
    )
    subject.records.append(record)
    if accelerator.is_main_process:
        print(calibration_line(turn, record, time.perf_counter() - began))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cost.json"
        CostModel.from_record(record["cost_model"]).save(path)
        engine = engine_by(str(path), accelerator, max_tokens_per_rank, args)
    subject.pairs.extend(execute(engine, subject, args))


def measure_when_attached(
    subject: Subject,
    sequences: Dataset,
    accelerator: Accelerator,
    max_tokens_per_rank: int,
    turn: int,
    args: argparse.Namespace,
) -> None:
    """Execute steps by what `cost_model="auto"` measures, anew in every turn. Collective."""
    said = Said()
    choose.logger.addHandler(said)
    choose.logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        choose.HF_HOME = folder
        choose.Effort = partial(Effort, budget_s=args.budget, rounds=args.rounds, held_out=8)
        engine = engine_by("auto", accelerator, max_tokens_per_rank, args)
        engine.measure_routers_on(sequences)
        subject.pairs.extend(execute(engine, subject, args))
    choose.logger.removeHandler(said)
    assert engine.cost is not None, "it was attached"
    subject.records.append({"cost_model": engine.cost.to_record(), "said": said.lines})
    if accelerator.is_main_process:
        load = os.getloadavg()[0]
        print(
            f"* calibration {turn + 1}, load {load:.1f}, {subject.name}: {'; '.join(said.lines)}"
        )


class Said(logging.Handler):
    """Collects what calibration logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO or "implausible" in record.msg:
            self.lines.append(record.getMessage())


def engine_by(
    cost_model: str, accelerator: Accelerator, max_tokens_per_rank: int, args: argparse.Namespace
) -> FlexSeqEngine:
    options = FlexSeqArguments(
        cost_model=cost_model,
        sync="lockstep",
        lookahead=0,
        strategy=args.strategy,
        max_tokens_per_rank=max_tokens_per_rank,
    )
    return FlexSeqEngine(accelerator, options)


def execute(engine: FlexSeqEngine, subject: Subject, args: argparse.Namespace) -> Iterator[Pair]:
    """Execute the next steps, and yield every micro-batch's seconds. Collective."""
    model = subject.model
    with engine.attached(model.train()):
        assert engine.cost is not None, "an attached engine has a cost model"
        for step in islice(engine.steps(subject.batches), args.steps):
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


def heading(args: argparse.Namespace, accelerator: Accelerator) -> list[str]:
    return [
        f"{cpu_model()}, {os.cpu_count()} cores; {accelerator.num_processes} ranks, "
        f"{torch.get_num_threads()} thread each; torch {torch.__version__}, float32",
        f"{args.turns} turns of a calibration and {args.steps} steps, strategy {args.strategy}; "
        f"medians of {args.rounds} runs{' in seconds of processors' if args.processor else ''}",
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
        p90 = errors[math.ceil(0.9 * len(errors)) - 1]  # at least 90 % are no larger
        row = [name, len(chosen), f"{seconds:.3f}", f"{ratio:.3f}"]
        rows.append([*row, f"{statistics.median(errors):.1%}", f"{p90:.1%}"])
    return table(columns, rows, numbers=(1, 2, 3, 4, 5))


if __name__ == "__main__":
    main()
