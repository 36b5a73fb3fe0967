"""The Trainer on pipelines of 2 to 4 ranks against the plain Trainer in one process."""

import json
import random
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.base.reading import Limits
from hf_flexseq.cli import main
from hf_flexseq.cost.pipeline_check import check
from hf_flexseq.cost.stages import PipelineCost
from hf_flexseq.cost.walk import makespan_ns
from hf_flexseq.hf.pipeline import executor as executor_module
from hf_flexseq.hf.pipeline.executor import StageExecutor
from hf_flexseq.hf.trainer import OVERRIDDEN, FlexSeqMixin
from hf_flexseq.plan.files import read_steps
from hf_flexseq.plan.replicas import StepPlan
from hf_flexseq.planner.process.client import InlinePlanner
from tests.hf.test_trainer import (
    dataset,
    float64_loss,
    logged,
    plain_run,
    training_arguments,
    update_error,
)
from tests.hf.tiny import VOCAB, tiny_llama
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_stages import model_of as model_of_kind
from tests.ranks import run_ranks

LAYERS = 3


class RandomJob:
    """Any legal plan, another one each step; the same ones however often a run is repeated."""

    def __init__(self, stages, replicas):
        self.stages, self.replicas = stages, replicas

    def plan(self, lengths):
        rng = random.Random(len(lengths) + sum(lengths))
        members = tuple(tuple(range(r, len(lengths), self.replicas)) for r in range(self.replicas))
        plans = tuple(
            random_pipeline_plan(
                [lengths[i] for i in ids],
                self.stages,
                rng,
                split_weights=True,
                checkpointing=True,
                layers=LAYERS,
            )
            for ids in members
        )
        return StepPlan(lengths=tuple(lengths), members=members, plans=plans)


def random_planner(executor, *, ahead):
    return InlinePlanner(RandomJob(executor.stage.count, executor.replicas))


def make_trainer(model, folder, stages, *, batch=2, plans="random", **options):
    """A planner in a process of its own takes a second to start, so only those who ask have
    one."""
    args = training_arguments(
        FlexSeqConfig,
        folder,
        batch=batch,
        accumulation=2,
        pipeline_parallel_size=stages,
        cost_model="estimate",
        **{"optim": "sgd", "lookahead": 2 if plans == "random" else 0, **options},
    )
    trainer = FlexSeqTrainer(
        model=model, args=args, train_dataset=dataset(), eval_dataset=dataset(11)
    )
    if stages > 1 and plans == "random":
        executor = trainer.flexseq.executor
        executor.planner = random_planner.__get__(executor)
    return trainer


def model_of(tied):
    return tiny_llama(num_hidden_layers=LAYERS, tie_word_embeddings=tied)


def pipeline_run(rank, world_size, folder, stages, tied, options):
    trainer = make_trainer(model_of(tied), folder, stages, **options)
    assert isinstance(trainer.flexseq.executor, StageExecutor)
    trainer.train()
    parameters = trainer.flexseq.executor.stage.global_parameters()
    return (
        {name: p.detach().numpy() for name, p in parameters},
        trainer.state.log_history,
        trainer.evaluate(),
    )


def plain_weights(folder, sequences, tied, **options):
    """Of the plain Trainer with so many sequences per step."""
    return plain_run(
        folder,
        batch=sequences,
        loss=float64_loss,
        model=model_of(tied),
        **{"optim": "sgd", **options},
    )


def joined(results):
    """All stages' parameters; copies of one, on replicas or of a tied tensor, must be equal to the
    bit."""
    weights = {}
    for found, *_ in results:
        for name, value in found.items():
            assert name not in weights or (weights[name] == value).all(), (
                f"copies of {name} differ"
            )
            weights[name] = value
    return weights


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "stages", "tied", "optim"),
    [
        (2, 2, True, "sgd"),
        (3, 3, False, "adamw_torch"),
        (4, 4, True, "adamw_torch"),
        (4, 2, True, "sgd"),
    ],
)
def test_steps_equal_the_plain_trainer(tmp_path, world_size, stages, tied, optim):
    batch = 2 if world_size == 2 else 1
    common = {"optim": optim, "max_steps": 10 if world_size == 2 else 5}
    before, wanted, history = plain_weights(tmp_path, 2 * batch * world_size, tied, **common)
    options = {"batch": batch, **common}
    results = run_ranks(pipeline_run, world_size, tmp_path, stages, tied, options, seconds=150)
    found = joined(results)
    assert update_error(before, wanted, found) < 1e-8
    for _, log, _ in results:
        assert logged(log, "loss") == pytest.approx(logged(history, "loss"), rel=1e-6)
        assert logged(log, "grad_norm") == pytest.approx(logged(history, "grad_norm"), rel=1e-8)
    assert max(logged(history, "grad_norm")) > 0.5, "nothing was clipped"


SCHEDULES = (
    {"pipeline_schedule": "auto", "lookahead": 2},
    {
        "pipeline_schedule": "auto",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    {"pipeline_schedule": "1f1b"},
    {"pipeline_schedule": "seq1f1b", "max_tokens_per_rank": 20},
    {"pipeline_schedule": "infinipipe", "max_tokens_per_rank": 40},
)
SHARED = {"planner": "static", "sp_degree": 2, "max_tokens_per_rank": 20, "batch": 1}


def schedule_runs(rank, world_size, folder, options):
    """All of these, one after the other."""
    return [
        pipeline_run(rank, world_size, folder, 2, True, {"plans": "own", "max_steps": 2, **o})
        for o in options
    ]


@pytest.mark.processes
@pytest.mark.parametrize(("world_size", "options"), [(2, SCHEDULES), (4, (SHARED,))])
def test_every_schedule_equals_the_plain_trainer(tmp_path, world_size, options):
    before, wanted, _ = plain_weights(tmp_path, 8, True, max_steps=2)
    results = run_ranks(schedule_runs, world_size, tmp_path, options, seconds=150)
    for of_ranks, used in zip(zip(*results, strict=True), options, strict=True):
        assert update_error(before, wanted, joined(of_ranks)) < 1e-8, used


@pytest.mark.processes
def test_stock_float32_loss_differs_by_its_rounding_only(tmp_path):
    before, wanted, _ = plain_run(tmp_path, batch=4, model=model_of(True), optim="sgd")
    found = joined(run_ranks(pipeline_run, 2, tmp_path, 2, True, {"batch": 1}, seconds=150))
    assert update_error(before, wanted, found) < 2e-6


@pytest.mark.processes
def test_evaluation_is_the_mean_over_target_tokens(tmp_path):
    model = model_of(tied=True)
    args = training_arguments(
        FlexSeqConfig, tmp_path, batch=1, accumulation=1, cost_model="estimate"
    )
    wanted = FlexSeqTrainer(model=model, args=args, eval_dataset=dataset(11)).evaluate()[
        "eval_loss"
    ]
    for world_size in (2, 4):
        for found in run_ranks(evaluated, world_size, tmp_path):
            assert found == pytest.approx(wanted, rel=1e-9)


def losses_called_while_attaching(rank, world_size, folder):
    """How often, and whether it left a gradient."""
    trainer = make_trainer(model_of(True), folder, 2)
    called = mock.Mock(side_effect=executor_module.chunked_cross_entropy_sum)
    with mock.patch.object(executor_module, "chunked_cross_entropy_sum", called):
        trainer.flexseq.attach(trainer.model)
    trainer.flexseq.detach()
    return called.call_count, any(p.grad is not None for p in trainer.model.parameters())


@pytest.mark.processes
def test_the_last_stage_calls_its_loss_once_before_a_step_waits_for_it(tmp_path):
    found = run_ranks(losses_called_while_attaching, 2, tmp_path)
    assert found == [(0, False), (1, False)]


def best_run(rank, world_size, folder):
    """Trained with a rate at which it gets worse, so that the best model is the first."""
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 3,
    }
    trainer = make_trainer(
        model_of(True), folder, 2, learning_rate=50.0, load_best_model_at_end=True, **options
    )
    trainer.train()
    losses = logged(trainer.state.log_history, "eval_loss")
    return losses, trainer.evaluate()["eval_loss"], trainer.state.best_model_checkpoint


@pytest.mark.processes
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    for losses, again, folder in run_ranks(best_run, 2, tmp_path):
        assert min(losses) < max(losses)
        assert again == pytest.approx(min(losses), rel=1e-9)
        assert folder.endswith(f"checkpoint-{1 + losses.index(min(losses))}")


def traced_run(rank, world_size, folder):
    path = folder / "plans.jsonl"
    make_trainer(model_of(True), folder, 2, plans="own", max_steps=2, plan_trace=str(path)).train()


@pytest.mark.processes
def test_the_trace_is_what_flexseq_view_reads(tmp_path, capsys):
    run_ranks(traced_run, 4, tmp_path)
    path = str(tmp_path / "plans.jsonl")
    steps = read_steps(path, Limits()).steps
    assert [step.number for step in steps] == [0, 0, 1, 1]  # a line for each replica
    for step in steps:
        check(step.plan)
        cost = PipelineCost.from_record(step.cost)
        assert makespan_ns(step.plan, cost) == pytest.approx(1e9 * step.plan.objective_s)
        assert len(step.measured_s) == 1
    assert main(["view", path]) == 0
    assert "chunks through 2 stages by auto" in capsys.readouterr().out


def evaluated(rank, world_size, folder):
    """The last step has fewer sequences than there are replicas."""
    trainer = make_trainer(model_of(True), folder, 2, plans="own", per_device_eval_batch_size=1)
    return trainer.evaluate()["eval_loss"]


# ---- checkpoints


def loaded_runs(rank, world_size, folder):
    """Weights after two steps of a model that is loaded stage by stage, and of the same one, cut
    in place."""
    loaded = make_trainer(str(folder), folder, 2, max_steps=2)
    assert len(list(loaded.model.parameters())) < 2 + 9 * LAYERS
    whole = make_trainer(AutoModelForCausalLM.from_pretrained(folder), folder, 2, max_steps=2)
    return [trained_weights(trainer) for trainer in (loaded, whole)]


def trained_weights(trainer):
    trainer.train()
    return {
        name: p.detach().numpy() for name, p in trainer.flexseq.executor.stage.global_parameters()
    }


@pytest.mark.processes
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_loaded_stage_by_stage(tmp_path, tied):
    """Its norms are transformers' own, in float32."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
    }
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    )
    model = LlamaForCausalLM(config).double()
    model.save_pretrained(tmp_path)
    results = run_ranks(loaded_runs, 2, tmp_path)
    found, wanted = (joined([of_rank[i : i + 1] for of_rank in results]) for i in (0, 1))
    assert wanted.keys() == found.keys()
    assert all((wanted[name] == found[name]).all() for name in wanted)
    assert any((wanted[name] != p.detach().numpy()).any() for name, p in model.named_parameters())


def saved_run(rank, world_size, folder, stages, tied, options, resume=None):
    """A run that saves every three steps, or goes on from a checkpoint of one."""
    if resume is not None:
        torch.manual_seed(99)
        # other weights: they are read
        model = tiny_llama(seed=99, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    else:
        model = model_of(tied)
    trainer = make_trainer(model, folder, stages, save_strategy="steps", save_steps=3, **options)
    trainer.train(resume_from_checkpoint=resume)
    parameters = (
        trainer.flexseq.executor.stage.global_parameters()
        if stages > 1
        else model.named_parameters()
    )
    return {name: p.detach().numpy() for name, p in parameters}, trainer.state


@pytest.mark.processes
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_an_ordinary_one(tmp_path, tied):
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.safetensors").write_text("left by an earlier run")
    results = run_ranks(
        saved_run, 2, tmp_path, 2, tied, {"optim": "adamw_torch", "max_steps": 3, "batch": 1}
    )
    weights = joined(results)
    folder = tmp_path / "checkpoint-3"
    assert sorted(p.name for p in folder.glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    loaded, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float64
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config._attn_implementation == "sdpa"
    for name, parameter in loaded.named_parameters():
        assert (weights[name] == parameter.detach().numpy()).all(), name


@pytest.mark.processes
@pytest.mark.parametrize(("stages", "then"), [(2, [(4, 2), (1, 1)]), (1, [(2, 2)])])
def test_resumed_on_any_number_of_stages_it_goes_on_as_before(tmp_path, stages, then):
    """then: on so many ranks, in so many stages. The sequences per step stay the same: two ranks
    draw twice as many each as four."""
    options = {"optim": "adamw_torch", "max_steps": 5, "weight_decay": 0.1}
    before = {n: p.detach() for n, p in model_of(True).named_parameters()}
    first = joined(
        run_ranks(saved_run, stages, tmp_path, stages, True, options | {"batch": 4 // stages})
    )
    wanted = {n: torch.as_tensor(p) for n, p in first.items()}
    for ranks, then_stages in then:
        resumed = options | {"batch": 4 // ranks}
        found = run_ranks(
            saved_run, ranks, tmp_path, then_stages, True, resumed, f"{tmp_path}/checkpoint-3"
        )
        assert update_error(before, wanted, joined(found)) < 1e-8, (ranks, then_stages)


@pytest.mark.processes
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    model_of(True).save_pretrained(tmp_path / "checkpoint-3")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    (tmp_path / "checkpoint-3" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        AssertionError,
        match=r"ValueError: .* has no model.embed_tokens.weight, "
        r"model.layers.\d",
    ):
        run_ranks(saved_run, 2, tmp_path, 2, True, {}, f"{tmp_path}/checkpoint-3")


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_is_overridden_is_there(name):
    assert callable(getattr(Trainer, name))


def test_all_that_is_overridden_is_listed():
    own = [name for cls in FlexSeqMixin.__mro__[:-1] for name in vars(cls)]  # without `object`
    ours = {name for name in own if hasattr(Trainer, name) and not name.startswith("__")}
    assert ours == set(OVERRIDDEN)


# ---- other arithmetic and other models


OTHERS = (
    ("qwen3", {}, 1e-5),
    ("gemma", {}, 1e-5),
    ("qwen2", {"bf16": True}, 5e-3),
)


def other_runs(rank, world_size, folder):
    """The logged losses of all of them, with the same sequences on one rank as on two."""
    return [
        logged(other_log(kind, folder, world_size, options), "loss") for kind, options, _ in OTHERS
    ]


def other_log(kind, folder, world_size, options):
    torch.manual_seed(0)
    options = {"batch": 2 // world_size, "learning_rate": 0.1, "max_steps": 2, **options}
    trainer = make_trainer(model_of_kind(kind), folder, world_size, plans="own", **options)
    trainer.train()
    return trainer.state.log_history


@pytest.mark.processes
def test_other_models_and_bfloat16_train_as_without_a_pipeline(tmp_path):
    """In float32, and under autocast: two stages of one rank each against one rank."""
    (wanted,) = run_ranks(other_runs, 1, tmp_path)
    for found in run_ranks(other_runs, 2, tmp_path):
        for (kind, _, tolerance), losses, those in zip(OTHERS, found, wanted, strict=True):
            assert losses == pytest.approx(those, rel=tolerance), kind
