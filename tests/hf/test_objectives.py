"""Trainers whose loss is computed on whole samples: the plain trainer's weights and figures on two
ranks, what cannot be computed exactly is refused in one line, and the model is left as it was. So
do trainers whose samples serve several steps, and that of distillation."""

import logging
import math
import random
from contextlib import nullcontext
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
import trl
from datasets import load_from_disk
from transformers import Trainer, TrainerCallback
from trl import DPOTrainer, GRPOTrainer

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from hf_flexseq.base.versions import FUSED_HEAD_FROM, is_older
from hf_flexseq.hf.model.loss_kinds import unsuitable_distillation
from hf_flexseq.hf.model.shared_prefixes import USERS_CODE
from tests.budget import others_nightly
from tests.differential.runs import begin_anew
from tests.hf.objectives import (
    BOUNDS,
    FLOAT32_BOUND,
    OPTIONS,
    Case,
    assert_alike,
    compare,
    make_trainer,
    pairs,
    save_inputs,
)
from tests.hf.plain import logged
from tests.hf.test_resume import KilledAfter
from tests.hf.tiny import VOCAB, noting_figures, refused, tiny_llama
from tests.hf.trainers import difference, distance, flexseq_class, trained
from tests.ranks import run_cases, run_ranks
from tests.versions import reads_log_probabilities, since

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


def asking(asks):
    """A class of ours whose loss first calls the model with what `asks` makes of its inputs."""

    class Asks(FlexSeqMixin, DPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            model(**asks(inputs))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return Asks


def logits(inputs):
    return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}


def fails(inputs):
    raise ArithmeticError("the loss itself fails")


def own_trainer(cls, folder, **given):
    """A DPO trainer in this process, without a planning process."""
    arguments = {"model": tiny_llama(), "ref_model": tiny_llama(seed=1), **given}
    return make_trainer(Case(kind="dpo", steps=1), cls, folder, **arguments)


@reads_log_probabilities
@pytest.mark.slow
def test_a_loss_that_asks_for_logits_is_refused(tmp_path):
    with refused("asks the model for logits, a whole vocabulary for every token"):
        own_trainer(asking(logits), tmp_path).train()


@reads_log_probabilities
@pytest.mark.parametrize("sizes", [{"hidden_size": 64}, {"num_hidden_layers": 3}])
def test_a_reference_of_another_shape_is_refused(tmp_path, sizes):
    reference = tiny_llama(**sizes)
    with refused("other attention layers.*give a reference of the same architecture and sizes"):
        own_trainer(True, tmp_path, ref_model=reference).train()
    assert reference.config._attn_implementation == "sdpa"


@reads_log_probabilities
def test_a_hook_that_changes_labels_is_refused(tmp_path):
    policy = tiny_llama()
    policy.register_forward_pre_hook(
        lambda module, args, given: (
            (args, {**given, "labels": given["labels"].roll(1)})
            if given.get("labels") is not None
            else None
        ),
        with_kwargs=True,
    )
    with refused(
        "on the model: two sequences have the loss .* change labels in the data_collator"
    ):
        own_trainer(True, tmp_path, model=policy).train()


# ---- code of the user's in models that are not trained


def hook(trainer, name, change):
    """Change what an MLP of a trainer's model gives."""
    mlp = getattr(trainer, name).model.layers[1].mlp
    mlp.register_forward_hook(lambda module, args, outputs: change(outputs))


def mixed(outputs):
    return outputs - outputs.mean(1, keepdim=True)


@reads_log_probabilities
@pytest.mark.parametrize("name", ["model", "ref_model"])
@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_a_hook_that_mixes_sequences_is_refused_in_policy_and_reference(tmp_path, name, method):
    trainer = own_trainer(True, tmp_path)
    hook(trainer, name, mixed)
    with refused("two sequences have the losses .* apart, but .* in one row"):
        getattr(trainer, method)()


@reads_log_probabilities
def test_another_hook_on_a_reference_trains_as_under_the_plain_trainer(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="hf_flexseq")
    runs = []
    for is_ours in (False, True):
        begin_anew(0)
        trainer = own_trainer(is_ours, tmp_path)
        hook(trainer, "ref_model", lambda outputs: 1.5 * outputs)
        before = trainer.evaluate()
        runs.append((before["eval_loss"], trained(trainer, evaluates=True)))
    (stock_before, stock), (ours_before, ours) = runs
    assert ours_before == pytest.approx(stock_before, rel=1e-6)
    assert_alike(difference(stock, ours), weights=FLOAT32_BOUND)
    assert f"rows share no prefixes: {USERS_CODE}" in caplog.messages


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
    trainer = make_trainer(case, NotesTypes, tmp_path)
    trainer.train()
    assert trainer.found == (torch.float32, torch.float32)


# ---- other models between steps


# two sequences of 3 and 2 tokens, one of them padded
IDS = torch.tensor([[5, 6, 7], [8, 9, 0]])
PADDED = {"input_ids": IDS, "attention_mask": IDS.sign(), "labels": IDS}


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
            self.found.append(float(other(**PADDED).loss))
        if self.others is not None:
            self.found.append(self.trainer.evaluate(load_from_disk(self.others))["eval_loss"])


def asked_between_steps(rank, world_size, folder, kind, attention, others, settings):
    """Stock and ours: how far apart, and what each has found between its steps."""
    datasets.disable_progress_bars()
    case = Case(kind=kind, steps=2, settings=settings, flexseq={"max_tokens_per_rank": 32})
    runs, found = [], []
    for is_ours in (False, True):
        asks = BetweenSteps(attention, others)
        begin_anew(5)
        asks.trainer = make_trainer(case, is_ours, folder, callbacks=[asks])
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
    if cls is True:  # the user may call the trainer's methods, too
        batch = next(iter(trainer.get_train_dataloader()))
        assert float(trainer.prediction_step(trainer.model, batch, True)[0]) > 0


# ---- samples that serve several optimizer steps


# 4 slices, gone through twice: 4 steps of 2 batches
SPANNING = Case(
    kind="grpo",
    accumulation=2,
    steps=6,
    lookahead=4,
    settings={"steps_per_generation": 4, "num_iterations": 2},
)


@reads_log_probabilities
@pytest.mark.processes
def test_two_ranks_train_as_the_plain_trainer_does(tmp_path):
    save_inputs(tmp_path)
    between = {"eval_strategy": "steps", "eval_steps": 3}
    evaluated = replace(SPANNING, steps=5, settings={**SPANNING.settings, **between})
    # a step of two generation batches, and at the epoch's end one of fewer batches
    common = {"kind": "grpo", "lookahead": 4, "settings": {"steps_per_generation": 4}}
    uneven = Case(accumulation=3, steps=4, rows=16, **common)
    for by_rank in run_cases(compare, 2, [(tmp_path, evaluated), (tmp_path, uneven)]):
        for apart in by_rank:
            assert apart.figures > 20
            assert_alike(apart, weights=FLOAT32_BOUND)


def trained_twice(is_ours, folder):
    """What two runs of one trainer make, of which the first ends amid a generation batch."""
    torch.manual_seed(5)
    trainer = make_trainer(replace(SPANNING, steps=3), is_ours, folder)
    first, second = trained(trainer), trained(trainer)
    return replace(second, start=first.start, log=first.log + second.log)


@reads_log_probabilities
@pytest.mark.processes
def test_a_second_training_goes_on_with_samples_of_the_first(tmp_path):
    save_inputs(tmp_path)
    apart = difference(trained_twice(False, tmp_path), trained_twice(True, tmp_path))
    assert_alike(apart, weights=FLOAT32_BOUND)


class CountsPlans(TrainerCallback):
    """Notes how many steps have been given to the planner when a step ends."""

    def __init__(self):
        self.counts = []
        self.engine = None

    def on_step_end(self, args, state, control, **given):
        self.counts.append(self.engine._training._next_request)


def planned(folder, lookahead, cls=True):
    """Plans given to the planner when each step ends, and the weights after training."""
    counts = CountsPlans()
    case = replace(SPANNING, lookahead=lookahead)
    trainer = make_trainer(case, cls, folder, callbacks=[counts])
    counts.engine = trainer.flexseq
    return trained(trainer).weights, counts.counts


class CutsShort(GRPOTrainer):
    """Leaves out the last token of the completions of every third batch."""

    def _prepare_inputs(self, batch):
        inputs = super()._prepare_inputs(batch)
        if self._step % 3:
            return inputs
        mask = inputs["completion_mask"].clone()
        mask[:, -1] = 0
        return {**inputs, "completion_mask": mask}


@reads_log_probabilities
@pytest.mark.processes
def test_steps_of_one_generation_batch_are_planned_ahead(tmp_path):
    save_inputs(tmp_path)
    by_class = []
    # with the first step of four two more, and the last when that one ends; but once step 1 was
    # found to be another one than the samples said, no step is planned before it comes
    for cls, wanted in (
        (True, [4, 4, 4, 4, 8, 8]),
        (flexseq_class(CutsShort), [4, 5, 6, 7, 8, 9]),
    ):
        in_place, counts = planned(tmp_path, 0, cls)
        assert cls is not True or counts == [1, 2, 3, 4, 5, 6]
        ahead, counts = planned(tmp_path, 2, cls)
        assert counts == wanted
        for name, weights in in_place.items():
            assert np.array_equal(weights, ahead[name])
        by_class.append(ahead)
    plain, cut = by_class
    assert any(not np.array_equal(cut[name], plain[name]) for name in cut)


# ---- TRL's DistillationTrainer


distills = since("trl", "1.16", "it has no DistillationTrainer")


class FixedCompletions(getattr(trl, "DistillationTrainer", Trainer)):
    """Samples that depend on the prompt alone: of 1 to 24 tokens, some cut off before their
    end."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, has_tool_images=False):
        completions = []
        for ids in prompt_ids:
            rng = random.Random(sum(ids))
            tokens = [rng.randrange(2, VOCAB) for _ in range(rng.choice([0, 3, 9, 23]))]
            completions.append([*tokens, rng.choice([1, 5])])  # 1 ends a sequence
        return completions

    def _generate(self, prompts):
        """Say of some tokens that a tool has written them."""
        prompt_ids, completions, _, images, tool_images = super()._generate(prompts)
        masks = [[int(token % 5 != 0) for token in ids] for ids in completions]
        return prompt_ids, completions, masks, images, tool_images


class FlexSeqDistillation(FlexSeqMixin, FixedCompletions):
    pass


class OwnLoss(FlexSeqDistillation):
    """Computes what the others do; but that cannot be known."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def large_teacher():
    """Another depth, another width, heads of another size and number."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    return tiny_llama(seed=1, hidden_size=48, num_hidden_layers=3, **heads)


DISTILLED = Case(
    kind="distillation", steps=2, accumulation=2, rows=24, flexseq={"max_tokens_per_rank": 40}
)


def distillation(cls, folder, case=DISTILLED, **given):
    """The trainer of a class. given: its further arguments."""
    student = tiny_llama()
    student.config.logit_scale = 1.5  # which TRL reads
    given = {"model": student, "teacher_model": large_teacher(), **given}
    return make_trainer(case, cls, folder, **given)


def run(rank, world_size, cls, folder, case):
    trainer = distillation(cls, folder, case)
    steps = noting_figures(trainer) if isinstance(trainer, FlexSeqMixin) else None
    found = trained(trainer, evaluates=world_size > 1)
    if world_size > 1 and steps is not None:
        assert any("groups_of_2" in figures for figures in steps)
    return found


@distills
@pytest.mark.processes
def test_four_steps_are_those_of_the_stock_trainer(tmp_path):
    # sequences of up to 32 tokens: some need both ranks
    cap = {"max_tokens_per_rank": 20}
    case = replace(DISTILLED, steps=4, settings={"temperature": 0.8}, flexseq=cap)
    cases = [(cls, tmp_path, case) for cls in (FixedCompletions, FlexSeqDistillation)]
    for stock, ours in zip(*run_cases(run, 2, cases), strict=True):
        assert any("entropy" in entry for entry in stock.log)
        assert_alike(difference(stock, ours), weights=FLOAT32_BOUND)
        for entry in ours.log[:4]:
            assert entry["step_time"] > entry["flexseq/measured_s"]  # of a whole step


@distills
@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_loss_of_ones_own_takes_two_passes_to_the_same_weights(tmp_path, beta):
    case = replace(DISTILLED, settings={"beta": beta})
    wanted = run(0, 1, FixedCompletions, tmp_path, case)
    for cls in (FlexSeqDistillation, OwnLoss):
        ours = run(0, 1, cls, tmp_path, case)
        assert_alike(difference(wanted, ours), weights=FLOAT32_BOUND)


@distills
@pytest.mark.slow
def test_each_model_runs_once_on_a_micro_batch(tmp_path):
    trainer = distillation(FlexSeqDistillation, tmp_path)
    calls = []

    def note(module, args, outputs):
        calls.append(module)

    note.__module__ = "torch"  # a hook of the user's would be tried, in further calls
    for model in (trainer.model, trainer.teacher_model):
        model.model.register_forward_hook(note)
    trainer.train()
    micro_batches = sum(logged(trainer.state.log_history, "flexseq/micro_batches"))
    assert micro_batches > 2
    for model in (trainer.model, trainer.teacher_model):
        assert calls.count(model.model) == micro_batches


@distills
def test_a_loss_with_gradients_that_were_not_foreseen_is_refused(tmp_path):
    trainer = distillation(FlexSeqDistillation, tmp_path)
    loss_of = trainer.compute_loss
    trainer.compute_loss = lambda *args, **options: 2 * loss_of(*args, **options)
    with pytest.raises(RuntimeError, match="other gradients of divergence"):
        trainer.train()


@distills
def test_a_teacher_that_cannot_be_computed_exactly_is_refused(tmp_path):
    teacher = large_teacher()
    teacher.model.layers[0].self_attn.attention_dropout = 0.1
    with refused("attention_dropout=0"):
        distillation(FlexSeqDistillation, tmp_path, teacher_model=teacher)


@distills
@pytest.mark.parametrize("name", ["model", "teacher_model"])
def test_a_hook_that_mixes_sequences_is_refused_in_student_and_teacher(tmp_path, name):
    trainer = distillation(FlexSeqDistillation, tmp_path)
    hook(trainer, name, mixed)
    with refused("two sequences .*in one row"):
        trainer.train()


@pytest.mark.parametrize(
    "name", ["GKDTrainer", "GOLDTrainer", "ServerDistillationTrainer", "AsyncDistillationTrainer"]
)
def test_other_distillations_are_refused_by_name(name):
    kind = type("Mine", (type(name, (), {}),), {})
    assert unsuitable_distillation(kind()).startswith(f"{name} (it")
