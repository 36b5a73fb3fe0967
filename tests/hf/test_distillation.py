"""TRL's DistillationTrainer on planned micro-batches against the stock one on as many ranks."""

import random

import pytest
from trl import DistillationConfig, DistillationTrainer

from hf_flexseq import FlexSeqMixin
from hf_flexseq.hf.model.loss_kinds import unsuitable_distillation
from tests.hf.objectives import FLOAT32_BOUND, assert_alike, prompts
from tests.hf.test_trainer import logged
from tests.hf.tiny import VOCAB, noting_figures, refused, tiny_llama
from tests.hf.trainers import difference, trained, trainer_of, word_tokenizer
from tests.ranks import run_cases


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


def large_teacher():
    """Another depth, another width, heads of another size and number."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    return tiny_llama(seed=1, hidden_size=48, num_hidden_layers=3, **heads)


def distillation(cls, folder, *, options=None, **settings):
    student = tiny_llama()
    student.config.logit_scale = 1.5  # which TRL reads
    defaults = {
        "model": student,
        "teacher_model": large_teacher(),
        "train_dataset": prompts(24),
        "eval_dataset": prompts(5),
        "processing_class": word_tokenizer(),
        "data_collator": None,
        "accumulation": 2,
        "max_steps": 2,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": 0.5,
        "beta": 0.5,
    }
    flexseq = (options or {}) if issubclass(cls, FlexSeqMixin) else None
    settings = {**defaults, **settings}
    return trainer_of(cls, folder, config=DistillationConfig, flexseq=flexseq, **settings)


def run(rank, world_size, cls, folder, settings):
    trainer = distillation(cls, folder, **settings)
    steps = noting_figures(trainer) if isinstance(trainer, FlexSeqMixin) else None
    found = trained(trainer, evaluates=world_size > 1)
    if world_size > 1 and steps is not None:
        assert any("groups_of_2" in figures for figures in steps)
    return found


@pytest.mark.processes
def test_four_steps_are_those_of_the_stock_trainer(tmp_path):
    # sequences of up to 32 tokens: some need both ranks
    settings = {"max_steps": 4, "temperature": 0.8, "options": {"max_tokens_per_rank": 20}}
    cases = [(cls, tmp_path, settings) for cls in (FixedCompletions, FlexSeqDistillation)]
    for stock, ours in zip(*run_cases(run, 2, cases), strict=True):
        assert any("entropy" in entry for entry in stock.log)
        assert_alike(difference(stock, ours), weights=FLOAT32_BOUND)
        for entry in ours.log[:4]:
            assert entry["step_time"] > entry["flexseq/measured_s"]  # of a whole step


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_loss_of_ones_own_takes_two_passes_to_the_same_weights(tmp_path, beta):
    wanted = run(0, 1, FixedCompletions, tmp_path, {"beta": beta})
    for cls in (FlexSeqDistillation, OwnLoss):
        ours = run(0, 1, cls, tmp_path, {"beta": beta})
        assert_alike(difference(wanted, ours), weights=FLOAT32_BOUND)


@pytest.mark.slow
def test_each_model_runs_once_on_a_micro_batch(tmp_path):
    trainer = distillation(FlexSeqDistillation, tmp_path)
    calls = []
    for model in (trainer.model, trainer.teacher_model):
        model.model.register_forward_hook(lambda *args: calls.append(args[0]))
    trainer.train()
    micro_batches = sum(logged(trainer.state.log_history, "flexseq/micro_batches"))
    assert micro_batches > 2
    for model in (trainer.model, trainer.teacher_model):
        assert calls.count(model.model) == micro_batches


def test_a_loss_with_gradients_that_were_not_foreseen_is_refused(tmp_path):
    trainer = distillation(FlexSeqDistillation, tmp_path)
    loss_of = trainer.compute_loss
    trainer.compute_loss = lambda *args, **options: 2 * loss_of(*args, **options)
    with pytest.raises(RuntimeError, match="other gradients of divergence"):
        trainer.train()


def test_a_teacher_that_cannot_be_computed_exactly_is_refused(tmp_path):
    teacher = large_teacher()
    teacher.model.layers[0].self_attn.attention_dropout = 0.1
    with refused("attention_dropout=0"):
        distillation(FlexSeqDistillation, tmp_path, teacher_model=teacher)


@pytest.mark.parametrize(
    "name", ["GKDTrainer", "GOLDTrainer", "ServerDistillationTrainer", "AsyncDistillationTrainer"]
)
def test_other_distillations_are_refused_by_name(name):
    kind = type("Mine", (type(name, (), {}),), {})
    assert unsuitable_distillation(kind()).startswith(f"{name} (it")
