"""What the checks of exactness train: a small Llama on a few documents, under random plans.

The truth is one process that takes one document at a time, through transformers' own attention, in
float64. What a plan gives is judged in two ways:

    float32     with the plain softmax as its kernel: no error may be above 1e-4. Sums of a few
                thousand rounded terms differ by some 1e-6 with their order; a token that is lost
                changes a gradient by more than 1e-4.
    bfloat16    with the GPU's own kernel, under autocast: the error may be twice that of the same
                documents on one rank. Rounding decides both of them; a chunk that comes too late
                or from elsewhere gives errors of the size of the gradient.
"""

import copy
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_checks.report import Setting
from hf_flexseq import DataCollatorForFlexSeq
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.hf.attention import NAME
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.kernels import Kernel
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import MicroBatch, Plan
from hf_flexseq.plan.shard import Shard
from hf_flexseq.published.zeppelin.passes import ZeppelinPasses
from hf_flexseq.published.zeppelin.remap import remapped_shards
from tests import plans
from tests.kernels.reference import Reference

VOCAB = 509
LENGTHS = (1, 2, 170, 64, 1021, 3, 1, 512, 333, 2, 129, 700)  # on a GPU
SHORT_LENGTHS = (1, 2, 17, 5, 31, 3, 1, 40, 11, 2)  # in a rehearsal
FLOAT32_BOUND = 1e-4
BFLOAT16_FACTOR = 2.0
FLOOR = 1e-3  # of the largest gradient's norm: what smaller gradients are compared with

Gradients = dict[str, torch.Tensor]  # by name of the parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The arithmetic of a run."""

    name: str
    kernel: Kernel
    autocast: torch.dtype | None
    """What the forward computes in; None for the dtype of the parameters."""

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, self.autocast)


def precisions(device: torch.device) -> tuple[Precision, Precision]:
    """Return float32 by the plain softmax and bfloat16 by the device's own kernel."""
    kernel = choose_kernel(device, torch.bfloat16, head_dim(device))
    return (
        Precision(name="float32", kernel=Reference(), autocast=None),
        Precision(name="bfloat16", kernel=kernel, autocast=torch.bfloat16),
    )


# ---- the model


def head_dim(device: torch.device) -> int:
    """Return the size of a head: the CUDA kernels take multiples of 8."""
    return 64 if device.type == "cuda" else 8


def small_llama(device: torch.device, *, layers: int) -> LlamaForCausalLM:
    """Return a float32 model with 8 query heads that share 4 key heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8 * head_dim(device),
        intermediate_size=16 * head_dim(device),
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max(LENGTHS),
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).to(device).train()


def planned(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Give a model the attention and the loss of planned steps, and return it."""
    model.set_attn_implementation(NAME)
    attach_chunked_loss(model)
    return model


# ---- documents


def documents(setting: Setting) -> list[dict[str, list[int]]]:
    """Return examples of very different lengths, of which some labels are masked."""
    rng = random.Random(0)
    examples = []
    for length in SHORT_LENGTHS if setting.rehearse else LENGTHS:
        tokens = rng.choices(range(VOCAB), k=length)
        prompt = rng.randrange(length)
        examples.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return examples


def targets_of(examples: Sequence[Mapping[str, list[int]]]) -> int:
    """Count the tokens that have to be predicted."""
    targets = 0
    for example in examples:
        targets += sum(label != -100 for label in example["labels"][1:])
    return targets


def drawn_by(
    rank: int, world_size: int, examples: Sequence[dict[str, list[int]]]
) -> list[dict[str, Any]]:
    """Return the batches that a rank's dataloader gives: every world_size-th example."""
    own = list(examples[rank::world_size])
    return [DataCollatorForFlexSeq()(own)] if own else []


# ---- the truth


def true_gradients(
    model: LlamaForCausalLM, examples: Sequence[Mapping[str, list[int]]]
) -> Gradients:
    """Return the gradients of the mean loss over all targets, in float64, on the model's device.

    model: in eager attention; left as it is.
    """
    twin = copy.deepcopy(model).double()
    targets = targets_of(examples)
    for example in examples:
        ids = torch.tensor([example["input_ids"]], device=twin.device)  # [1, tokens]
        labels = ids.new_tensor(example["labels"][1:])  # [tokens - 1]
        logits = twin(input_ids=ids, use_cache=False).logits[0, :-1]  # [tokens - 1, vocab]
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / targets
        loss.backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def largest_error(found: Gradients, true: Gradients) -> float:
    """Return the largest ||found - true|| / ||true|| of the parameters in `found`."""
    floor = FLOOR * max(float(gradient.norm()) for gradient in true.values())
    largest = 0.0
    for name, gradient in found.items():
        wanted = true[name]
        error = float((gradient.double() - wanted).norm()) / max(float(wanted.norm()), floor)
        # NaN is larger than everything
        largest = max(largest, error) if error == error else float("inf")
    return largest


def bound_of(precision: Precision, error_of_one_rank: float) -> float:
    """Return the largest error that a plan may have.

    error_of_one_rank: of the same documents on one rank, in the same precision.
    """
    if precision.autocast is None:
        return FLOAT32_BOUND
    return BFLOAT16_FACTOR * error_of_one_rank


# ---- random plans


class EagerPasses(ZeppelinPasses):
    """Zeppelin's passes where they always pay: what leaves a NIC idle is routed, and tokens are
    spread evenly."""

    def __init__(self, topology: Topology) -> None:
        bandwidths = ((topology.ranks_per_node, 1e12), (topology.world_size, 1e3))
        network = replace(PRESETS["llama-3.1-8b-a800"], bandwidths=bandwidths)
        super().__init__(network, topology, lockstep=True)
        self._world = topology

    def shards(self, micro_batch: MicroBatch, lengths: Sequence[int]) -> list[Shard] | None:
        """Return what every rank holds of a micro-batch that has a token for each of them."""
        tokens = sum(group.tokens(lengths) for group in micro_batch.groups)
        if tokens < self._world.world_size:
            return None
        return remapped_shards(micro_batch, lengths, self._world)


def random_plan(lengths: Sequence[int], topology: Topology, rng: random.Random) -> Plan:
    """Return a random legal plan, as the tests draw it."""
    return plans.random_plan(lengths, topology.world_size, rng, nodes=topology.nodes)


def features(plan: Plan, topology: Topology) -> Counter[str]:
    """Count what there is in a plan: groups of each strategy, and micro-batches of some kinds."""
    counts: Counter[str] = Counter()
    for micro_batch in plan.micro_batches:
        counts.update(group.strategy for group in micro_batch.groups)
        zones = [len(micro_batch.groups_of(rank)) for rank in range(topology.world_size)]
        counts["several zones"] += max(zones) > 1
        counts["across nodes"] += any(
            topology.spans_nodes(group.start, group.stop) for group in micro_batch.groups
        )
    return counts


def counts_line(counts: Counter[str]) -> str:
    """Return a sentence with all counts, the largest first."""
    names = [f"{number} {name}" for name, number in counts.most_common()]
    return f"Groups of each strategy, and micro-batches of some kinds: {', '.join(names)}."
