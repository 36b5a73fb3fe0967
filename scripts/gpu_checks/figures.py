"""What the planner believes of one GPU, against what is measured there.

    calibration    the estimate of a model, corrected by a dozen steps on this GPU (`flexseq
                   calibrate`), is off by at most 5 % at the median of their micro-batches
    memory         the memory model predicts the peak bytes of a micro-batch that is not the first
                   of its step, to 3 %: weights, the optimizer's state and gradients are there
    host           seconds that the host takes to hand a layer's attention to the device, beside
                   the seconds until the device is done: one rank of eight whose messages are there
                   at once (`stub.py`). After a warm-up the host may not wait for the device.

In a rehearsal times and bytes are shown and not judged.
"""

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_checks.kernels import synchronize
from gpu_checks.report import Section, Setting, table, verdict
from gpu_checks.several import host_waits_nowhere
from gpu_checks.stub import StubTransport
from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.calibration.choose import CostSubject
from hf_flexseq.hf.model.facts import ModelFacts, model_shape
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.positions import attach_positions
from hf_flexseq.hf.model.towers import attention_of_text
from hf_flexseq.hf.synthetic_run import train
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.steps.inputs import inputs_of, shard_alone

CORRECTED_BOUND = 0.05
# The memory model adds up what is held when the loss is computed and what is held when layers run
# again, so that it may be above the peak, which is one of these moments, but not below.
MEMORY_BELOW, MEMORY_ABOVE = 0.03, 0.10

WIDE = {  # as wide as Llama-3.1-8B
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SMALL = {  # as many parameters as Llama-3.2-1B, about: its optimizer state must fit
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
TINY = {  # in a rehearsal
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}
MEMORY_TOKENS = (16384, 32768)
HOST_TOKENS = 2048  # of the rank
ROUNDS = 10


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
    topology = Topology(nodes=1, ranks_per_node=1)
    facts = _facts(LlamaConfig(**(TINY if setting.rehearse else SMALL)))
    subject = CostSubject(facts=facts, has_chunked_loss=True, topology=topology, device=device)
    estimate = subject.estimate
    measure = _peaks(facts, device)
    rows = []
    holds = True
    for tokens in (64, 128) if setting.rehearse else MEMORY_TOKENS:
        predicted = estimate.state_bytes + estimate.sharded_state_bytes
        predicted += estimate.token_bytes * tokens
        measured = measure(tokens)
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


def _facts(config: LlamaConfig) -> ModelFacts:
    """Collect the facts about float32 weights that are trained in bfloat16, layers
    checkpointed."""
    with torch.device("meta"):  # sizes without memory
        shape = model_shape(LlamaForCausalLM(config))
    return ModelFacts(
        kind=LlamaForCausalLM,
        config=config,
        shape=shape,
        dtype=torch.float32,
        autocast=torch.bfloat16,
        checkpointing=True,
        frozen=False,
        zero_stage=0,
    )


def _peaks(facts: ModelFacts, device: torch.device) -> Callable[[int], int]:
    """Return what measures the most bytes that tensors take during the second micro-batch of a
    step, of one sequence of some tokens; on a CPU, in a rehearsal, those of the whole process."""
    communicator = Communicator()
    kernel = choose_kernel(device, torch.bfloat16, facts.shape.head_dim)
    with torch.device(device):
        model = LlamaForCausalLM(facts.config).to(facts.dtype).train()
    model.set_attn_implementation(attention_of_text(model, NAME))
    attach_chunked_loss(model)
    attach_positions(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters())
    context = partial(SequenceContext, communicator=communicator, kernel=kernel, device=device)

    def measure(tokens: int) -> int:
        ids = torch.arange(tokens)
        known = ids % facts.config.vocab_size
        columns = {"input_ids": known, "labels": known, "position_ids": ids}

        def forward_backward() -> None:
            inputs = inputs_of(shard_alone([tokens], 0), columns, device, context)
            with torch.autocast(device.type, facts.autocast):
                outputs = model(**inputs, use_cache=False, num_items_in_batch=tokens)
            outputs.loss.backward()

        forward_backward()
        optimizer.step()  # the first one makes its state
        optimizer.zero_grad()
        forward_backward()  # the first micro-batch makes the gradients
        if device.type != "cuda":
            forward_backward()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        torch.cuda.reset_peak_memory_stats(device)
        forward_backward()
        torch.cuda.synchronize(device)
        peak: int = torch.cuda.max_memory_allocated(device)
        optimizer.zero_grad()
        return peak

    return measure


# ---- the host


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one rank of eight does in a layer."""

    name: str
    topology: Topology
    groups: tuple[Group, ...]
    lengths: tuple[int, ...]


class LayerTimes:
    """Seconds of a layer's attention, forward and backward, round by round."""

    def __init__(self) -> None:
        self.host: list[float] = []  # until everything was handed to the device
        self.total: list[float] = []  # until the device was done

    def cells(self) -> list[str]:
        """Return milliseconds of the host and of both, and the host's share."""
        host = statistics.median(self.host)
        total = statistics.median(self.total)
        return [f"{1e3 * host:.2f}", f"{1e3 * total:.2f}", f"{host / total:.0%}"]


def host_section(setting: Setting) -> Section:
    """Time the host in every kind of attention, of one rank of eight."""
    tokens = 16 if setting.rehearse else HOST_TOKENS
    rows = []
    holds = True
    for work in _works(tokens):
        collectives = {group.strategy for group in work.groups} & {"ulysses", "hybrid"}
        for blocks in (False, True) if collectives else (False,):
            names = [work.name, "yes" if blocks else "no"]
            try:
                times = _timed(work, setting, use_blocks=blocks)
            except RuntimeError as error:  # so does torch report a host that waits
                rows.append([*names, f"FAILED: {error}"])
                holds = False
                continue
            rows.append([*names, *times.cells(), "not checked" if setting.rehearse else "none"])
    columns = ["attention of a layer", "groups of blocks", "host ms", "ms", "host's share"]
    return Section(
        title=f"The host's share, forward and backward of one layer, {tokens:,} tokens on one "
        "rank of eight, messages there at once",
        lines=table([*columns, "waits of the host"], rows),
        holds=holds,
    )


def _works(tokens: int) -> list[Work]:
    """Return every strategy over eight ranks, and three zones of one rank.

    tokens: of one rank.
    """
    one_node = Topology(nodes=1, ranks_per_node=8)
    two_nodes = Topology(nodes=2, ranks_per_node=4)
    works = [
        Work(
            name="local",
            topology=one_node,
            groups=(Group(ranks=(0,), sequences=(0,), strategy="local"),),
            lengths=(tokens,),
        )
    ]
    for strategy in ("ulysses", "zigzag", "balanced", "hybrid"):
        group = Group(ranks=tuple(range(8)), sequences=(0,), strategy=strategy)
        topology = two_nodes if strategy == "hybrid" else one_node
        work = Work(name=strategy, topology=topology, groups=(group,), lengths=(8 * tokens,))
        works.append(work)
    zones = (
        Group(ranks=tuple(range(8)), sequences=(0,), strategy="zigzag"),
        Group(ranks=(0, 1), sequences=(1,), strategy="ulysses"),
        Group(ranks=(0,), sequences=(2,), strategy="local"),
    )
    lengths = (4 * tokens, tokens // 2, tokens // 4)
    return [*works, Work(name="three zones", topology=one_node, groups=zones, lengths=lengths)]


def _timed(work: Work, setting: Setting, *, use_blocks: bool) -> LayerTimes:
    """Time the attention of the first rank; after the first rounds its host may not wait."""
    device = setting.device
    sizes = TINY if setting.rehearse else WIDE
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    head_dim = sizes["hidden_size"] // heads
    communicator = Communicator(
        work.topology, transport=StubTransport(0, work.topology.world_size), use_blocks=use_blocks
    )
    kernel = choose_kernel(device, torch.bfloat16, head_dim)
    shard = make_shard(MicroBatch(groups=work.groups), work.lengths, 0)
    context = SequenceContext(shard, communicator, kernel, device)
    rows = shard.tokens
    like = {"dtype": torch.bfloat16, "device": device, "requires_grad": True}
    q = torch.randn(rows, heads, head_dim, **like)  # [tokens, heads, head_dim]
    k = torch.randn(rows, kv_heads, head_dim, **like)  # [tokens, kv_heads, head_dim]
    v = torch.randn(rows, kv_heads, head_dim, **like)
    dout = torch.randn_like(q)
    times = LayerTimes()
    rounds = 1 if setting.rehearse else ROUNDS
    for number in range(2 * rounds):
        synchronize(device)
        began = time.perf_counter()
        with host_waits_nowhere(device.type == "cuda" and number >= rounds):
            sequence_parallel_attention(q, k, v, context).backward(dout)
        handed_over = time.perf_counter()
        synchronize(device)
        if number >= rounds:
            times.host.append(handed_over - began)
            times.total.append(time.perf_counter() - began)
    return times
