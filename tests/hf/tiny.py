"""A model, documents, what one process makes of them, and steps of a loop under random plans."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqEngine
from hf_flexseq.plan import Plan
from hf_flexseq.plan.blocks import SEE_BLOCKS
from hf_flexseq.plan.facts import NO_FACTS
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.planner.shared_rows import SharedRows
from tests.plans import random_plan

VOCAB = 61
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}


@contextmanager
def refused(message, kind=NotImplementedError):
    """Expect an error of this kind, whose message matches and is one line."""
    with pytest.raises(kind, match=message) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def tiny_llama(dtype=torch.float64, seed=0, cls=LlamaForCausalLM, **config):
    """Two layers, grouped-query attention; different seeds are different weights.

    transformers' RMSNorm computes in float32 whatever the dtype, so that a loss scaled by 3
    (ranks) has gradients that round differently; torch's own computes in the dtype of its input.
    """
    torch.manual_seed(seed)
    return with_torch_norms(cls(LlamaConfig(**{**SIZES, **config}))).to(dtype)


def tiny_model(name, dtype=torch.float64, **config):
    """A model of two layers of another family, as transformers names it."""
    torch.manual_seed(0)
    cls = getattr(transformers, name + "ForCausalLM")
    return cls(cls.config_class(**{**SIZES, **config})).to(dtype)


def tiny_gpt2(dtype=torch.float64):
    """GPT-2, whose options have names of their own, without dropout."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **dropouts, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(config).to(dtype)


def with_torch_norms(model):
    """The model, a Llama, with torch's norms instead of transformers' own."""
    for layer in model.model.layers:
        layer.input_layernorm = torch_norm(layer.input_layernorm)
        layer.post_attention_layernorm = torch_norm(layer.post_attention_layernorm)
    model.model.norm = torch_norm(model.model.norm)
    return model


def loadable(cls):
    """A class of models of `tiny_llama`, which transformers can load."""

    class Loadable(cls):
        def __init__(self, config):
            super().__init__(config)
            with_torch_norms(self)

    Loadable.__name__ = cls.__name__  # by which transformers chooses the loss
    Loadable.__module__ = cls.__module__  # so that it does not count as code of the user's
    return Loadable


def torch_norm(norm):
    return torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)


def documents(lengths, seed=0):
    """Examples as a dataset would hold them: some labels are masked, and not all documents
    equally."""
    rng = random.Random(seed)
    examples = []
    for length in lengths:
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        prompt = rng.randrange(length)
        examples.append({"input_ids": tokens, "labels": [-100] * prompt + tokens[prompt:]})
    return examples


def batches(count, lengths=(5, 9)):
    """So many batches of documents of these lengths."""
    return [DataCollatorForFlexSeq()(documents(lengths)) for _ in range(count)]


def tiny_arguments(**options):
    """Arguments of an engine that needs no planner's process and measures nothing."""
    defaults = {"lookahead": 0, "cost_model": "estimate", "max_tokens_per_rank": 64}
    return FlexSeqArguments(**{**defaults, **options})


def weights(model):
    """A copy of all parameters by name, in a form that a rank can return."""
    return {name: p.detach().clone().numpy() for name, p in model.named_parameters()}


def reference_loss(model, examples):
    """The mean loss over all target tokens, in float64, one document at a time through the model's
    own attention."""
    total, targets = 0.0, 0
    for example in examples:
        logits = (
            model(
                input_ids=torch.tensor([example["input_ids"]], device=model.device),
                use_cache=False,
            )
            .logits[0]
            .double()
        )
        labels = logits.new_tensor([*example["labels"][1:], -100], dtype=torch.int64)
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        targets += int((labels != -100).sum())
    return total / targets


def reference_gradients(model, examples, attention="sdpa"):
    """Loss and gradients, by parameter name, of one process; zeros where there is none."""
    model.set_attn_implementation(attention)
    model.zero_grad()
    loss = reference_loss(model, examples)
    loss.backward()
    return float(loss.detach()), taken_gradients(model)


def taken_gradients(model):
    """A copy of all gradients by parameter name, zeros where there is none; the model has none
    afterwards."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients[name] += parameter.grad
    model.zero_grad()
    return gradients


def relative_errors(found, wanted, floor_of=None):
    """||a - b|| / ||b|| per parameter, with 1e-3 of the largest norm as floor: in `floor_of`,
    where a rank has but some of the parameters."""
    floor = 1e-3 * max(float(g.norm()) for g in (floor_of or wanted).values())
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name] - g).norm()) / max(float(g.norm()), floor)
        for name, g in wanted.items()
    }


def noting_figures(trainer):
    """The figures of each step that a trainer makes from now on, those of the log and others."""
    engine, found = trainer.flexseq, []
    note = engine._finished._on_figures

    def both(number, figures):
        found.append(figures)
        note(number, figures)

    engine._finished._on_figures = both
    return found


class RandomPlanner:
    """Any legal plan, another one each step. accepts: draws go on until it is True of a plan.
    choose: gives each micro-batch its choice for memory, by the random numbers of the plans."""

    def __init__(self, topology, seed, accepts=lambda plan: True, choose=lambda rng: None):
        self.topology, self.rng, self.submitted = topology, random.Random(seed), {}
        self.accepts = accepts
        self.choose = choose

    def submit(self, step, lengths, facts=NO_FACTS):
        self.submitted[step] = (lengths, facts)

    def wait(self, step, seconds):
        return None

    def result(self, step) -> Plan:
        lengths, facts = self.submitted.pop(step)
        shared = SharedRows(rows=tuple(lengths), units=tuple(facts.units))
        later_pairs = facts.later_pairs
        plan = _where_blocks_are_seen(self._draw(shared), later_pairs)
        while not self.accepts(plan):
            plan = _where_blocks_are_seen(self._draw(shared), later_pairs)
        return plan

    def _draw(self, shared):
        world_size, nodes = self.topology.world_size, self.topology.nodes
        plan = random_plan(shared.held, world_size, self.rng, nodes=nodes, units=shared.units)
        batches = [replace(one, memory=self.choose(self.rng)) for one in plan.micro_batches]
        return replace(plan, micro_batches=tuple(batches))

    def close(self):
        pass


def _where_blocks_are_seen(plan, later_pairs):
    """The plan with Ulysses instead of rings for groups with blocks."""
    batches = []
    for batch in plan.micro_batches:
        groups = []
        for group in batch.groups:
            if later_pairs.keys() & set(group.rows) and group.strategy not in SEE_BLOCKS:
                group = replace(group, strategy="ulysses")
            groups.append(group)
        batches.append(replace(batch, groups=tuple(groups)))
    return replace(plan, micro_batches=tuple(batches))


class RandomPlanEngine(FlexSeqEngine):
    """An engine whose plans are random; see `RandomPlanner` for `accepts` and `choose`."""

    def __init__(
        self, accelerator, seed, accepts=lambda plan: True, choose=lambda rng: None, **options
    ):
        defaults = {"cost_model": "flexsp-gpt-7b-a100", "max_tokens_per_rank": 1000}
        super().__init__(accelerator, tiny_arguments(**{**defaults, **options}))
        topology = self.communicator.topology
        self.planner = lambda ahead: RandomPlanner(topology, seed, accepts, choose)


def any_choice(layers, rng, tiles=(1,)):
    """Any choice for memory of so many layers, with any of some numbers of tiles, or none."""
    if rng.random() < 0.2:
        return None
    recomputed = rng.randint(0, layers)
    on_host = rng.randint(0, recomputed)
    return MemoryChoice(
        recomputed_layers=recomputed,
        inputs_on_host=rng.randint(0, recomputed),
        outputs_on_host=on_host,
        outputs_recomputed=rng.randint(0, recomputed - on_host),
        mlp_tiles=rng.choice(tiles),
    )


@contextmanager
def any_choices(layers, tiles=(1,)):
    """Give the micro-batches of all plans that run inside the block any choices for memory; see
    `any_choice`."""
    original = FlexSeqEngine.dispatch

    def dispatch(self, planned):
        rng = random.Random(planned.drawn.number)  # alike on all ranks
        batches = []
        for micro_batch in planned.plan.micro_batches:
            batches.append(replace(micro_batch, memory=any_choice(layers, rng, tiles)))
        plan = replace(planned.plan, micro_batches=tuple(batches))
        return original(self, replace(planned, plan=plan))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlexSeqEngine, "dispatch", dispatch)
        yield


# ---- steps of a loop under random plans


def own_batches(examples: Any, rank: int, world_size: int) -> list[Any]:
    """What a rank's dataloader gives: every world_size-th example, two batches of them."""
    mine = examples[rank::world_size]
    half = len(mine) // 2
    collate = DataCollatorForFlexSeq()
    return [collate(part) for part in (mine[:half], mine[half:]) if part]


def whole(gradient: Any) -> Any:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def sharded(model: Any) -> Any:
    """The model under FSDP2, with a unit for each layer and one for the rest."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    """All gradients, whole, by parameter name; the model has none afterwards. Collective over the
    world."""
    found = {name: whole(gradient) for name, gradient in taken_gradients(model).items()}
    return {name: gradient.double() for name, gradient in found.items()}


def random_steps(
    engine: RandomPlanEngine, model: Any, batches: list[Any], *, ddp: Any = None, plans: int = 1
) -> Iterator[tuple[Any, float, dict[str, torch.Tensor]]]:
    """Yield each step of `batches` under so many random plans, one step of two batches at a time,
    with its loss over all ranks and whole gradients; and detach the engine.

    ddp: options of DDP around the model; None for a model without it.
    """
    wrapped = model if ddp is None else DistributedDataParallel(model, **ddp)
    world_size = engine.communicator.world_size
    for _ in range(plans):
        for item in engine.steps(batches, 2):
            loss = item.backward(wrapped).clone()  # the step reads its own again
            if world_size > 1:
                dist.all_reduce(loss)
            yield item, float(loss) / world_size, whole_gradients(model)
    engine.detach()


def attached(model: Any, seed: int, **options: Any) -> RandomPlanEngine:
    """An engine of random plans that the model is attached to."""
    engine = RandomPlanEngine(Accelerator(cpu=True), seed, **options)
    engine.attach(model)
    return engine


def errors(loss: float, gradients: Any, wanted: tuple[float, Any]) -> dict[str, float]:
    """Relative errors of a loss and of the worst gradient. wanted: both of one process."""
    apart = relative_errors(gradients, wanted[1])
    return {"loss": abs(loss / wanted[0] - 1), "gradients": max(apart.values())}


def worst_of(found: Iterator[dict[str, float]]) -> dict[str, float]:
    """The largest of each of some errors."""
    found = list(found)
    return {name: max(one[name] for one in found) for name in found[0]}
