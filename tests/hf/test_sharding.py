"""Trainer steps under DeepSpeed ZeRO-2 and ZeRO-3, under FSDP2 and under HSDP give the plain
Trainer's weights; so do steps of a loop under ZeRO those under DDP. FSDP2 and HSDP follow each
policy for gathers and reductions.

The Trainer's argument `deepspeed` takes no float64 parameters, so both sides are float32; the
larger learning rate keeps the rounding of the weights themselves, which both sides have, small
beside the update.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, GradientAccumulationPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import FalconH1ForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import compute_mup_vector

from hf_flexseq import FlexSeqEngine
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.cost.sharding import PLAIN, FsdpFigures, FsdpPolicy
from hf_flexseq.hf.engine.sharding import parameter_groups
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import gathered_itemsize, trained_elements
from hf_flexseq.hf.model.sharding import is_fsdp2, replicas
from hf_flexseq.hf.model.small import small_model
from tests import budget
from tests.budget import others_nightly
from tests.differential.case import Case
from tests.differential.runs import both, stock_run
from tests.hf.plain import dataset, flexseq_trainer
from tests.hf.test_exactness import LENGTHS
from tests.hf.tiny import (
    SIZES,
    RandomPlanEngine,
    documents,
    errors,
    loadable,
    own_batches,
    reference_gradients,
    sharded,
    tiny_arguments,
    tiny_llama,
    whole_gradients,
)
from tests.hf.trainers import Run, assert_logged_alike, distance, weights_apart, weights_of, zero
from tests.operators import Noted
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes


small_llama = partial(tiny_llama, torch.float32)
LARGE = {"learning_rate": 0.1}


def assert_equal_to_plain(stock, ours):
    assert weights_apart(stock, ours) < 2e-6
    assert_logged_alike(stock, ours, ["loss"], rel=1e-5)
    assert_logged_alike(stock, ours, ["grad_norm"], rel=1e-4)


def plain_case(batch, **options):
    return Case(model=small_llama, settings=LARGE, batch=batch, **options)


def test_zero_equals_the_plain_trainer(tmp_path):
    replayed = LARGE | {"gradient_checkpointing": True}
    cases = {
        "zero2": plain_case(4, accumulation=2, stage=2),
        "zero3": replace(
            plain_case(6, accumulation=3, stage=3), settings=replayed, flexseq={"lookahead": 2}
        ),
    }
    for _, stock, by_rank in both(cases, tmp_path, seconds=150):
        for ours in by_rank:
            assert_equal_to_plain(stock, ours)


def fsdp2_run(
    rank, world_size, folder, config, accumulation, checkpointing, lookahead, cost_model
):
    """A run, steps of the optimizer, and policies under FSDP2, sharded by transformers at load."""
    model = LlamaForCausalLM.from_pretrained(
        folder / "model", distributed_config=DistributedConfig(**config), dtype=torch.float32
    )
    updates = []
    trainer = flexseq_trainer(
        folder,
        batch=1,
        accumulation=accumulation,
        model=model,
        callbacks=[CountedUpdates(updates)],
        train_dataset=dataset(16),
        optim="sgd",
        **LARGE,
        gradient_checkpointing=checkpointing,
        cost_model=cost_model,
        lookahead=lookahead,
    )
    trainer.train()
    policies = trainer.flexseq.planning.fsdp.taken
    run = Run(start={}, weights=weights_of(model), log=trainer.state.log_history)
    return run, len(updates), policies


class CountedUpdates(TrainerCallback):
    """Notes each step of the optimizer itself."""

    def __init__(self, updates):
        self.updates = updates

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        optimizer.optimizer.register_step_post_hook(lambda *_: self.updates.append(1))


FSDP2 = {"fsdp_size": 2}
HSDP = {"fsdp_size": 2, "dp_replicate_size": 2}
# By number of ranks: configuration, accumulation, checkpointing, steps that are planned ahead, and
# whether memory is scarce.
FSDP2_RUNS = {
    2: [(FSDP2, 3, False, 2, False), (FSDP2, 2, True, 0, True)],
    4: [(HSDP, 1, True, 0, False)],
}


@pytest.mark.parametrize("world_size", budget.others_nightly(FSDP2_RUNS, tried=[2]))
def test_fsdp2_equals_the_plain_trainer(tmp_path, world_size):
    tiny_llama(torch.float32).save_pretrained(tmp_path / "model")
    scarce = str(tmp_path / "cost.json")
    replace(PRESETS["llama-3.1-8b-h200"], budget_bytes=1.0).save(scarce)
    cases = [
        (tmp_path, *others, scarce if is_scarce else "estimate")
        for *others, is_scarce in FSDP2_RUNS[world_size]
    ]
    by_case = run_cases(fsdp2_run, world_size, cases, seconds=150)
    for (_, _, accumulation, *_, cost_model), results in zip(cases, by_case, strict=True):
        stock = stock_run(plain_case(world_size * accumulation), tmp_path)
        for ours, updates, policies in results:
            assert updates == budget.trainer_steps
            if cost_model == scarce:
                assert policies == {PLAIN}
            else:
                assert FsdpPolicy(reduces_each=False, regathers=False) in policies
            assert_equal_to_plain(stock, ours)


def losses_of_tied(rank, world_size, folder, vocabulary):
    """Losses of three steps of transformers alone, and whether hf_flexseq refuses the model."""
    config = DistributedConfig(fsdp_size=world_size) if world_size > 1 else None
    path = folder / str(vocabulary)
    model = LlamaForCausalLM.from_pretrained(path, distributed_config=config)
    refusal = None
    try:
        check_model(model)
    except NotImplementedError as error:
        refusal = str(error)
    ids = torch.arange(2, 40).unsqueeze(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, refusal


def test_tied_weights_that_the_ranks_do_not_divide_are_refused(tmp_path):
    """FSDP2 trains them otherwise than one process does, where transformers has sharded them."""
    for vocabulary in (61, 62):
        torch.manual_seed(0)
        sizes = {**SIZES, "vocab_size": vocabulary}
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
        model.save_pretrained(tmp_path / str(vocabulary))
    cases = [(tmp_path, vocabulary) for vocabulary in (61, 62)]
    divided, whole = run_cases(losses_of_tied, 2, cases)
    wanted, refusal = losses_of_tied(0, 1, tmp_path, 61)
    assert refusal is None
    for losses, refusal in divided:
        assert losses != pytest.approx(wanted, rel=1e-2), "torch is right now: allow this"
        assert "its tied weights model.embed_tokens.weight and lm_head.weight have 61" in refusal
    wanted, _ = losses_of_tied(0, 1, tmp_path, 62)
    for losses, refusal in whole:
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert refusal is None


def buffers_of_falcon(rank, world_size, folder):
    """Whether transformers gives them to a whole model and to a sharded one, and what hf_flexseq
    says of the latter."""
    whole, sharded = (
        FalconH1ForCausalLM.from_pretrained(folder, distributed_config=config)
        for config in (None, DistributedConfig(fsdp_size=world_size))
    )
    wanted = compute_mup_vector(whole.config)
    is_right = [
        torch.equal(model.model.layers[0].mamba.mup_vector, wanted) for model in (whole, sharded)
    ]
    with pytest.raises(NotImplementedError) as refused:
        check_model(sharded)
    check_model(whole)
    return is_right, str(refused.value)


def test_buffers_that_transformers_leaves_unwritten_are_refused(tmp_path):
    small_model(FalconH1ForCausalLM, {}).save_pretrained(tmp_path)
    for is_right, line in run_ranks(buffers_of_falcon, 2, tmp_path):
        assert is_right == [True, False], "transformers is right now: allow this"
        assert "leaves model.layers.0.mamba.mup_vector unwritten" in line


# ---- a loop of its own under ZeRO


OF_LOOP = [1 + (i * i * 7) % 60 for i in range(24)]


def accelerator_of(stage):
    """Of ZeRO on CPUs, or of DDP without a stage."""
    if stage is None:
        return Accelerator(cpu=True)
    plugin = DeepSpeedPlugin(hf_ds_config=zero(stage) | {"train_micro_batch_size_per_gpu": 1})
    PartialState(cpu=True)  # accelerate looks for GPUs otherwise
    return Accelerator(deepspeed_plugin=plugin)


def loop(rank, world_size, stage, accumulation):
    """Weights before and after some steps, and the held-out loss."""
    model = tiny_llama(torch.float32)
    start = weights_of(model)
    with pytest.MonkeyPatch.context() as patch:
        if stage is not None:
            patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        accelerator = accelerator_of(stage)
        assert (accelerator.distributed_type == DistributedType.DEEPSPEED) == (stage is not None)
        engine = FlexSeqEngine(accelerator, tiny_arguments())
        engine.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        micro_batches = 0
        for number in range(2):
            batches = own_batches(documents(OF_LOOP, seed=number), rank, world_size)
            for step in engine.steps(batches, accumulation, first_number=number):
                step.backward(model)
                optimizer.step()
                optimizer.zero_grad()
                micro_batches = max(micro_batches, len(step.plan.micro_batches))
        evaluation = engine.evaluation(own_batches(documents([5, 9, 30, 40]), rank, world_size))
        for step in evaluation:
            step.forward(model)
        held_out = evaluation.mean_loss()
        engine.detach()
    assert micro_batches > 1
    return start, weights_of(accelerator.unwrap_model(model)), held_out


@pytest.mark.parametrize("stage", others_nightly([1, 2, 3], tried=[3]))
@pytest.mark.parametrize("accumulation", others_nightly([1, 2], tried=[2]))
def test_a_loop_trains_as_under_ddp(stage, accumulation):
    start, wanted, loss = run_ranks(loop, 2, None, accumulation)[0]
    update = distance(start, wanted)
    for _, found, held_out in run_ranks(loop, 2, stage, accumulation, seconds=60):
        assert distance(wanted, found) < 2e-6 * update
        assert held_out == pytest.approx(loss, rel=1e-6)


def adapted_loop(rank, world_size, folder):
    """An adapter's matrices before and after two steps, on a model that transformers has sharded:
    every rank has them whole, and draws others."""
    model = loaded(folder, fsdp_size=world_size) if world_size > 1 else tiny_llama()
    torch.manual_seed(rank)
    config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(model, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    engine.attach(model)
    start = [parameter.detach().numpy().copy() for parameter in trained]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for number in range(2):
        batches = own_batches(documents(OF_LOOP, seed=number), rank, world_size)
        for step in engine.steps(batches, 2, first_number=number):
            step.backward(model)
            optimizer.step()
            optimizer.zero_grad()
    engine.detach()
    return start, [parameter.detach().numpy() for parameter in trained]


def test_a_loop_trains_adapters_on_sharded_weights_as_one_process_does(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    by_rank = run_ranks(adapted_loop, 2, tmp_path)
    start, wanted = adapted_loop(0, 1, tmp_path)
    for first, found in by_rank:
        for here, there, weight, former in zip(first, found, wanted, start, strict=True):
            assert (here == former).all()
            assert abs(there - weight).max() < 1e-7 * abs(weight - former).max()


# ---- policies of FSDP2 and HSDP


POLICIES = {
    "plain": PLAIN,
    "keeps parameters": FsdpPolicy(regathers=False),
    "reduces once": FsdpPolicy(reduces_each=False),
    "both": FsdpPolicy(reduces_each=False, regathers=False),
}
# Units of the tiny model: by transformers' plan embedding, two layers, norm and head; by our own
# hand two layers and the rest.
UNITS = {"transformers": 4, "by hand": 3}

REPLICATED = {"fsdp_size": 2, "dp_replicate_size": 2}

GATHER = "_allgather_base_.default"
SCATTER = "_reduce_scatter_base_.default"
ALL_REDUCE = "allreduce_.default"


def collective(operator, args, result):
    return operator.__name__ if operator.namespace == "c10d" else None


def loaded(folder, **config):
    """The model that `tiny_llama` has saved, sharded at load."""
    model = loadable(LlamaForCausalLM).from_pretrained(
        folder, dtype=torch.float64, distributed_config=DistributedConfig(**config)
    )
    return model.train()


def figures_for(policy):
    """Figures by which exactly `policy` is the best that fits, whatever the plan."""
    return FsdpFigures(
        free_bytes=1e9 if policy != PLAIN else -1.0,
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
        with Noted(collective) as collectives:
            for step in engine.steps(own_batches(examples, rank, world_size), 2):
                loss = step.backward(model)
                micro_batches = len(step.plan.micro_batches)
        assert each_batch or fsdp.taken == {policy}
        # between steps all is as FSDP2 left it after its first step
        settings = settings or unit_settings(model)
        assert unit_settings(model) == settings
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())

        counts = Counter(collectives.found)
        # the unit of norm and head stays gathered from forward to backward
        gathers = (2 * units - 1) * micro_batches if policy.regathers else units
        assert counts[GATHER] == gathers, name
        assert counts[SCATTER] == units * (micro_batches if policy.reduces_each else 1), name
        over_replicas = (micro_batches if each_batch else 1) if config == REPLICATED else 0
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
    cases = [(tmp_path, REPLICATED, order, False), (tmp_path, REPLICATED, ["plain"], True)]
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
    (REPLICATED, 2, 8),
    (REPLICATED | {"fsdp_mixed_precision": True}, 2, 2),
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
