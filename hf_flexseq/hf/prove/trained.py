"""One optimizer step of FlexSeqTrainer on all ranks, and the same step without hf_flexseq.

The step without it knows nothing of this project: transformers' own attention on one document at a
time, the cross-entropy of all target tokens divided by their number, and torch's backward.

The documents have the lengths at which mistakes show:

    long          shared by all ranks under every plan, of a length that no degree divides
    one token     has no target
    prompt        begins as the long one does, which may be computed once for both; most labels are
                  ignored, so that documents count by their targets
    no target     all labels are ignored
    others        shorter than the number of ranks, equal to a window, packed beside each other
"""

import copy
import json
import random
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from hf_flexseq.base.topology import Topology
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.probe import usual_tokens
from hf_flexseq.hf.trainer import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.kernels import lse_dtype
from hf_flexseq.steps.collator import DataCollatorForFlexSeq

LENGTHS = (41, 23, 14, 3, 1, 11, 9, 12, 2, 13, 7, 5)
LONGEST = max(LENGTHS)
PROMPT, NO_TARGET = 1, 6  # indices of the documents with these labels
PROMPT_TOKENS = 17
COMMON_TOKENS = 19  # of the long document and of the prompt

Rows = list[dict[str, list[int]]]
Gradients = dict[str, torch.Tensor]
LEARNING_RATE = 0.01


class Step(NamedTuple):
    """What an optimizer step makes of a model."""

    loss: float
    """Mean loss over all target tokens."""
    gradients: Gradients
    """Gradient of each trainable parameter by name, on the CPU in float64; 0 where none is."""


class PlannedRun(NamedTuple):
    """A step of FlexSeqTrainer, and the plan that it ran."""

    step: Step
    groups: list[str]
    """Strategy and degree of each group of the plan, micro-batch by micro-batch."""
    units: int
    """Units of documents that share a prefix."""
    has_trained: bool
    """True if the optimizer changed a weight."""


# ---- documents


def documents(config: Any, world_size: int) -> Rows:
    """Return as many documents for each rank, the same on every rank and in every run.

    config: of the model's text; no document has its special tokens.
    """
    usual = usual_tokens(config)
    drawn = random.Random(0)
    rows: Rows = []
    count = -(-len(LENGTHS) // world_size) * world_size
    for index in range(count):
        length = LENGTHS[index % len(LENGTHS)]
        ids = [drawn.choice(usual) for _ in range(length)]
        if index == PROMPT:
            ids[:COMMON_TOKENS] = rows[0]["input_ids"][:COMMON_TOKENS]
        labels = list(ids)
        if index == PROMPT:
            labels[:PROMPT_TOKENS] = [IGNORE_INDEX] * PROMPT_TOKENS
        if index == NO_TARGET:
            labels = [IGNORE_INDEX] * length
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def tokens_per_rank(rows: Rows, world_size: int) -> int:
    """Return a limit with which a step has several micro-batches, and the longest document is
    shared by all ranks."""
    total = sum(len(row["input_ids"]) for row in rows)
    return max(-(-LONGEST // world_size), -(-total // (3 * world_size))) + 1


# ---- without hf_flexseq


def step_alone(model: PreTrainedModel, rows: Rows, *, autocast: torch.dtype | None = None) -> Step:
    """Return one step of a copy of a model on this process alone."""
    twin = copy.deepcopy(model).train()
    twin.set_attn_implementation("eager")
    device = next(twin.parameters()).device
    targets = sum(_targets(row) for row in rows)
    total = 0.0
    for row in rows:
        ids = torch.tensor([row["input_ids"]], device=device)  # [1, tokens]
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            logits = twin(input_ids=ids, use_cache=False).logits[0]  # [tokens, vocabulary]
        labels = torch.tensor([*row["labels"][1:], IGNORE_INDEX], device=device)  # [tokens]
        wide = logits.to(lse_dtype(logits.dtype))
        loss = F.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="sum") / targets
        loss.backward()
        total += float(loss.detach())
    return Step(total, gradients_of(twin))


def _targets(row: dict[str, list[int]]) -> int:
    return sum(label != IGNORE_INDEX for label in row["labels"][1:])


def gradients_of(model: torch.nn.Module) -> Gradients:
    """Return the gradients of all trainable parameters, by the names that the user knows."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = (
                parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            )
            found[name.removeprefix("module.")] = gradient.detach().to("cpu", torch.float64)
    return found


# ---- with hf_flexseq


def plans_of(topology: Topology) -> dict[str, dict[str, Any]]:
    """Return the options of the plans to run, by name: the planner's own choice, and every
    strategy on all ranks."""
    plans: dict[str, dict[str, Any]] = {"auto": {}}
    if topology.world_size == 1:
        return plans
    strategies = ["zigzag", "balanced", "ulysses"]
    if topology.nodes > 1:
        strategies.append("hybrid")
    for strategy in strategies:
        plans[strategy] = {
            "planner": "static",
            "sp_degree": topology.world_size,
            "strategy": strategy,
        }
    return plans


class _Gradients(TrainerCallback):
    """Takes the gradients of the step, before the optimizer uses them."""

    def __init__(self) -> None:
        self.found: Gradients = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.found = gradients_of(given["model"])


def step_of_trainer(
    model: PreTrainedModel, rows: Rows, topology: Topology, plan: dict[str, Any], *, bf16: bool
) -> PlannedRun:
    """Train one step of a copy of a model on all ranks. Collective over the world.

    Raises ValueError or NotImplementedError, on all ranks, for what hf_flexseq refuses.
    """
    twin = copy.deepcopy(model)
    before = [parameter.detach().cpu().clone() for parameter in twin.parameters()]
    taken = _Gradients()
    world_size = topology.world_size
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "plans.jsonl"
        args = FlexSeqConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=len(rows) // world_size,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=next(model.parameters()).device.type == "cpu",
            bf16=bf16,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            cost_model="estimate",
            lookahead=0,
            max_tokens_per_rank=tokens_per_rank(rows, world_size),
            plan_trace=str(trace),
            **plan,
        )
        trainer = FlexSeqTrainer(
            model=twin,
            args=args,
            train_dataset=rows,
            data_collator=DataCollatorForFlexSeq(),
            callbacks=[taken],
        )
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
        lines = trace.read_text().splitlines() if trace.exists() else []
    after = [parameter.detach().cpu() for parameter in twin.parameters()]
    changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return PlannedRun(Step(loss, taken.found), _groups(lines), _units(lines), changed)


def _units(lines: list[str]) -> int:
    """Return the number of units in the plans of a trace."""
    return sum(line.count('"nodes"') for line in lines)


def _groups(lines: list[str]) -> list[str]:
    """Return the groups of the plans of a trace; only rank 0 has one."""
    found = []
    for line in lines:
        for micro_batch in json.loads(line)["micro_batches"]:
            for group in micro_batch["groups"]:
                found.append(f"{group['strategy']} of {len(group['ranks'])}")
    return found
