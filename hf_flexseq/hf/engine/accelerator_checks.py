"""Accelerators that hf_flexseq refuses."""

import importlib.metadata
import math
import os
from typing import Any, NamedTuple

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend, compare_versions

from hf_flexseq.base.refusals import Refusal, above_one, option, refuse, same_step
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.model.sharding import is_zero3

_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that record them


class Setup(NamedTuple):
    """An Accelerator and the options of hf_flexseq."""

    accelerator: Accelerator
    args: FlexSeqArguments
    training: Any = None  # arguments of a Trainer; None in a loop of the user's own

    @property
    def loaders(self) -> Any:
        """The dataloader settings of the Accelerator."""
        return self.accelerator.dataloader_config


def check_accelerator(
    accelerator: Accelerator, args: FlexSeqArguments, training: Any = None
) -> None:
    """Raise ValueError or NotImplementedError for an Accelerator that hf_flexseq refuses.
    training: arguments of a Trainer, for the advice."""
    refuse(ACCELERATOR, Setup(accelerator, args, training))


def _lone_processes(setup: Setup) -> str | None:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        launched = dist.get_world_size()
    seen = setup.accelerator.num_processes
    if launched == seen:
        return None
    return f"a job of {launched} processes when accelerate sees {seen}"


def _sizes(setup: Setup) -> dict[str, int]:
    config = getattr(setup.accelerator, "parallelism_config", None)
    return above_one(config, "cp_size", "sp_size", "tp_size")


def _backend(setup: Setup) -> str | None:
    kind = setup.accelerator.distributed_type
    is_other = kind in (DistributedType.XLA, DistributedType.MEGATRON_LM)
    return f"distributed_type={kind.value}" if is_other else None


def _old_deepspeed(setup: Setup) -> str | None:
    if setup.accelerator.distributed_type != DistributedType.DEEPSPEED:
        return None
    if compare_versions("deepspeed", ">=", "0.19"):
        return None
    return f"DeepSpeed {importlib.metadata.version('deepspeed')}"


def _accumulation(setup: Setup) -> str | None:
    steps = setup.accelerator.gradient_accumulation_steps
    if steps == 1 or setup.accelerator.distributed_type == DistributedType.DEEPSPEED:
        return None
    return f"gradient_accumulation_steps={steps} of the Accelerator"


def _stateful_loader(setup: Setup) -> str | None:
    if setup.loaders.use_stateful_dataloader and setup.args.lookahead != 0:
        return f"use_stateful_dataloader=True with lookahead={setup.args.lookahead}"
    return None


def _compiled_elsewhere(setup: Setup) -> str | None:
    state = setup.accelerator.state
    if state.dynamo_plugin.backend == DynamoBackend.NO:
        return None
    if setup.args.pipeline_parallel_size > 1:
        return f"torch.compile with pipeline_parallel_size={setup.args.pipeline_parallel_size}"
    if setup.accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "torch.compile with ZeRO-3" if is_zero3(setup.accelerator) else None
    if setup.accelerator.distributed_type != DistributedType.FSDP or setup.accelerator.is_fsdp2:
        return None
    return "torch.compile with FSDP version 1"


def _compiled_into_graphs(setup: Setup) -> str | None:
    plugin = setup.accelerator.state.dynamo_plugin
    if plugin.backend == DynamoBackend.NO or plugin.mode not in _CUDA_GRAPHS:
        return None
    return f"torch.compile in mode {plugin.mode!r}"


ACCELERATOR: tuple[Refusal[Setup], ...] = (
    Refusal(
        setting="more processes than accelerate sees",
        found=_lone_processes,
        why="each process would train alone",
        instead="on a CPU set use_cpu=True in the training arguments, or Accelerator(cpu=True)",
        error=ValueError,
    ),
    Refusal(
        setting="cp_size, sp_size and tp_size of parallelism_config",
        found=lambda setup: ", ".join(f"{name}={size}" for name, size in _sizes(setup).items()),
        why="hf_flexseq chooses the sequence-parallel groups itself, over all ranks",
        instead="leave parallelism_config out",
        error=ValueError,
        keeps=lambda setup: same_step(math.prod(_sizes(setup).values()), setup.training),
    ),
    Refusal(
        setting="XLA and Megatron-LM",
        found=_backend,
        why="gradients are reduced by DDP, FSDP2 or ZeRO",
        instead="use one of these",
    ),
    Refusal(
        setting="DeepSpeed before 0.19",
        found=_old_deepspeed,
        why="in tests its ZeRO has trained other weights than the plain Trainer",
        instead="use a newer version",
    ),
    Refusal(
        setting="dispatch_batches=True",
        found=option("dispatch_batches", holder="loaders"),
        why="it joins rows of different lengths",
        instead="leave it at None",
        error=ValueError,
    ),
    Refusal(
        setting="split_batches=True",
        found=option("split_batches", holder="loaders"),
        why="it cuts rows that are not batches",
        instead="leave it at False",
        error=ValueError,
    ),
    Refusal(
        setting="use_stateful_dataloader=True with a lookahead",
        found=_stateful_loader,
        why="the saved state would be ahead of training",
        instead="set lookahead=0",
        error=ValueError,
    ),
    Refusal(
        setting="gradient_accumulation_steps of an Accelerator",
        found=_accumulation,
        why="the Accelerator would divide every loss once more",
        instead="leave it at 1 and give engine.steps(..., accumulation=...)",
        error=ValueError,
    ),
    Refusal(
        setting="torch.compile with a pipeline, ZeRO-3 or FSDP version 1",
        found=_compiled_elsewhere,
        why="only modules of a whole model that hold their own weights are compiled",
        instead="leave torch_compile and dynamo_backend out",
    ),
    Refusal(
        setting="torch.compile with CUDA graphs (reduce-overhead, max-autotune)",
        found=_compiled_into_graphs,
        why="every step has new shapes, and each would record a graph of its own",
        instead="use torch_compile_mode='default' or 'max-autotune-no-cudagraphs'",
        error=ValueError,
    ),
    Refusal(
        setting="ddp_static_graph=True",
        found=lambda setup: getattr(setup.accelerator.ddp_handler, "static_graph", False),
        why="steps differ in their micro-batches",
        instead="leave it at False",
    ),
    Refusal(
        setting="mixed_precision='fp8'",
        found=option("mixed_precision", lambda value: value == "fp8", holder="accelerator"),
        why="attention and losses are not tested in it",
        instead="use 'bf16'",
    ),
)
