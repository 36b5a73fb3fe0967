"""Trainers whose loss is computed on whole samples: the plain trainer's weights and figures on two
ranks, what cannot be computed exactly is refused in one line, and the model is left as it was."""

import math
from contextlib import nullcontext

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import load_from_disk
from transformers import Trainer, TrainerCallback
from trl import DPOTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from hf_flexseq.base.versions import FUSED_HEAD_FROM, is_older
from hf_flexseq.hf.losses.trainers import _OF_TRAINERS
from hf_flexseq.hf.model.loss_kinds import _ON_SAMPLES
from tests.budget import others_nightly
from tests.hf.objectives import (
    BOUNDS,
    OPTIONS,
    Case,
    assert_alike,
    compare,
    make_trainer,
    pairs,
    save_inputs,
)
from tests.hf.test_resume import KilledAfter
from tests.hf.test_trainer import logged
from tests.hf.tiny import VOCAB, refused, tiny_llama
from tests.hf.trainers import difference, distance, trained
from tests.ranks import run_cases, run_ranks
from tests.versions import reads_log_probabilities

ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 5.0}
ADAPTIVE |= {"entropy_coef_delta": 0.05, "top_entropy_quantile": 0.5}
CENTERED = {"center_rewards_coefficient": 0.1}
MARGINS = {"margin": [0.0, 0.5, 1.25]}
CASES = {
    "dpo": Case(kind="dpo", steps=2, evaluates=True),
    # the last step ends an epoch that does not fill it: KTO's loss leaves out who has repeats
    "kto": Case(kind="kto", accumulation=2, rows=21, evaluates=True, lookahead=4),
    "reward": Case(kind="reward", steps=2, evaluates=True, settings=CENTERED, columns=MARGINS),
    "grpo": Case(kind="grpo", steps=2, accumulation=2, evaluates=True, settings=ADAPTIVE),
    "sequences": Case(kind="sequences", steps=2, evaluates=True),
    "tokens": Case(kind="tokens", steps=2, accumulation=2, evaluates=True),
}


# Others are those of `test_every_objective.py`.
@pytest.mark.processes
def test_two_ranks_train_as_the_plain_trainers_do(tmp_path):
    save_inputs(tmp_path)
    tried = CASES
    if is_older("trl", FUSED_HEAD_FROM):
        tried = {name: CASES[name] for name in ("reward", "sequences", "tokens")}
    by_case = run_cases(compare, 2, [(tmp_path, case) for case in tried.values()], seconds=300)
    for (name, case), by_rank in zip(tried.items(), by_case, strict=True):
        for apart in by_rank:
            assert apart.figures > 15, name
            assert_alike(apart, weights=BOUNDS[case.kind])


# ---- a policy that is its reference

# wide enough that products round differently with the number of their rows
WIDE = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3}


def as_before(rank, world_size, folder, kind, is_ours, adapter, settings):
    """How far weights are from the start after two steps of AdamW, and what the first step logs.
    All samples have the same reward, and sequences are longer than a rank's cap."""
    datasets.disable_progress_bars()
    settings = {"optim": "adamw_torch", "learning_rate": 1e-3, **settings}
    given = {"reward_funcs": lambda completions, **given: [1.0] * len(completions)}
    if kind == "dpo":
        given = {name: tiny_llama(torch.float32, **WIDE) for name in ("model", "ref_model")}
    case = Case(kind=kind, steps=2, settings=settings, adapter=adapter, dtype=torch.float32)
    run = trained(make_trainer(case, is_ours, folder, **given))
    return distance(run.weights, run.start), run.log[0]


@reads_log_probabilities
@pytest.mark.processes
def test_a_policy_that_is_its_reference_has_no_gradient_of_rounding(tmp_path):
    save_inputs(tmp_path)
    tiny_llama(torch.float32, **WIDE).save_pretrained(tmp_path / "model")
    long = {"max_completion_length": 70}
    again = {"num_iterations": 2, "steps_per_generation": 2}
    kinds = [("grpo", None, long), ("grpo", "new", long | again), ("rloo", None, long)]
    cases = [(one[0], is_ours, *one[1:]) for one in kinds for is_ours in (False, True)]
    cases += [("dpo", True, None, {})]
    by_case = run_cases(as_before, 2, [(tmp_path, *case) for case in cases], seconds=200)
    *rolled_out, preferences = by_case
    for case, by_rank in zip(cases, rolled_out, strict=False):
        for moved, first in by_rank:
            assert (moved, first["loss"], first["kl"]) == (0.0, 0.0, 0.0), case
    for moved, first in preferences:
        assert moved > 0
        assert first["rewards/margins"] == 0.0
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-7)


# ---- resumed


def losses(rank, world_size, folder, kind, killed, resume):
    """Of every step; saves come every two steps."""
    datasets.disable_progress_bars()
    saves = {"save_strategy": "steps", "save_steps": 2}
    case = Case(kind=kind, steps=4, accumulation=2, lookahead=4, settings=saves)
    callbacks = [KilledAfter(3)] if killed else None
    trainer = make_trainer(case, True, folder, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer.state.log_history, "loss")


@reads_log_probabilities
@pytest.mark.processes
@pytest.mark.parametrize("kind", others_nightly(["dpo", "grpo"], tried=["grpo"]))
def test_a_killed_run_resumes_with_the_same_losses(tmp_path, kind):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        save_inputs(folder)
    wanted = run_ranks(losses, 2, whole, kind, False, None, seconds=120)
    assert len(set(wanted[0])) == len(wanted[0]) == 4
    with pytest.raises(AssertionError, match="the process died"):
        run_ranks(losses, 2, killed, kind, True, None, seconds=120)
    assert run_ranks(losses, 2, killed, kind, False, True, seconds=120) == wanted


# ---- what is refused


def padded_call(**given):
    """Two sequences of 3 and 2 tokens, one of them padded."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids, **given}


def asking(asks):
    """A class of ours whose loss first calls the model with what `asks` makes of its inputs."""

    class Asks(FlexSeqMixin, DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            model(**asks(inputs))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return Asks


def logits(inputs):
    return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


def other_tokens(inputs):
    flipped = {name: value.flip(0) for name, value in logits(inputs).items()}
    return {**flipped, "labels": flipped["input_ids"], "fused_lm_head": True}


def fails(inputs):
    raise ArithmeticError("the loss itself fails")


def own_trainer(cls, folder, **given):
    """A DPO trainer in this process, without a planning process."""
    arguments = {"model": tiny_llama(), "ref_model": tiny_llama(seed=1), **given}
    arguments.setdefault("flexseq_args", FlexSeqArguments(**OPTIONS, lookahead=0))
    return make_trainer(Case(kind="dpo", steps=1), cls, folder, **arguments)


@reads_log_probabilities
@pytest.mark.slow
@pytest.mark.parametrize(
    ("asks", "what"),
    [
        (logits, "asks the model for logits, a whole vocabulary for every token"),
        (other_tokens, "Asks computes a loss from tokens or labels that are not"),
    ],
)
def test_a_loss_that_asks_for_more_is_refused(tmp_path, asks, what):
    with refused(what):
        own_trainer(asking(asks), tmp_path).train()


@reads_log_probabilities
@pytest.mark.parametrize("sizes", [{"hidden_size": 64}, {"num_hidden_layers": 3}])
def test_a_reference_of_another_shape_is_refused(tmp_path, sizes):
    reference = tiny_llama(**sizes)
    with refused("other attention layers.*give a reference of the same architecture and sizes"):
        own_trainer(True, tmp_path, ref_model=reference).train()
    assert reference.config._attn_implementation == "sdpa"


@reads_log_probabilities
def test_stages_of_a_pipeline_are_refused(tmp_path):
    options = FlexSeqArguments(pipeline_parallel_size=2, **OPTIONS)
    with refused("pipeline_parallel_size=2.*set it to 1"):
        own_trainer(True, tmp_path, flexseq_args=options)


def refused_together(rank, world_size, folder):
    """What both ranks say of a loader that gives one of them a batch more, to train or to
    evaluate on."""
    datasets.disable_progress_bars()
    options = {"accelerator_config": {"even_batches": False}, "per_device_eval_batch_size": 2}
    case = Case(kind="reward", rows=5, settings=options)
    trainer = make_trainer(case, True, folder, eval_dataset=pairs(2))
    for run, numbers in ((trainer.train, "1 to 2"), (trainer.evaluate, "0 to 1")):
        said = f"ranks draw {numbers} batches.* computed by all of them together"
        with refused(said, ValueError):
            run()


@pytest.mark.processes
def test_ranks_with_different_numbers_of_batches_are_refused(tmp_path):
    run_ranks(refused_together, 2, tmp_path, seconds=60)


# ---- what a loss reads


class NotesTypes(FlexSeqMixin, Trainer):
    """Keeps the types of the logits that its loss reads."""

    def compute_loss(self, *args, **given):
        loss, outputs = super().compute_loss(*args, **(given | {"return_outputs": True}))
        self.found = (outputs.logits.dtype, loss.dtype)
        return loss


@pytest.mark.slow
def test_logits_of_classes_are_float32_under_mixed_precision(tmp_path):
    case = Case(kind="sequences", steps=1, dtype=torch.float32, settings={"bf16": True})
    options = FlexSeqArguments(**OPTIONS, lookahead=0)
    trainer = make_trainer(case, NotesTypes, tmp_path, flexseq_args=options)
    trainer.train()
    assert trainer.found == (torch.float32, torch.float32)


# ---- other models between steps


class BetweenSteps(TrainerCallback):
    """After each step asks the reference or the teacher for a loss, after it has been given
    another attention; and evaluates another set, if there is one."""

    def __init__(self, attention, others=None):
        self.attention, self.others, self.found = attention, others, []

    def on_step_end(self, args, state, control, **given):
        other = getattr(self.trainer, "teacher_model", None) or self.trainer.ref_model
        if self.attention is not None:
            self.trainer.accelerator.unwrap_model(other).set_attn_implementation(self.attention)
        with torch.no_grad():
            self.found.append(float(other(**padded_call()).loss))
        if self.others is not None:
            self.found.append(self.trainer.evaluate(load_from_disk(self.others))["eval_loss"])


def asked_between_steps(rank, world_size, folder, kind, attention, others, settings):
    """Stock and ours: how far apart, and what each has found between its steps."""
    datasets.disable_progress_bars()
    case = Case(kind=kind, steps=2, settings=settings)
    options = FlexSeqArguments(**{**OPTIONS, "max_tokens_per_rank": 32}, lookahead=0)
    runs, found = [], []
    for given in ({}, {"flexseq_args": options}):
        asks = BetweenSteps(attention, others)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        torch.manual_seed(5)
        asks.trainer = make_trainer(case, bool(given), folder, callbacks=[asks], **given)
        runs.append(trained(asks.trainer))
        found.append(asks.found)
    return difference(*runs), *found


@reads_log_probabilities
@pytest.mark.processes
def test_other_models_have_their_own_attention_between_steps(tmp_path):
    save_inputs(tmp_path)
    precomputed = {"precompute_ref_log_probs": True, "per_device_eval_batch_size": 2}
    cases = [
        ("kto", "eager", None, {}),
        ("grpo", None, None, {}),
        ("distillation", "sdpa", None, {}),
        ("dpo", None, str(tmp_path / "pairs-6"), precomputed),
    ]
    by_case = run_cases(asked_between_steps, 2, [(tmp_path, *case) for case in cases], seconds=200)
    for (kind, *_), by_rank in zip(cases, by_case, strict=True):
        for apart, wanted, found in by_rank:
            assert apart.weights < BOUNDS[kind], kind
            assert len(found) >= 2
            assert found == pytest.approx(wanted, rel=1e-6), kind


# ---- the model afterwards


def whole_state(trainer):
    """What training changes and puts back: of both models, their modules and the accelerator."""
    found = {"backward": "backward" in vars(trainer.accelerator)}
    found["sync"] = trainer.accelerator.gradient_state.sync_gradients
    for role in ("model", "ref_model"):
        model = getattr(trainer, role)
        found[role] = (type(model), model.config._attn_implementation)
        for name, module in model.named_modules():
            own = {key for key in vars(module) if key in ("forward", "train", "__call__")}
            found[role, name] = (type(module), own)
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
                found[role, name, hooks] = len(getattr(module, hooks))
    return found


@reads_log_probabilities
@pytest.mark.slow
@pytest.mark.parametrize("cls", [True, asking(fails)])
def test_the_models_are_left_as_they_were(tmp_path, cls):
    trainer = own_trainer(cls, tmp_path)
    before = whole_state(trainer)
    failing = pytest.raises(ArithmeticError, match="the loss itself fails")
    with nullcontext() if cls is True else failing:
        trainer.train()
    after = whole_state(trainer)
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}
    for model in (trainer.model, trainer.ref_model):
        assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, VOCAB)


def test_every_trainer_whose_loss_is_on_samples_has_its_calls_foreseen():
    assert set(_ON_SAMPLES) == set(_OF_TRAINERS)
