"""FSDP2 and HSDP follow each policy: gradients stay those of one process, and the collectives of a
step are as many as the policy says.

HSDP is transformers' own, 2 shards x 2 replicas; a model that is sharded over all ranks stands
beside it.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.sharding import PLAIN, FsdpFigures, FsdpPolicy
from hf_flexseq.hf.model.facts import gathered_itemsize, is_fsdp2, replicas, trained_elements
from hf_flexseq.hf.sharding import FsdpPolicies, parameter_groups
from tests.hf.test_exactness import LENGTHS, own_batches, whole
from tests.hf.tiny import (
    RandomPlanEngine,
    documents,
    reference_gradients,
    relative_errors,
    tiny_llama,
    torch_norm,
)
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes

POLICIES = {
    "plain": PLAIN,
    "keeps parameters": FsdpPolicy(regathers=False),
    "reduces once": FsdpPolicy(reduces_each=False),
    "both": FsdpPolicy(reduces_each=False, regathers=False),
}
# Units of the tiny model: by transformers' plan embedding, two layers, norm and head; by our own
# hand two layers and the rest.
UNITS = {"transformers": 4, "by hand": 3}

GATHER = "_allgather_base_.default"
SCATTER = "_reduce_scatter_base_.default"
ALL_REDUCE = "allreduce_.default"


class TorchNormLlama(LlamaForCausalLM):
    """The model of `tiny_llama`, which transformers can load."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = torch_norm(layer.input_layernorm)
            layer.post_attention_layernorm = torch_norm(layer.post_attention_layernorm)
        self.model.norm = torch_norm(self.model.norm)


class Collectives(TorchDispatchMode):
    """Counts the collectives that start inside of it, by the names of their operations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def sharded_by_hand():
    model = tiny_llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model).train()


def loaded(folder, **config):
    """The model that `tiny_llama` has saved, sharded at load."""
    model = TorchNormLlama.from_pretrained(
        folder, dtype=torch.float64, distributed_config=DistributedConfig(**config)
    )
    return model.train()


def figures_for(policy):
    """Figures by which exactly `policy` is the best that fits, whatever the plan."""
    return FsdpFigures(
        free_bytes=1e9,
        token_bytes=1.0 if policy != PLAIN else 1e10,
        parameter_bytes=1e10 if policy.regathers else 0.0,
        gradient_bytes=1e10 if policy.reduces_each else 0.0,
        trip_s=0.0,
    )


def unit_settings(model):
    """Whether FSDP2 frees parameters after forward and backward, and reduces, by unit."""
    settings = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(fully_shard.state(module)):
                settings.append(
                    (
                        group.post_forward_mesh_info is not None,
                        group.reshard_after_backward,
                        group.reduce_grads,
                        group.all_reduce_grads,
                    )
                )
    return settings


def steps_under(rank, world_size, folder, config, policies, each_batch):
    """For each policy of a list, in this order and on one model: micro-batches, collectives, and
    the largest relative errors of loss and gradients. Without a `config` sharded by hand."""
    examples = documents(LENGTHS)
    wanted_loss, wanted = reference_gradients(tiny_llama(torch.float64), examples)
    model = loaded(folder, **config) if config else sharded_by_hand()
    plugin = GradientAccumulationPlugin(num_steps=1, sync_each_batch=each_batch)
    engine = RandomPlanEngine(
        Accelerator(cpu=True, gradient_accumulation_plugin=plugin),
        seed=5,
        accepts=lambda plan: len(plan.micro_batches) > 1,
    )
    engine.attach(model)
    settings, results = None, []
    for name in policies:
        executor = engine.executor
        if each_batch:
            assert executor.fsdp.figures is None  # there is no choice
        else:
            executor.fsdp.figures = figures_for(POLICIES[name])
        executor.fsdp.taken.clear()
        with Collectives() as collectives:
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                loss = step.backward(model)
                micro_batches = len(step.plan.micro_batches)
        assert each_batch or executor.fsdp.taken == {POLICIES[name]}
        # between steps all is as FSDP2 left it after its first step
        settings = settings or unit_settings(model)
        assert unit_settings(model) == settings
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        torch.distributed.all_reduce(loss)
        found = {name: whole(p.grad) for name, p in model.named_parameters()}
        model.zero_grad()
        errors = {
            "loss": abs(float(loss) / world_size - wanted_loss) / wanted_loss,
            "gradients": max(relative_errors(found, wanted).values()),
        }
        results.append((micro_batches, dict(collectives.counts), errors))
    engine.detach()
    return results


ORDER = ["both", "plain", "keeps parameters", "reduces once", "plain", "both"]


def assert_policies_move_what_they_say(results, units, is_hybrid):
    """results: what `steps_under` has found on a rank, of ORDER."""
    for name, (micro_batches, collectives, errors) in zip(ORDER, results, strict=True):
        policy = POLICIES[name]
        # the unit of norm and head stays gathered from forward to backward
        gathers = (2 * units - 1) * micro_batches if policy.regathers else units
        scatters = units * (micro_batches if policy.reduces_each else 1)
        assert collectives[GATHER] == gathers, name
        assert collectives[SCATTER] == scatters, name
        assert collectives.get(ALL_REDUCE, 0) == units * is_hybrid, name
        assert errors["loss"] < 1e-12
        assert errors["gradients"] < 1e-10


def test_each_policy_is_exact_and_moves_what_it_says(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    cases = [(tmp_path, config, ORDER, False) for config in ({}, {"fsdp_size": 2})]
    by_hand, by_transformers = run_cases(steps_under, 2, cases, seconds=120)
    for results in by_hand:
        assert_policies_move_what_they_say(results, UNITS["by hand"], is_hybrid=False)
    for results in by_transformers:
        assert_policies_move_what_they_say(results, UNITS["transformers"], is_hybrid=False)


def test_each_policy_is_exact_over_replicas_and_so_is_sync_each_batch(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    config = {"fsdp_size": 2, "dp_replicate_size": 2}
    cases = [(tmp_path, config, ORDER, False), (tmp_path, config, ["plain"], True)]
    by_policy, each_batch = run_cases(steps_under, 4, cases, seconds=120)
    units = UNITS["transformers"]
    for results in by_policy:
        assert_policies_move_what_they_say(results, units, is_hybrid=True)
    # every micro-batch is reduced, over replicas, too
    for results in each_batch:
        for micro_batches, collectives, errors in results:
            assert collectives[GATHER] == (2 * units - 1) * micro_batches
            assert collectives[SCATTER] == units * micro_batches
            assert collectives[ALL_REDUCE] == units * micro_batches
            assert errors["gradients"] < 1e-10


# ---- what a model is found to be


def found_facts(rank, world_size, folder, config):
    accelerator = Accelerator(cpu=True)
    model = loaded(folder, **config)
    engine = RandomPlanEngine(accelerator, seed=0, cost_model="estimate", max_tokens_per_rank=None)
    engine.attach(model)
    return (
        replicas(model, accelerator),
        is_fsdp2(model, accelerator),
        gathered_itemsize(model, accelerator),
        trained_elements(model),
        engine.cost,
        engine.executor.fsdp.figures,
    )


FOUND = (  # configuration, replicas, bytes of an element when gathered
    ({"fsdp_size": 4}, 1, 8),
    ({"fsdp_size": 2, "dp_replicate_size": 2}, 2, 8),
    ({"fsdp_size": 2, "dp_replicate_size": 2, "fsdp_mixed_precision": True}, 2, 2),
)


def test_replicas_and_bytes_are_read_from_the_model(tmp_path):
    plain = tiny_llama()
    plain.save_pretrained(tmp_path)
    elements = sum(parameter.numel() for parameter in plain.parameters())
    by_case = run_cases(found_facts, 4, [(tmp_path, config) for config, _, _ in FOUND])
    for (_, copies, itemsize), by_rank in zip(FOUND, by_case, strict=True):
        assert len({rank[-1] for rank in by_rank}) == 1
        for found_copies, sharded, found_itemsize, trained, cost, figures in by_rank:
            assert (found_copies, sharded, found_itemsize) == (copies, True, itemsize)
            assert trained == elements
            assert cost.sharded_state_bytes == 16 * elements * copies
            assert figures.parameter_bytes == itemsize * elements
            assert figures.gradient_bytes == 8 * elements
            state_bytes = cost.state_bytes + 16 * elements * copies / 4
            assert figures.free_bytes == pytest.approx(cost.budget_bytes - state_bytes)
            assert 0 < 3 * figures.trip_s < cost.micro_batch_s


def without_choice(rank, world_size, folder):
    """Figures of models that FSDP2 does not shard, or whose share is on the CPU."""
    found = []
    for config in (None, {"fsdp_size": 1, "dp_replicate_size": 2}, {"fsdp_size": 2}):
        model = tiny_llama() if config is None else loaded(folder, **config)
        if config == {"fsdp_size": 2}:
            model.config.distributed_config.fsdp_cpu_offload = True
        engine = RandomPlanEngine(Accelerator(cpu=True), seed=0)
        engine.attach(model)
        found.append(engine.executor.fsdp.figures)
    return found


def test_nothing_is_chosen_where_nothing_is_sharded_on_the_device(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    assert run_ranks(without_choice, 2, tmp_path) == [[None] * 3] * 2


def beyond_the_device(rank, world_size, folder):
    """Free memory by a cost model of a machine with far more of it than this one."""
    engine = RandomPlanEngine(
        Accelerator(cpu=True), seed=0, cost_model=str(folder / "cost.json"), max_tokens_per_rank=9
    )
    engine.attach(loaded(folder, fsdp_size=2))
    return engine.cost.budget_bytes, engine.executor.fsdp.figures.free_bytes


def test_memory_counts_as_far_as_the_device_has_it(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    huge = replace(PRESETS["llama-3.1-8b-h200"], budget_bytes=1e18, sharded_state_bytes=0.0)
    huge.save(tmp_path / "cost.json")
    for budget, free in run_ranks(beyond_the_device, 2, tmp_path):
        assert budget == 1e18
        assert free < 1e15


def test_the_units_of_a_model_are_looked_for_once_and_forgotten_with_it(monkeypatch):
    looked_at = []
    modules = torch.nn.Module.modules
    monkeypatch.setattr(
        torch.nn.Linear, "modules", lambda model: looked_at.append(model) or modules(model)
    )
    stepped = FsdpPolicies(None, None, over_replicas=False)
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for model in (first, first, second):
        with stepped.of_step(None, model) as before_last, before_last():
            pass
    stepped.forget_model()
    with stepped.of_step(None, second):
        pass
    assert looked_at == [first, second, second]
