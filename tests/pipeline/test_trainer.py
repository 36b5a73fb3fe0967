"""The Trainer on pipelines of 2 to 4 ranks, with `fsdp=True` and with several stages per rank too,
against the plain Trainer in one process. Checkpoints are in `test_checkpoints.py`."""

import random
from functools import partial

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from hf_flexseq import FlexSeqArguments, FlexSeqCallback, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.base.reading import Limits
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.cli import main
from hf_flexseq.hf.model.loss_kinds import METHODS_OF_LOSS
from hf_flexseq.hf.trainer.overrides import OF_SHARDED_CHECKPOINTS
from hf_flexseq.hf.trainer.trainer import FlexSeqMixin
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.pipeline.planning.step_plan import StepPlan
from hf_flexseq.pipeline.planning.walk import check, makespan_ns
from hf_flexseq.pipeline.trainer.checks import REPLACED
from hf_flexseq.pipeline.trainer.engine import PipelineEngine
from hf_flexseq.pipeline.trainer.mixin import PipelineMixin
from hf_flexseq.plan.files import read_steps
from hf_flexseq.planner.process.client import InlinePlanner
from tests.budget import others_nightly
from tests.differential.case import Case
from tests.differential.runs import stock_run
from tests.hf.plain import dataset, float64_loss, logged, training_arguments
from tests.hf.test_reentrant_checkpointing import without_reentrant
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import update_error
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_stages import model_of as model_of_kind
from tests.ranks import run_cases, run_ranks

LAYERS = 3
FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}
TWO_PER_RANK = {"pipeline_schedule": "seq1f1b-i"}


class RandomJob:
    """Any legal plan, another one each step; the same ones however often a run is repeated."""

    def __init__(self, ranks, replicas, virtual):
        self.ranks, self.replicas, self.virtual = ranks, replicas, virtual

    def plan(self, lengths, units=(), later_pairs=None):
        rng = random.Random(len(lengths) + sum(lengths))
        members = tuple(tuple(range(r, len(lengths), self.replicas)) for r in range(self.replicas))
        options = {"split_weights": True, "checkpointing": True, "layers": LAYERS}
        options["virtual"] = self.virtual
        plans = tuple(
            random_pipeline_plan([lengths[i] for i in ids], self.ranks, rng, **options)
            for ids in members
        )
        return StepPlan(lengths=tuple(lengths), members=members, plans=plans)


def random_planner(engine, *, ahead):
    stage = engine.stage
    return InlinePlanner(RandomJob(stage.count, engine.replicas, len(stage.virtual)))


def make_trainer(model, folder, stages, *, batch=2, plans="random", **options):
    """A planner in a process of its own takes a second to start, so only those who ask have
    one."""
    defaults = {
        "pipeline_parallel_size": stages,
        "cost_model": "estimate",
        "optim": "sgd",
        "lookahead": 2 if plans == "random" else 0,
        # the last step of an evaluation has fewer sequences than there are replicas
        "per_device_eval_batch_size": 1,
    }
    args = training_arguments(
        FlexSeqConfig, folder, batch=batch, accumulation=2, **{**defaults, **options}
    )
    trainer = FlexSeqTrainer(
        model=model, args=args, train_dataset=dataset(), eval_dataset=dataset(11)
    )
    if stages > 1 and plans == "random":
        engine = trainer.flexseq
        engine.planner = random_planner.__get__(engine)
    return trainer


def model_of(tied, **options):
    return tiny_llama(tie_word_embeddings=tied, **{"num_hidden_layers": LAYERS, **options})


def weights_of(trainer):
    """All of this rank's parameters, by the names of the whole model."""
    engine = trainer.flexseq
    parameters = trainer.model.named_parameters()
    if isinstance(engine, PipelineEngine):
        parameters = engine.stage.global_parameters()
    return {name: whole(p.detach()).numpy() for name, p in parameters}


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


def pipeline_run(rank, world_size, folder, stages, tied, options, evaluates=True):
    trainer = make_trainer(model_of(tied), folder, stages, **options)
    engine = trainer.flexseq
    assert isinstance(engine, PipelineEngine)
    assert len(engine.stage.virtual) == 1 + (options.get("pipeline_schedule") == "seq1f1b-i")
    is_sharded = options.get("fsdp", False) and world_size > stages  # not alone on its stage
    assert all(isinstance(p, DTensor) == is_sharded for p in trainer.model.parameters())
    with without_reentrant():
        trainer.train()
    evaluated = trainer.evaluate()["eval_loss"] if evaluates else None
    return weights_of(trainer), trainer.state.log_history, evaluated


def saved_run(rank, world_size, folder, stages, tied, options, resume=None, make=model_of):
    """A run that saves after its first step, or goes on from a checkpoint of one."""
    seed = 0
    if resume is not None:
        seed = 99  # other weights: they are read
        torch.manual_seed(seed)
    model = make(tied, seed=seed)
    trainer = make_trainer(model, folder, stages, save_strategy="steps", save_steps=1, **options)
    trainer.train(resume_from_checkpoint=resume)
    return weights_of(trainer), trainer.state


def plain_run(folder, sequences, tied, **options):
    """Of the plain Trainer with so many sequences per step."""
    settings = {"train_dataset": dataset(), **options}
    case = Case(
        model=partial(model_of, tied),
        settings=settings,
        batch=sequences,
        stock_loss=float64_loss,
    )
    return stock_run(case, folder)


def evaluated_alone(folder, tied, weights):
    """The loss of evaluation without a pipeline."""
    model = model_of(tied)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.as_tensor(weights[name]))
    options = {"cost_model": "estimate", "lookahead": 0}
    args = training_arguments(FlexSeqConfig, folder, batch=1, accumulation=1, **options)
    trainer = FlexSeqTrainer(model=model, args=args, eval_dataset=dataset(11))
    return trainer.evaluate()["eval_loss"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "stages", "tied", "options"),
    [
        (2, 2, True, {"batch": 2, "max_steps": 3}),
        (3, 3, False, {"optim": "adamw_torch"}),
        pytest.param(4, 4, True, {"optim": "adamw_torch"}, marks=pytest.mark.nightly),
        (4, 2, True, {}),
        (4, 2, True, {"optim": "adamw_torch", **FSDP}),
        pytest.param(4, 2, False, {**FSDP, "plans": "own"}, marks=pytest.mark.nightly),
        (2, 2, True, {"batch": 2, **TWO_PER_RANK}),
        pytest.param(
            4, 2, True, {**FSDP, **TWO_PER_RANK, "lookahead": 2}, marks=pytest.mark.nightly
        ),
    ],
)
def test_steps_equal_the_plain_trainer(tmp_path, world_size, stages, tied, options):
    options = {"batch": 1, "optim": "sgd", "max_steps": 2, **options}
    common = {key: options[key] for key in ("optim", "max_steps")}
    sequences = 2 * options["batch"] * world_size
    plain = plain_run(tmp_path, sequences, tied, **common)
    results = run_ranks(pipeline_run, world_size, tmp_path, stages, tied, options, seconds=150)
    found = joined(results)
    assert update_error(plain.start, plain.weights, found) < 1e-8
    wanted_evaluation = evaluated_alone(tmp_path, tied, found)
    for _, log, evaluated in results:
        assert logged(log, "loss") == pytest.approx(logged(plain.log, "loss"), rel=1e-6)
        assert logged(log, "grad_norm") == pytest.approx(logged(plain.log, "grad_norm"), rel=1e-8)
        assert evaluated == pytest.approx(wanted_evaluation, rel=1e-9)
    assert max(logged(plain.log, "grad_norm")) > 0.5, "nothing was clipped"


CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
REENTRANT = {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
SHARED = {"planner": "static", "sp_degree": 2, "max_tokens_per_rank": 20}
# by number of ranks, on two stages
OWN_PLANS = {
    2: [
        {"pipeline_schedule": "auto", "lookahead": 2},
        {"pipeline_schedule": "auto", **REENTRANT},
        {"pipeline_schedule": "1f1b"},
        {"pipeline_schedule": "seq1f1b", "max_tokens_per_rank": 20},
        {"pipeline_schedule": "infinipipe", "max_tokens_per_rank": 40},
        TWO_PER_RANK,
        FSDP,
    ],
    4: [SHARED, {**SHARED, **FSDP}, {**CHECKPOINTING, **FSDP}],
}


@pytest.mark.processes
@pytest.mark.parametrize("world_size", others_nightly(OWN_PLANS, tried=[2]))
def test_every_schedule_equals_the_plain_trainer(tmp_path, world_size):
    plain = plain_run(tmp_path, 8, True, max_steps=2)
    common = {"plans": "own", "max_steps": 2, "batch": 4 // world_size}
    settings = [{**common, **options} for options in OWN_PLANS[world_size]]
    cases = [(tmp_path, 2, True, options, False) for options in settings]
    by_case = run_cases(pipeline_run, world_size, cases, seconds=150)
    for results, used in zip(by_case, settings, strict=True):
        assert update_error(plain.start, plain.weights, joined(results)) < 1e-8, used


def after_accelerate(rank, world_size, folder):
    """A stock Trainer with the callback, as it is on GPUs, where accelerate has taken charge of
    FSDP before the callback is added."""
    args = training_arguments(
        TrainingArguments, folder, batch=1, accumulation=2, max_steps=2, optim="sgd", **FSDP
    )
    trainer = Trainer(model=model_of(True), args=args, train_dataset=dataset())
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    trainer.is_fsdp_enabled = True
    options = FlexSeqArguments(pipeline_parallel_size=2, cost_model="estimate", lookahead=0)
    trainer.add_callback(FlexSeqCallback(trainer, options))
    assert type(trainer).__name__ == "FlexSeqTrainer"
    trainer.train()
    with pytest.raises(NotImplementedError, match="a pipeline stage cannot be called"):
        trainer.model_wrapped(input_ids=None)
    return (weights_of(trainer),)


@pytest.mark.processes
def test_the_callback_makes_a_pipeline_of_a_stock_trainer_and_takes_fsdp_over(tmp_path):
    plain = plain_run(tmp_path, 8, True, max_steps=2)
    found = joined(run_ranks(after_accelerate, 4, tmp_path))
    assert update_error(plain.start, plain.weights, found) < 1e-8


def best_run(rank, world_size, folder):
    """Trained with a rate at which it gets worse, so that the best model is the first. Returns the
    evaluated losses, that of the loaded model, and its checkpoint."""
    options = {"learning_rate": 50.0, "load_best_model_at_end": True, "max_steps": 3}
    for what in ("eval", "save"):
        options |= {f"{what}_strategy": "steps", f"{what}_steps": 1}
    trainer = make_trainer(model_of(True), folder, 2, **options)
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


# What FlexSeqMixin overrides. Much of it is not public.
OVERRIDDEN = (
    "train",
    "_inner_training_loop",
    "_hp_search_setup",
    "set_initial_training_values",
    "get_batch_samples",
    "training_step",
    "_prepare_inputs",
    "log",
    "_maybe_log_save_evaluate",
    "_finalize_training",
    "evaluation_loop",
    "prediction_step",
    "get_train_dataloader",
    "get_eval_dataloader",
    "get_test_dataloader",
    "_save_checkpoint",
    "_clip_grad_norm",
    "_get_grad_norm",
    *OF_SHARDED_CHECKPOINTS,
)


def test_all_that_is_overridden_is_listed_and_there():
    own = [name for cls in FlexSeqMixin.__mro__[:-1] for name in vars(cls)]  # without `object`
    ours = {name for name in own if hasattr(Trainer, name) and not name.startswith("__")}
    assert ours == set(OVERRIDDEN)
    assert all(callable(getattr(Trainer, name)) for name in OVERRIDDEN)


def test_all_that_a_pipeline_overrides_is_refused_of_the_user():
    """Except `save_model`, which calls the user's own as well; methods of the loss are refused as
    a loss of the user's own."""
    ours = {name for name in vars(PipelineMixin) if hasattr(Trainer, name) and name[:2] != "__"}
    assert ours - {*REPLACED, *METHODS_OF_LOSS} == {"save_model"}
    assert all(callable(getattr(Trainer, name)) for name in REPLACED)


# ---- other arithmetic and other models


OTHERS = (("qwen3", {}, 1e-5), ("qwen2", {"bf16": True}, 5e-3))


def losses_of_other(rank, world_size, folder, kind, options):
    """The logged losses, with the same sequences on one rank as on two."""
    torch.manual_seed(0)
    options = {"learning_rate": 0.1, "max_steps": 2, "lookahead": 0, **options}
    options["batch"] = 2 // world_size
    trainer = make_trainer(model_of_kind(kind), folder, world_size, **options)
    trainer.train()
    return logged(trainer.state.log_history, "loss")


@pytest.mark.processes
def test_other_models_and_bfloat16_train_as_without_a_pipeline(tmp_path):
    """In float32, and under autocast: two stages of one rank each against one rank."""
    cases = [(tmp_path, kind, options) for kind, options, _ in OTHERS]
    alone, staged = (run_cases(losses_of_other, ranks, cases) for ranks in (1, 2))
    for (kind, _, tolerance), (wanted,), by_rank in zip(OTHERS, alone, staged, strict=True):
        for losses in by_rank:
            assert losses == pytest.approx(wanted, rel=tolerance), kind
