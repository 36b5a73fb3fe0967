"""What the planner believes of one GPU, against what is measured there.

    calibration    the estimate of a model, corrected by a dozen steps on this GPU (`flexseq
                   calibrate`), is off by at most 5 % at the median of their micro-batches
    memory         the memory model predicts the peak bytes of a micro-batch that is not the first
                   of its step, to 3 %: weights, the optimizer's state and gradients are there

In a rehearsal times and bytes are shown and not judged.
"""

import json
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_checks.one_rank import SMALL, TINY, OneRank
from gpu_checks.report import Section, Setting, table, verdict
from hf_flexseq.base.topology import Topology
from hf_flexseq.hf.engine.cost_choice import CostSubject
from hf_flexseq.hf.trainer.synthetic_models import train

CORRECTED_BOUND = 0.05
# The memory model adds up what is held when the loss is computed and what is held when layers run
# again, so that it may be above the peak, which is one of these moments, but not below.
MEMORY_BELOW, MEMORY_ABOVE = 0.03, 0.10
MEMORY_TOKENS = (16384, 32768)


# ---- calibration


def calibration_section(setting: Setting) -> Section:
    """Correct an estimate by some steps, and judge how far it is off on them."""
    sizes = TINY if setting.rehearse else SMALL
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({"model_type": "llama", **sizes}))
        correction = train(str(config), str(Path(folder) / "cost.json"))
    holds = setting.rehearse or correction.error <= CORRECTED_BOUND
    return Section(
        title="A cost model that steps have corrected, one rank",
        lines=(f"{correction.text()} (bound {CORRECTED_BOUND:.0%}): {_judged(setting, holds)}.",),
        holds=holds,
    )


def _judged(setting: Setting, holds: bool) -> str:
    return "not judged" if setting.rehearse else verdict(holds)


# ---- memory


def memory_section(setting: Setting) -> Section:
    """Compare the peak memory of micro-batches with the memory model."""
    device = setting.device
    config = LlamaConfig(**(TINY if setting.rehearse else SMALL))
    subject = _subject(config, device)
    estimate = subject.estimate
    rank = OneRank(config, device, torch.float32, checkpointing=True)
    optimizer = torch.optim.AdamW(rank.model.parameters())
    rows = []
    holds = True
    for tokens in (64, 128) if setting.rehearse else MEMORY_TOKENS:
        predicted = estimate.state_bytes + estimate.sharded_state_bytes
        predicted += estimate.token_bytes * tokens
        measured = _peak(rank, optimizer, tokens)
        error = predicted / measured - 1
        is_close = setting.rehearse or -MEMORY_BELOW <= error <= MEMORY_ABOVE
        holds = holds and is_close
        cells = [f"{tokens:,}", f"{predicted / 2**30:.2f}", f"{measured / 2**30:.2f}"]
        rows.append([*cells, f"{error:+.1%}", _judged(setting, is_close)])
    bounds = f"-{MEMORY_BELOW:.0%} to +{MEMORY_ABOVE:.0%}"
    return Section(
        title=f"Memory of one rank: peak of a micro-batch ({bounds})",
        lines=table(["tokens", "predicted GiB", "measured GiB", "error", ""], rows),
        holds=holds,
    )


def _subject(config: LlamaConfig, device: torch.device) -> CostSubject:
    """Return the facts about float32 weights that are trained in bfloat16, layers
    checkpointed."""
    with torch.device("meta"):  # sizes without memory
        model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    as_set_up: Any = SimpleNamespace(  # a process has one Accelerator's settings
        mixed_precision="bf16", distributed_type=DistributedType.NO, device=device
    )
    return CostSubject(model, as_set_up, Topology(nodes=1, ranks_per_node=1))


def _peak(rank: OneRank, optimizer: torch.optim.Optimizer, tokens: int) -> int:
    """Return the most bytes that tensors take during the second micro-batch of a step, of one
    sequence; on a CPU, in a rehearsal, those of the whole process."""
    rank.forward_backward([tokens])
    optimizer.step()  # the first one makes its state
    optimizer.zero_grad()
    rank.forward_backward([tokens])  # the first micro-batch makes the gradients
    if rank.device.type != "cuda":
        rank.forward_backward([tokens])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.cuda.reset_peak_memory_stats(rank.device)
    rank.forward_backward([tokens])
    torch.cuda.synchronize(rank.device)
    peak: int = torch.cuda.max_memory_allocated(rank.device)
    optimizer.zero_grad()
    return peak
