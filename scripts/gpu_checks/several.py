"""The same random plans over NCCL, one rank for each GPU of this machine.

Every way of sharding and every kind of steps runs the same number of plans, and the gradients are
compared with one process in float64:

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
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

from gpu_checks.one_rank import host_waits_nowhere
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
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqEngine
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Plan
from hf_flexseq.plan.facts import NO_FACTS, StepFacts
from hf_flexseq.planner.process.client import Planner
from tests.hf.tiny import documents, reference_gradients, relative_errors, tiny_llama
from tests.kernels.reference import Reference
from tests.plans import random_plan

LENGTHS = (1, 2, 170, 64, 1021, 3, 1, 512, 333, 2, 129, 700)  # on a GPU
SHORT_LENGTHS = (1, 2, 17, 5, 31, 3, 1, 40, 11, 2)  # in a rehearsal
HEAD_DIM = 64
FLOAT32_BOUND = 1e-4
BFLOAT16_FACTOR = 2.0
WARM_UP = 3  # plans before the host may no longer wait
HSDP = "HSDP"
LEAST_FOR_HSDP = 4
LIMIT_S = 3600.0  # of one launch

Gradients = dict[str, torch.Tensor]  # by name of the parameter


# ---- what is trained, and how exact it has to be


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The arithmetic of a run."""

    name: str
    kernel: Kernel
    autocast: bool
    """True for a forward in bfloat16; False for one in the dtype of the parameters."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)


def precisions(device: torch.device) -> tuple[Precision, Precision]:
    """Return float32 by the plain softmax and bfloat16 by the device's own kernel."""
    kernel = choose_kernel(device, torch.bfloat16, HEAD_DIM)
    return (
        Precision(name="float32", kernel=Reference(), autocast=False),
        Precision(name="bfloat16", kernel=kernel, autocast=True),
    )


def small_llama(device: torch.device) -> LlamaForCausalLM:
    """Return a float32 model with 8 query heads that share 4 key heads."""
    sizes = {"hidden_size": 8 * HEAD_DIM, "intermediate_size": 16 * HEAD_DIM}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    return tiny_llama(torch.float32, **sizes).to(device).train()


def bound_of(
    precision: Precision,
    model: LlamaForCausalLM,
    examples: Sequence[dict[str, list[int]]],
    true: Gradients,
) -> float:
    """Return the largest error that a plan may have: in bfloat16 twice that of one process.

    Sums of a few thousand float32 terms differ by some 1e-6 with their order; a token that is lost
    changes a gradient by more than 1e-4. In bfloat16 rounding decides; a chunk that comes too late
    or from elsewhere gives errors of the size of the gradient.
    """
    if not precision.autocast:
        return FLOAT32_BOUND
    with precision.forward(model.device):
        _, found = reference_gradients(copy.deepcopy(model), examples)
    return BFLOAT16_FACTOR * largest_error(found, true)


def largest_error(found: Gradients, true: Gradients) -> float:
    """Return the largest relative error of a parameter's gradient; infinite for a NaN."""
    errors = relative_errors({name: one.double() for name, one in found.items()}, true).values()
    return max(error if error == error else float("inf") for error in errors)


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
        ),
        holds=found["holds"],
    )


# ---- one rank


def run_ranks(setting: Setting, sharding: str) -> None:
    """Run all plans as one rank of a launch; rank 0 prints its findings as JSON."""
    accelerator = make_accelerator(setting, sharding)
    device = accelerator.device
    examples = documents(SHORT_LENGTHS if setting.rehearse else LENGTHS)
    model = small_llama(device)
    _, true = reference_gradients(copy.deepcopy(model).double(), examples)
    rows = []
    holds = True
    for precision in precisions(device):
        bound = bound_of(precision, model, examples, true)
        for combination in combinations(sharding):
            seed = f"{combination.sharding} {combination.sync}"
            planner = RandomPlans(accelerator.num_processes, seed)
            runner = Runner(accelerator, model, examples, combination, precision, planner)
            error = runner.largest_error(setting.plans, true)
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


class PlansInPlace:
    """A planner that plans where its result is asked for. Subclasses say how."""

    def __init__(self) -> None:
        self._lengths: dict[int, list[int]] = {}  # by step

    def submit(self, step: int, lengths: list[int], facts: StepFacts = NO_FACTS) -> None:
        """Note the lengths of a step. facts: none, as documents are text that shares nothing."""
        self._lengths[step] = lengths

    def wait(self, step: int, seconds: float) -> str | None:
        """Wait for nobody: planning happens in `result`."""
        return None

    def result(self, step: int) -> Plan:
        """Return the plan of a step that was submitted."""
        return self.plan_of(self._lengths.pop(step))

    def plan_of(self, lengths: list[int]) -> Plan:
        """Return the plan of some sequences."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing to close."""


class RandomPlans(PlansInPlace):
    """A planner whose plans are random and legal, the same ones for the same seed."""

    def __init__(self, ranks: int, seed: str) -> None:
        super().__init__()
        self._ranks = ranks
        self._random = random.Random(seed)

    def plan_of(self, lengths: list[int]) -> Plan:
        """See `PlansInPlace.plan_of`."""
        return random_plan(lengths, self._ranks, self._random)


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
        communicator = Communicator()
        if combination.blocks:
            communicator.open_blocks(range(2, communicator.world_size + 1))
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
            largest = max(largest, largest_error(found, true))
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
        own = self.examples[self.accelerator.process_index :: world_size]
        batches = [DataCollatorForFlexSeq()(own)] if own else []
        step = self.engine.next_step(iter(batches), 1)
        assert step is not None, "the ranks have drawn documents"

        is_guarded = self.precision.autocast and not may_wait
        with host_waits_nowhere(is_guarded and self.accelerator.device.type == "cuda"):
            for inputs in self.engine.micro_batches(step, wrapped):
                with self.precision.forward(self.accelerator.device):
                    outputs = wrapped(**inputs, use_cache=False, num_items_in_batch=step.targets)
                loss = outputs.loss * world_size  # gradients are averaged over ranks
                loss.backward()
                step.add(loss.detach())
        self.engine.finish(step)
