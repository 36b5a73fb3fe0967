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
from hf_flexseq.hf.engine.sharding import parameter_groups
from hf_flexseq.hf.model.facts import gathered_itemsize, trained_elements
from hf_flexseq.hf.model.sharding import is_fsdp2, replicas
from tests.hf.random_steps import errors, own_batches, sharded, whole_gradients
from tests.hf.test_exactness import LENGTHS
from tests.hf.tiny import RandomPlanEngine, documents, loadable, reference_gradients, tiny_llama
from tests.ranks import run_cases

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

HSDP = {"fsdp_size": 2, "dp_replicate_size": 2}

GATHER = "_allgather_base_.default"
SCATTER = "_reduce_scatter_base_.default"
ALL_REDUCE = "allreduce_.default"


class Collectives(TorchDispatchMode):
    """Counts the collectives that start inside of it, by the names of their operations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def loaded(folder, **config):
    """The model that `tiny_llama` has saved, sharded at load."""
    model = loadable(LlamaForCausalLM).from_pretrained(
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
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units for group in parameter_groups(fully_shard.state(unit))]
    names = ("reshard_after_backward", "reduce_grads", "all_reduce_grads")
    return [
        (group.post_forward_mesh_info is not None, *(getattr(group, name) for name in names))
        for group in groups
    ]


def check_steps(rank, world_size, folder, config, policies, each_batch):
    """Take a step under each policy of a list, in this order and on one model; without a `config`
    sharded by hand."""
    examples = documents(LENGTHS)
    wanted = reference_gradients(tiny_llama(torch.float64), examples)
    model = loaded(folder, **config) if config else sharded(tiny_llama()).train()
    units = UNITS["transformers" if config else "by hand"]
    plugin = GradientAccumulationPlugin(num_steps=1, sync_each_batch=each_batch)
    engine = RandomPlanEngine(
        Accelerator(cpu=True, gradient_accumulation_plugin=plugin),
        seed=5,
        accepts=lambda plan: len(plan.micro_batches) > 1,
    )
    engine.attach(model)
    fsdp = engine.planning.fsdp
    settings = None
    for name in policies:
        policy = POLICIES[name]
        if each_batch:
            assert fsdp.figures is None  # there is no choice
        else:
            fsdp.figures = figures_for(policy)
        fsdp.taken.clear()
        with Collectives() as collectives:
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                loss = step.backward(model)
                micro_batches = len(step.plan.micro_batches)
        assert each_batch or fsdp.taken == {policy}
        # between steps all is as FSDP2 left it after its first step
        settings = settings or unit_settings(model)
        assert unit_settings(model) == settings
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

        counts = collectives.counts
        # the unit of norm and head stays gathered from forward to backward
        gathers = (2 * units - 1) * micro_batches if policy.regathers else units
        assert counts[GATHER] == gathers, name
        assert counts[SCATTER] == units * (micro_batches if policy.reduces_each else 1), name
        over_replicas = (micro_batches if each_batch else 1) if config == HSDP else 0
        assert counts[ALL_REDUCE] == units * over_replicas, name

        torch.distributed.all_reduce(loss)
        apart = errors(float(loss) / world_size, whole_gradients(model), wanted)
        assert apart["loss"] < 1e-12
        assert apart["gradients"] < 1e-10
    engine.detach()


ORDER = ["both", "plain", "keeps parameters", "reduces once", "both"]


def test_each_policy_is_exact_and_moves_what_it_says(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    cases = [(tmp_path, config, ORDER, False) for config in ({}, {"fsdp_size": 2})]
    run_cases(check_steps, 2, cases, seconds=120)


def test_each_policy_is_exact_over_replicas_and_so_is_sync_each_batch(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    # Replicas add one collective to each policy's own, in the last micro-batch.
    order = ["both", "plain", "both"]
    cases = [(tmp_path, HSDP, order, False), (tmp_path, HSDP, ["plain"], True)]
    run_cases(check_steps, 4, cases, seconds=120)


# ---- what a model is found to be


def found_facts(rank, world_size, folder, config, options):
    """What is found of a model; sharded by transformers, if there is a `config`. options: of the
    engine."""
    accelerator = Accelerator(cpu=True)
    options = dict(options)
    offloads = options.pop("fsdp_cpu_offload", False)
    model = loaded(folder, **config) if config else tiny_llama()
    if offloads:
        model.config.distributed_config.fsdp_cpu_offload = True
    engine = RandomPlanEngine(accelerator, seed=0, **options)
    engine.attach(model)
    return (
        replicas(model, accelerator),
        is_fsdp2(model, accelerator),
        gathered_itemsize(model, accelerator),
        trained_elements(model),
        engine.cost,
        engine.planning.fsdp.figures,
    )


FOUND = (  # configuration, replicas, bytes of an element when gathered
    ({"fsdp_size": 4}, 1, 8),
    (HSDP, 2, 8),
    (HSDP | {"fsdp_mixed_precision": True}, 2, 2),
)
WITHOUT_CHOICE = (
    ({}, {}),
    ({"fsdp_size": 1, "dp_replicate_size": 4}, {}),
    ({"fsdp_size": 4}, {"fsdp_cpu_offload": True}),
)


def test_replicas_bytes_and_memory_are_read_from_the_model_and_the_device(tmp_path):
    plain = tiny_llama()
    plain.save_pretrained(tmp_path)
    elements = sum(parameter.numel() for parameter in plain.parameters())
    huge = replace(PRESETS["llama-3.1-8b-h200"], budget_bytes=1e18, sharded_state_bytes=0.0)
    huge.save(tmp_path / "cost.json")
    estimated = {"cost_model": "estimate", "max_tokens_per_rank": None}
    by_case = run_cases(
        found_facts,
        4,
        [
            *[(tmp_path, config, estimated) for config, *_ in FOUND],
            *[(tmp_path, *case) for case in WITHOUT_CHOICE],
            (tmp_path, {"fsdp_size": 4}, {"cost_model": str(tmp_path / "cost.json")}),
        ],
    )
    for (_, copies, itemsize), by_rank in zip(FOUND, by_case, strict=False):
        assert len({rank[-1] for rank in by_rank}) == 1
        for found_copies, is_sharded, found_itemsize, trained, cost, figures in by_rank:
            assert (found_copies, is_sharded, found_itemsize) == (copies, True, itemsize)
            assert trained == elements
            assert cost.sharded_state_bytes == 16 * elements * copies
            assert figures.parameter_bytes == itemsize * elements
            assert figures.gradient_bytes == 8 * elements
            state_bytes = cost.state_bytes + 16 * elements * copies / 4
            assert figures.free_bytes == pytest.approx(cost.budget_bytes - state_bytes)
            assert 0 < 3 * figures.trip_s < cost.micro_batch_s
    for by_rank in by_case[len(FOUND) : -1]:
        assert [rank[-1] for rank in by_rank] == [None] * 4, "nothing is sharded on the device"
    for *_, cost, figures in by_case[-1]:
        assert cost.budget_bytes == 1e18
        assert figures.free_bytes < 1e15, "memory counts as far as the device has it"
