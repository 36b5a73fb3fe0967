"""The Trainer on two stages of two ranks with `fsdp=True` against the plain Trainer in one
process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_flexseq import FlexSeqArguments, FlexSeqCallback
from hf_flexseq.cost.presets import load_cost_model
from hf_flexseq.hf.pipeline.fsdp import take_over_fsdp
from hf_flexseq.pipeline.cost import room_bytes
from hf_flexseq.pipeline.sharding import whole
from hf_flexseq.pipeline.stages import cut
from tests.hf.test_trainer import (
    dataset,
    logged,
    plain_run,
    training_arguments,
    update_error,
)
from tests.hf.tiny import tiny_llama
from tests.pipeline.test_trainer import LAYERS, joined, make_trainer, model_of, plain_weights
from tests.ranks import run_ranks

FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}


def weights_of(trainer):
    parameters = trainer.flexseq.executor.stage.global_parameters()
    return {name: whole(p.detach()).numpy() for name, p in parameters}


def fsdp_run(rank, world_size, folder, tied, options, seed=0, resume=None):
    model = tiny_llama(seed=seed, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    trainer = make_trainer(model, folder, 2, batch=1, **FSDP, **options)
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    trainer.train(resume_from_checkpoint=resume)
    return weights_of(trainer), trainer.state.log_history, trainer.evaluate()["eval_loss"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("tied", "optim", "plans"),
    [
        (True, "adamw_torch", "random"),
        pytest.param(False, "sgd", "own", marks=pytest.mark.nightly),
    ],
)
def test_ten_steps_equal_the_plain_trainer(tmp_path, tied, optim, plans):
    before, wanted, history = plain_weights(tmp_path, 8, tied, optim=optim)
    results = run_ranks(fsdp_run, 4, tmp_path, tied, {"optim": optim, "plans": plans}, seconds=150)
    assert update_error(before, wanted, joined(results)) < 1e-8
    for _, log, evaluated in results:
        assert evaluated == results[0][2]
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-6)
        assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-8)
    assert max(logged(history, "grad_norm")) > 0.5, "nothing was clipped"


TOGETHER = (
    {"planner": "static", "sp_degree": 2, "max_tokens_per_rank": 20},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
)


def two_steps(rank, world_size, folder):
    return [
        fsdp_run(rank, world_size, folder, True, {"plans": "own", "max_steps": 2, **o})
        for o in TOGETHER
    ]


@pytest.mark.processes
def test_it_goes_with_shared_chunks_and_with_checkpointing(tmp_path):
    before, wanted, _ = plain_weights(tmp_path, 8, True, max_steps=2)
    results = run_ranks(two_steps, 4, tmp_path)
    for of_ranks, used in zip(zip(*results, strict=True), TOGETHER, strict=True):
        assert update_error(before, wanted, joined(of_ranks)) < 1e-8, used


# ---- checkpoints


SAVES = {
    "optim": "adamw_torch",
    "max_steps": 5,
    "weight_decay": 0.1,
    "save_strategy": "steps",
    "save_steps": 3,
}


def resumed_run(rank, world_size, folder, stages, options):
    """From other weights than the checkpoint's, on so many stages, without FSDP unless the options
    ask for it."""
    model = tiny_llama(seed=99, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    trainer = make_trainer(model, folder, stages, batch=4 // world_size, **SAVES, **options)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    if stages > 1:
        return (weights_of(trainer),)
    return ({name: p.detach().numpy() for name, p in model.named_parameters()},)


def saved_run(rank, world_size, folder, stages, options):
    trainer = make_trainer(
        model_of(True), folder, stages, batch=4 // world_size, **SAVES, **options
    )
    trainer.train()
    if stages > 1:
        return (weights_of(trainer),)
    return ({name: p.detach().numpy() for name, p in trainer.model.named_parameters()},)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "stages", "options", "then"),
    [(4, 2, FSDP, [(4, 2, FSDP), (2, 2, {})]), (1, 1, {}, [(4, 2, FSDP)])],
)
def test_resumed_with_and_without_fsdp_it_goes_on_as_before(
    tmp_path, ranks, stages, options, then
):
    before = {n: p.detach() for n, p in model_of(True).named_parameters()}
    first = joined(run_ranks(saved_run, ranks, tmp_path, stages, options))
    wanted = {n: torch.as_tensor(p) for n, p in first.items()}
    for case in then:
        ranks, stages, options = case
        found = joined(run_ranks(resumed_run, ranks, tmp_path, stages, options))
        assert update_error(before, wanted, found) < 1e-8, case


def last_weights(rank, world_size, folder):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    weights, *_ = fsdp_run(rank, world_size, folder, True, options)
    return (weights,)


@pytest.mark.processes
def test_a_checkpoint_is_an_ordinary_one(tmp_path):
    weights = joined(run_ranks(last_weights, 4, tmp_path))
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint-2", output_loading_info=True, dtype=torch.float64
    )
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, parameter in loaded.named_parameters():
        assert (weights[name] == parameter.detach().numpy()).all(), name


# ---- what accelerate has set up, and what is refused


def after_accelerate(rank, world_size, folder):
    """A stock Trainer as it is on GPUs, where accelerate has taken charge of FSDP before the
    callback is added."""
    args = training_arguments(
        TrainingArguments, folder, batch=1, accumulation=2, max_steps=2, optim="sgd", **FSDP
    )
    model = model_of(True)
    trainer = Trainer(model=model, args=args, train_dataset=dataset())
    state = trainer.accelerator.state
    state.distributed_type, state.fsdp_plugin = (
        DistributedType.FSDP,
        FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    trainer.is_fsdp_enabled = True
    options = FlexSeqArguments(pipeline_parallel_size=2, cost_model="estimate", lookahead=0)
    trainer.add_callback(FlexSeqCallback(trainer, options))
    trainer.train()
    return (weights_of(trainer),)


@pytest.mark.processes
def test_fsdp_is_taken_over_from_accelerate(tmp_path):
    before, wanted, _ = plain_weights(tmp_path, 8, True, max_steps=2)
    found = joined(run_ranks(after_accelerate, 4, tmp_path))
    assert update_error(before, wanted, found) < 1e-8


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("fsdp_version", 1, "fsdp_version=1 .*set version=2"),
        ("cpu_offload", CPUOffloadPolicy(), "cpu_offload of FSDP"),
        (
            "activation_checkpointing",
            True,
            "activation_checkpointing of FSDP .*set it in the training arguments",
        ),
        (
            "cpu_ram_efficient_loading",
            True,
            "cpu_ram_efficient_loading of FSDP .*it leaves stages without values",
        ),
        ("ignored_modules", "lm_head", "ignored_modules of FSDP"),
        (
            "mixed_precision_policy",
            MixedPrecisionPolicy(param_dtype=torch.float16),
            "param_dtype=torch.float16 of FSDP beside a mixed precision in torch.bfloat16 .*leave",
        ),
    ],
)
def test_what_stages_cannot_follow_is_refused(setting, value, message):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    setattr(plugin, setting, value)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16"
    )
    with pytest.raises(NotImplementedError, match=message):
        take_over_fsdp(SimpleNamespace(accelerator=accelerator, args=None))


def alone_on_its_stage(rank, world_size, folder):
    trainer = make_trainer(model_of(True), folder, 2, max_steps=2, **FSDP)
    assert trainer.flexseq.executor.sharded is None
    trainer.train()
    return (weights_of(trainer),)


@pytest.mark.processes
def test_a_rank_alone_on_its_stage_shares_nothing(tmp_path):
    before, wanted, _ = plain_weights(tmp_path, 8, True, max_steps=2)
    assert update_error(before, wanted, joined(run_ranks(alone_on_its_stage, 2, tmp_path))) < 1e-8


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("mixed", "whole_bytes"), [(False, 8), (True, 6)])
def test_room_counts_what_is_whole_during_a_step(ranks, mixed, whole_bytes):
    """Of 16 bytes a parameter, 8 are whole and 12 shared; weights are counted in both, the whole
    ones as 2 bytes in mixed precision."""
    stage = cut(model_of(False), 0, 2)
    cost = replace(load_cost_model("flexsp-gpt-7b-a100"), budget_bytes=1e15)
    state = cost.budget_bytes - room_bytes(cost, stage)[0]
    memory_limit = room_bytes(cost, stage, sharded_over=ranks, mixed=mixed)[0]
    assert cost.budget_bytes - memory_limit == pytest.approx(
        state * (whole_bytes + 12 / ranks) / 16, abs=2
    )


def test_room_counts_the_copies_of_cast_weights_of_layers():
    stage = cut(model_of(False), 0, 2)
    cost = replace(load_cost_model("flexsp-gpt-7b-a100"), budget_bytes=1e15)
    sizes = stage.sizes
    state = cost.state_bytes + cost.sharded_state_bytes
    state_of_weight = state / (sum(sizes.layers) + 2 * sizes.head)
    pairs = zip(room_bytes(cost, stage), room_bytes(cost, stage, mixed=True), strict=True)
    for (start, stop), (plain, mixed) in zip(stage.spans, pairs, strict=True):
        copies = state_of_weight * 2 / 16 * sum(sizes.layers[start:stop])
        assert plain - mixed == pytest.approx(copies, abs=2)


# ---- mixed precision


def bfloat16_run(rank, world_size, folder):
    """Weights afterwards, the dtypes of parameters outside and inside of a step, and the bytes of
    a token's hidden states as they are priced."""
    model = tiny_llama(torch.float32, num_hidden_layers=LAYERS)
    trainer = make_trainer(model, folder, 2, batch=1, bf16=True, **FSDP)
    dtypes = {p.dtype for p in trainer.model.parameters()}
    with trainer.flexseq.executor.sharded.whole():
        whole_dtypes = {p.dtype for p in trainer.model.parameters()}
    trainer.train()
    costs = trainer.flexseq.executor._stage_costs()
    trainer.evaluate()
    # inputs of checkpointed layers: hidden states alone
    input_bytes = [stage.input_bytes / stage.layers for stage in costs.stages]
    return weights_of(trainer), dtypes, whole_dtypes, input_bytes


@pytest.mark.nightly
@pytest.mark.processes
def test_in_bfloat16_it_is_as_close_to_float32_as_the_plain_trainer_in_bfloat16(tmp_path):
    def plain(**options):
        model = tiny_llama(torch.float32, num_hidden_layers=LAYERS)
        return plain_run(tmp_path, batch=8, model=model, **options)

    before, wanted, _ = plain()
    allowed = update_error(before, wanted, plain(bf16=True)[1])
    results = run_ranks(bfloat16_run, 4, tmp_path, seconds=150)
    for _, dtypes, whole_dtypes, input_bytes in results:
        assert (dtypes, whole_dtypes) == ({torch.float32}, {torch.bfloat16})
        assert input_bytes == [2 * 32, 2 * 32]
    # not 1: hidden states between layers are in 16 bits, too
    assert update_error(before, wanted, joined(results)) < 2 * allowed
