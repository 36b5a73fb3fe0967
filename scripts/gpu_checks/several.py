"""The same random plans over NCCL, one rank for each GPU of this machine.

Every way of sharding and every kind of steps runs the same number of plans, and the gradients are
compared with the truth (`subject.py`):

    DDP, free         each rank runs its own micro-batches
    DDP, lockstep     all ranks run every micro-batch together
    FSDP2             lockstep, as it must be
    HSDP              accelerate's own: FSDP2 inside two halves of the ranks; from four GPUs on

each with groups for aligned blocks and without. From the fourth plan on attention runs under
`torch.cuda.set_sync_debug_mode("error")`: a host that waits for the device there is an error. That
holds for bfloat16 alone, as the plain softmax of float32 is not made for it.

`plans_section` and `hsdp_section` start the ranks; `run_ranks` is what each of them runs.
"""

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from gpu_checks import subject
from gpu_checks.report import (
    RANKS_PART,
    Section,
    Setting,
    launch,
    table,
    this_script,
    torchrun,
    verdict,
)
from gpu_checks.subject import Gradients, Precision
from hf_flexseq import FlexSeqArguments, FlexSeqEngine
from hf_flexseq.attention import function as attention_function
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan import Plan
from hf_flexseq.plan.facts import NO_FACTS, StepFacts
from hf_flexseq.planner.process.client import Planner

LAYERS = 2
WARM_UP = 3  # plans before the host may no longer wait
HSDP = "HSDP"
LEAST_FOR_HSDP = 4
LIMIT_S = 3600.0  # of one launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One way to run plans."""

    sharding: str
    sync: str
    blocks: bool


def combinations(sharding: str) -> list[Combination]:
    """Return the ways of running plans: all of them under HSDP, or all others."""
    kinds = [("DDP", "free"), ("DDP", "lockstep"), ("FSDP2", "lockstep")]
    if sharding == HSDP:
        kinds = [(HSDP, "lockstep")]
    found = []
    for of_kind, sync in kinds:
        for blocks in (False, True):
            found.append(Combination(sharding=of_kind, sync=sync, blocks=blocks))
    return found


# ---- the launches


def plans_section(setting: Setting) -> Section:
    """Run all plans under DDP and FSDP2."""
    title = "Several ranks: largest error of a gradient (bound)"
    if setting.processes < 2:
        return Section.not_run(title, "it needs two GPUs")
    return _launched(title, setting, "DDP and FSDP2")


def hsdp_section(setting: Setting) -> Section:
    """Run all plans under accelerate's own HSDP."""
    title = "Several ranks under accelerate's own HSDP: largest error of a gradient (bound)"
    if setting.processes < LEAST_FOR_HSDP or setting.processes % 2:
        return Section.not_run(title, f"it needs {LEAST_FOR_HSDP} GPUs, or a larger even number")
    return _launched(title, setting, HSDP)


def _launched(title: str, setting: Setting, sharding: str) -> Section:
    """Start the ranks, and return what rank 0 has found."""
    arguments = this_script(RANKS_PART, setting, "--sharding", sharding)
    found = launch(torchrun(setting.processes, arguments), seconds=LIMIT_S)
    if "error" in found:
        return Section(title=title, lines=(f"FAILED: {found['error']}",), holds=False)
    columns = ["sharding", "steps", "groups of blocks", "precision", "plans", "error", ""]
    return Section(
        title=title,
        lines=(
            f"{setting.processes} ranks over {found['backend']}. {found['syncs']}",
            "",
            *table(columns, found["rows"]),
            "",
            found["counts"],
        ),
        holds=found["holds"],
    )


# ---- one rank


def run_ranks(setting: Setting, sharding: str) -> None:
    """Run all plans as one rank of a launch; rank 0 prints its findings as JSON."""
    accelerator = make_accelerator(setting, sharding)
    device = accelerator.device
    examples = subject.documents(setting)
    model = subject.small_llama(device, layers=LAYERS)
    true = subject.true_gradients(model, examples)
    rows = []
    holds = True
    counts: Counter[str] = Counter()
    for precision in subject.precisions(device):
        alone = _error_alone(model, examples, precision, true)
        bound = subject.bound_of(precision, alone)
        for combination in combinations(sharding):
            topology = topology_of(accelerator)
            planner = RandomPlans(topology, f"{combination.sharding} {combination.sync}")
            runner = Runner(accelerator, model, examples, combination, precision, planner)
            error = runner.largest_error(setting.plans, true)
            counts += planner.counts
            is_close = error <= bound
            holds = holds and is_close
            blocks = "yes" if combination.blocks else "no"
            names = [combination.sharding, combination.sync, blocks, precision.name]
            rows.append([*names, setting.plans, f"{error:.1e} ({bound:.1e})", verdict(is_close)])
    if accelerator.is_main_process:
        syncs = "Nothing in attention made the host wait for the device."
        if device.type != "cuda":
            syncs = "Whether attention makes the host wait was not checked."
        found = {
            "backend": dist.get_backend(),
            "syncs": syncs,
            "rows": rows,
            "counts": subject.counts_line(counts),
            "holds": holds,
        }
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def make_accelerator(setting: Setting, sharding: str) -> Accelerator:
    """Return the accelerator of this rank."""
    if sharding != HSDP:
        return Accelerator(cpu=setting.rehearse)
    world_size = int(os.environ["WORLD_SIZE"])
    return Accelerator(
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=world_size // 2),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )


def _error_alone(
    model: LlamaForCausalLM,
    examples: Sequence[dict[str, list[int]]],
    precision: Precision,
    true: Gradients,
) -> float:
    """Return the largest error of one rank that takes one document at a time."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    targets = subject.targets_of(examples)
    for example in examples:
        ids = torch.tensor([example["input_ids"]], device=twin.device)  # [1, tokens]
        labels = ids.new_tensor([example["labels"]])  # [1, tokens]
        with precision.forward(twin.device):
            outputs = twin(
                input_ids=ids, labels=labels, use_cache=False, num_items_in_batch=targets
            )
        outputs.loss.backward()
    found = {name: parameter.grad for name, parameter in twin.named_parameters()}
    return subject.largest_error(found, true)


def topology_of(accelerator: Accelerator) -> Topology:
    """Return the topology of the ranks of one machine."""
    return Topology(nodes=1, ranks_per_node=accelerator.num_processes)


class RandomPlans:
    """A planner whose plans are random and legal, the same ones for the same seed."""

    def __init__(self, topology: Topology, seed: str) -> None:
        self.counts: Counter[str] = Counter()
        self._topology = topology
        self._random = random.Random(seed)
        self._lengths: dict[int, list[int]] = {}  # by step

    def submit(self, step: int, lengths: list[int], facts: StepFacts = NO_FACTS) -> None:
        """Note the lengths of a step. facts: none, as documents are text that shares nothing."""
        self._lengths[step] = lengths

    def wait(self, step: int, seconds: float) -> str | None:
        """Wait for nobody: planning happens in `result`."""
        return None

    def result(self, step: int) -> Plan:
        """Return a random plan of a step that was submitted."""
        plan = subject.random_plan(self._lengths.pop(step), self._topology, self._random)
        self.counts += subject.features(plan, self._topology)
        return plan

    def close(self) -> None:
        """Leave nothing to close."""


class Runner:
    """Runs plans in one way, as one rank."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: LlamaForCausalLM,
        examples: Sequence[dict[str, list[int]]],
        combination: Combination,
        precision: Precision,
        planner: Planner,
    ) -> None:
        """model: on the device, in eager attention; left as it is. planner: of rank 0."""
        self.accelerator = accelerator
        self.examples = examples
        self.precision = precision
        self.sharding = combination.sharding
        # 1. the model, sharded where it is FSDP2's
        self.model = copy.deepcopy(model)
        if self.sharding == "FSDP2":
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        # 2. an engine with random plans
        communicator = Communicator(use_blocks=combination.blocks)
        arguments = FlexSeqArguments(
            lookahead=0,
            cost_model="flexsp-gpt-7b-a100",
            max_tokens_per_rank=sum(len(example["input_ids"]) for example in examples),
            sync=combination.sync,
        )
        self.engine = FlexSeqEngine(accelerator, arguments, communicator=communicator)
        self.engine.planner = lambda ahead: planner
        self.engine.kernel = precision.kernel

    def largest_error(self, plans: int, true: Gradients) -> float:
        """Run so many plans, and return the largest error of their gradients."""
        wrapped = self.attach()
        largest = 0.0
        for number in range(plans):
            self.step(wrapped, may_wait=number < WARM_UP)
            found = {}
            for name, parameter in self.model.named_parameters():
                gradient = parameter.grad
                if hasattr(gradient, "full_tensor"):
                    gradient = gradient.full_tensor()
                found[name] = gradient
            largest = max(largest, subject.largest_error(found, true))
            self.model.zero_grad()
        self.engine.detach()
        return largest

    def attach(self) -> nn.Module:
        """Attach the model, and return it as steps call it."""
        self.engine.attach(self.model)
        device = self.accelerator.device
        if self.sharding == "DDP":
            return DistributedDataParallel(
                self.model, device_ids=[device.index] if device.type == "cuda" else None
            )
        if self.sharding == HSDP:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)  # FSDP2 asks for one
            self.model, _ = self.accelerator.prepare(self.model, optimizer)
        return self.model

    def step(self, wrapped: nn.Module, *, may_wait: bool) -> None:
        """Draw a step, and run it up to its gradients."""
        world_size = self.accelerator.num_processes
        batches = subject.drawn_by(self.accelerator.process_index, world_size, self.examples)
        step = self.engine.next_step(iter(batches), 1)
        assert step is not None, "the ranks have drawn documents"

        is_guarded = self.precision.autocast is not None and not may_wait
        with host_waits_nowhere(is_guarded and self.accelerator.device.type == "cuda"):
            for inputs in self.engine.micro_batches(step, wrapped):
                with self.precision.forward(self.accelerator.device):
                    outputs = wrapped(**inputs, use_cache=False, num_items_in_batch=step.targets)
                loss = outputs.loss * world_size  # gradients are averaged over ranks
                loss.backward()
                step.add(loss.detach())
        self.engine.finish(step)


# ---- the host must not wait


@contextmanager
def host_waits_nowhere(is_guarded: bool) -> Iterator[None]:
    """Raise an error where attention makes the host wait for the device; do so if `is_guarded`."""
    if not is_guarded:
        yield
        return
    plain = attention_function._SequenceParallelAttention
    checkpointed = attention_function._CheckpointedAttention
    with (
        mock.patch.multiple(plain, **_guarded_halves(plain)),
        mock.patch.multiple(checkpointed, **_guarded_halves(checkpointed)),
    ):
        yield


def _guarded_halves(node: type[torch.autograd.Function]) -> dict[str, staticmethod]:
    """Return forward and backward of a node, each in a mode in which waiting is an error."""
    return {
        "forward": staticmethod(_guarded(node.forward)),
        "backward": staticmethod(_guarded(node.backward)),
    }


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        former = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args)
        finally:
            torch.cuda.set_sync_debug_mode(former)

    return run
