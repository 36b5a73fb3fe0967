"""Router losses of mixtures of experts are those of the whole step, whatever the plan: one process
that has the step as one batch gives the same loss and gradients."""

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.hf.test_exactness import own_batches, whole
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import RandomPlanEngine, documents, reference_loss, relative_errors
from tests.ranks import run_ranks

LENGTHS = [1, 2, 17, 5, 31, 3, 1, 40, 11, 2, 13, 23]
COEFFICIENT = 0.5


def mixture(family="Mixtral"):
    """A tiny mixture of experts that asks for its router loss."""
    return make_model(family, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)


def router_loss_of(model, examples):
    """The router loss of all tokens of all documents, by its definition, in float64."""
    config = model.config
    of_layers = None
    for example in examples:
        outputs = model(
            input_ids=torch.tensor([example["input_ids"]]),
            output_router_logits=True,
            use_cache=False,
        )
        own = [[logits] for logits in outputs.router_logits]  # [tokens, experts] of each layer
        of_layers = (
            own if of_layers is None else [a + b for a, b in zip(of_layers, own, strict=True)]
        )
    logits = torch.cat([torch.cat(parts) for parts in of_layers])  # [layers * tokens, experts]
    probabilities = logits.softmax(dim=-1)
    chosen = probabilities.topk(config.num_experts_per_tok).indices  # [layers * tokens, k]
    experts = logits.shape[-1]
    fractions = F.one_hot(chosen, experts).sum(dim=1).double().mean(dim=0)  # [experts]
    return experts * (fractions * probabilities.mean(dim=0)).sum()


def reference(family, examples):
    """Loss and gradients of one process, with the step as one batch."""
    model = mixture(family)
    model.set_attn_implementation("eager")
    loss = reference_loss(model, examples)
    loss = loss + COEFFICIENT * router_loss_of(model, examples)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def errors_under_random_plans(rank, world_size, family, sharding, plans):
    """The largest relative errors of loss and gradients over some random plans."""
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        examples = documents(LENGTHS)
        wanted_loss, wanted = reference(family, examples)
        model = mixture(family)
        if sharding == "fsdp2":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=world_size)
        engine.attach(model)
        wrapped = DistributedDataParallel(model) if sharding == "ddp" else model
        worst = 0.0
        micro_batches = []
        for _ in range(plans):
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                loss = step.backward(wrapped)
                micro_batches.append(len(step.plan.micro_batches))
            torch.distributed.all_reduce(loss)
            found = {}
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    found[name] = whole(parameter.grad)
            model.zero_grad()
            errors = relative_errors(found, wanted)
            worst = max(worst, abs(float(loss) / world_size / wanted_loss - 1), *errors.values())
        assert max(micro_batches) > 1
        return worst


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "family", "sharding"),
    [(2, "Mixtral", "ddp"), (3, "Qwen3Moe", "ddp"), (2, "Qwen3Moe", "fsdp2")],
)
def test_gradients_with_a_router_loss_equal_one_process(world_size, family, sharding):
    for worst in run_ranks(errors_under_random_plans, world_size, family, sharding, 6):
        assert worst < 1e-10
