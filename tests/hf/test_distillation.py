"""TRL's DistillationTrainer on planned micro-batches, beside the stock one on as many ranks."""

import random

import pytest
import torch
from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer
from trl.trainer import distillation_trainer

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from hf_flexseq.hf.losses import unsuitable_distillation
from tests.hf.test_mixin import tokenizer
from tests.hf.test_trainer import OPTIONS, training_arguments, update_error
from tests.hf.tiny import VOCAB, noting_figures, tiny_llama
from tests.ranks import run_ranks

EXACT = {"optim": "sgd", "bf16": False, "gradient_checkpointing": False}

# Figures of time and of the planner alone are not those of the stock trainer.
UNLIKE = ("time", "runtime", "per_second", "flexseq/")


class FixedCompletions(DistillationTrainer):
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


def prompts(count, seed=0):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words = [f"t{rng.randrange(2, VOCAB)}" for _ in range(rng.randrange(1, 9))]
        rows.append({"prompt": " ".join(words)})
    return Dataset.from_list(rows)


def large_teacher():
    """Another depth, another width, heads of another size and number."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    return tiny_llama(seed=1, hidden_size=48, num_hidden_layers=3, **heads)


def distillation(cls, folder, *, accumulation=1, steps=2, teacher=None, options=None, **settings):
    args = training_arguments(
        DistillationConfig,
        folder,
        batch=2,
        accumulation=accumulation,
        max_steps=steps,
        per_device_eval_batch_size=2,
        **{**EXACT, "learning_rate": 0.5, "beta": 0.5, **settings},
    )
    flexseq = {}
    if issubclass(cls, FlexSeqMixin):
        flexseq["flexseq_args"] = FlexSeqArguments(**{**OPTIONS, **(options or {})})
    student = tiny_llama()
    student.config.logit_scale = 1.5  # which TRL reads
    return cls(
        model=student,
        teacher_model=teacher or large_teacher(),
        args=args,
        train_dataset=prompts(24),
        eval_dataset=prompts(5, seed=1),
        processing_class=tokenizer(),
        **flexseq,
    )


def weights(trainer):
    return {n: p.detach().clone().numpy() for n, p in trainer.model.named_parameters()}


def run(rank, world_size, cls, folder, settings):
    trainer = distillation(cls, folder, **settings)
    before = weights(trainer)
    steps = noting_figures(trainer) if isinstance(trainer, FlexSeqMixin) else None
    trainer.train()
    if settings["steps"] > 2:
        trainer.evaluate()
        assert steps is None or any("groups_of_2" in figures for figures in steps)
    return before, weights(trainer), trainer.state.log_history


def figures(history):
    """All that was logged, by entry, but for times and plans."""
    found = []
    for entry in history:
        found.append({k: v for k, v in entry.items() if not any(word in k for word in UNLIKE)})
    return found


def assert_alike(found, wanted):
    """Tell that two runs have the same weights, and the same logs but for what hf_flexseq
    adds."""
    before, after, history = wanted
    wanted_after = {n: torch.as_tensor(w) for n, w in after.items()}
    start = {n: torch.as_tensor(w) for n, w in before.items()}
    assert update_error(start, wanted_after, found[1]) < 2e-6
    ours, stock = figures(found[2]), figures(history)
    assert len(ours) == len(stock)
    for own, entry in zip(ours, stock, strict=True):
        assert own == pytest.approx(entry, rel=1e-6, abs=1e-6)


@pytest.mark.processes
def test_five_steps_are_those_of_the_stock_trainer(tmp_path):
    # sequences of up to 32 tokens: some need both ranks
    settings = {"accumulation": 2, "steps": 5, "temperature": 0.8}
    settings["options"] = {"max_tokens_per_rank": 20}
    wanted = run_ranks(run, 2, FixedCompletions, tmp_path, settings)
    found = run_ranks(run, 2, FlexSeqDistillation, tmp_path, settings)
    assert any("entropy" in entry for entry in wanted[0][2])
    for rank in range(2):
        assert_alike(found[rank], wanted[rank])
    for entry in found[0][2][:5]:
        assert entry["step_time"] > entry["flexseq/measured_s"]  # of a whole step


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_loss_of_ones_own_takes_two_passes_to_the_same_weights(tmp_path, beta):
    settings = {"beta": beta, "accumulation": 2, "steps": 2}
    wanted = run(0, 1, FixedCompletions, tmp_path, settings)
    for cls in (FlexSeqDistillation, OwnLoss):
        assert_alike(run(0, 1, cls, tmp_path, settings), wanted)


def test_each_model_runs_once_on_a_micro_batch(tmp_path):
    trainer = distillation(FlexSeqDistillation, tmp_path, accumulation=2)
    calls = []
    for model in (trainer.model, trainer.teacher_model):
        model.model.register_forward_hook(lambda *args: calls.append(args[0]))
    trainer.train()
    history = trainer.state.log_history
    micro_batches = sum(entry.get("flexseq/micro_batches", 0) for entry in history)
    assert micro_batches > 2
    for model in (trainer.model, trainer.teacher_model):
        assert calls.count(model.model) == micro_batches


def test_devices_that_leave_out_tokens_without_a_loss_find_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(distillation_trainer, "_use_triton", lambda device: True)
    settings = {"accumulation": 2, "steps": 2}
    wanted = run(0, 1, FixedCompletions, tmp_path, settings)
    found = run(0, 1, FlexSeqDistillation, tmp_path, settings)
    assert_alike(found, wanted)


def test_a_loss_with_gradients_that_were_not_foreseen_is_refused(tmp_path):
    trainer = distillation(FlexSeqDistillation, tmp_path)
    loss_of = trainer.compute_loss
    trainer.compute_loss = lambda *args, **options: 2 * loss_of(*args, **options)
    with pytest.raises(RuntimeError, match="other gradients of divergence"):
        trainer.train()


def test_images_are_refused(tmp_path):
    class WithImages(FlexSeqDistillation):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return batch | {"mm_token_type_ids": torch.zeros_like(batch["completion_ids"])}

    trainer = distillation(WithImages, tmp_path)
    with pytest.raises(NotImplementedError, match="mm_token_type_ids: hf_flexseq distills text"):
        trainer.train()


def test_a_teacher_that_cannot_be_computed_exactly_is_refused(tmp_path):
    teacher = large_teacher()
    teacher.config.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match="attention_dropout=0"):
        distillation(FlexSeqDistillation, tmp_path, teacher=teacher)


@pytest.mark.parametrize(
    "name", ["GKDTrainer", "GOLDTrainer", "ServerDistillationTrainer", "AsyncDistillationTrainer"]
)
def test_other_distillations_are_refused_by_name(name):
    kind = type("Mine", (type(name, (), {}),), {})
    assert unsuitable_distillation(kind()).startswith(f"{name} (it")
