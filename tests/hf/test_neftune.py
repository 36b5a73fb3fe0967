"""NEFTune's noise on planned steps: the plain Trainer with the same noise has the same weights,
under any plan and on any number of ranks."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from hf_flexseq.hf.model.attachments import ModelSettings
from hf_flexseq.steps.embedding_noise import KEYS, NoiseColumns
from hf_flexseq.steps.source_row import SourceRow
from hf_flexseq.steps.token_words import TokenWords
from tests.differential.case import Case, make_trainer
from tests.differential.runs import run, stock_run
from tests.hf import objectives
from tests.hf.plain import dataset, float64_loss
from tests.hf.test_exactness import LENGTHS
from tests.hf.tiny import (
    RandomPlanEngine,
    documents,
    own_batches,
    random_steps,
    sharded,
    tiny_llama,
)
from tests.hf.trainers import assert_logged_alike, distance, trained, weights_apart
from tests.ranks import run_cases

ALPHA, SEED = 5.0, 42
MASK = 2**64 - 1

# ---- a twin, number by number


def mixed(z):
    """SplitMix64 of each number, whole numbers of Python."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def noise_of(ids, step, hidden):
    """The noise of one sequence, [tokens, hidden]."""
    told = f"{SEED} {step} ".encode() + np.array(ids, dtype="<i8").tobytes()
    key = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
    golden = 0x9E3779B97F4A7C15
    tokens, channels = (np.arange(1, count + 1, dtype=object) for count in (len(ids), hidden))
    of_tokens = mixed(key + tokens * golden & MASK)
    bits = mixed(of_tokens[:, None] + channels * golden & MASK) >> 40
    noise = bits.astype(float) / 2**23 - 1
    return noise * ALPHA / (len(ids) * hidden) ** 0.5


class SameNoise(TrainerCallback):
    """Gives the plain Trainer the noise of the twin."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def note(module, args, kwargs):
            self.lengths = kwargs["attention_mask"].sum(dim=1).tolist()

        def add(module, given, embedded):
            (ids,) = given
            noise = torch.zeros_like(embedded)
            for row, length in enumerate(self.lengths):
                own = noise_of(ids[row, :length].tolist(), state.global_step, embedded.shape[-1])
                noise[row, :length] = torch.from_numpy(own)
            return embedded + noise

        model.register_forward_pre_hook(note, with_kwargs=True)
        model.get_input_embeddings().register_forward_hook(add)


# ---- columns


def row_of(*sequences):
    ids = torch.tensor([token for ids in sequences for token in ids])
    return SourceRow(columns={"input_ids": ids}, lengths=tuple(map(len, sequences)))


def test_a_column_of_the_same_name_is_refused():
    noise = NoiseColumns(ALPHA, SEED)
    with pytest.raises(ValueError, match=f"the dataset has a column '{KEYS}', which"):
        noise.of(noise.of(row_of([5, 6], [7]), 3), 3)


def test_a_rank_may_have_drawn_nothing():
    nothing = SourceRow(columns={"input_ids": torch.empty(0, dtype=torch.int64)}, lengths=())
    row = NoiseColumns(ALPHA, SEED).of(nothing, 0)
    assert len(TokenWords(row.columns).joined) == 0, "they travel with those of other ranks"


# ---- trainers


NOISY = Case(
    settings={"neftune_noise_alpha": ALPHA, "seed": SEED, "max_steps": 2},
    batch=8,
    stock_loss=float64_loss,
    stock_settings={"neftune_noise_alpha": None, "callbacks": [SameNoise()]},
)
QUIET = replace(NOISY, stock_settings={"neftune_noise_alpha": None})
WHOLE = {"max_tokens_per_rank": 100}  # every sequence fits on one rank
CHECKPOINTED = {**NOISY.settings, "gradient_checkpointing": True}
PLANS = {
    "shared": replace(NOISY, flexseq={"planner": "static", "sp_degree": 2}),
    "accumulated": replace(NOISY, accumulation=2),
    "apart": replace(NOISY, flexseq=WHOLE | {"strategy": "local"}, settings=CHECKPOINTED),
}


@pytest.mark.processes
def test_weights_are_those_of_the_plain_trainer_with_this_noise_under_any_plan(tmp_path):
    noisy, quiet = (stock_run(case, tmp_path) for case in (NOISY, QUIET))
    assert weights_apart(noisy, quiet) > 1e-3, "noise makes a difference"
    cases = [(case, tmp_path) for case in PLANS.values()]
    for plan, by_rank in zip(PLANS, run_cases(run, 2, cases), strict=True):
        for found in by_rank:
            assert weights_apart(noisy, found) < 1e-6, plan
            assert_logged_alike(noisy, found, ["loss"], rel=1e-6)


@pytest.mark.processes
def test_a_resumed_run_has_the_same_noise_and_an_evaluation_has_none(tmp_path):
    case = replace(QUIET, flexseq=WHOLE)
    saving = {**case.settings, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(replace(case, settings=saving), tmp_path, is_ours=True)
    whole = trained(trainer)
    resumed = make_trainer(case, tmp_path, is_ours=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for name, parameter in resumed.model.named_parameters():
        assert (parameter.detach().numpy() == whole.weights[name]).all(), name
    plain = make_trainer(case, tmp_path, is_ours=False)
    plain.model.load_state_dict(trainer.model.state_dict())
    data = dataset(5)
    settings = {"per_device_eval_batch_size": 8}
    losses = []
    for each in (trainer, plain):
        each.args.per_device_eval_batch_size = settings["per_device_eval_batch_size"]
        losses.append(each.evaluate(data)["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert trainer.args.neftune_noise_alpha == ALPHA


def gradients(rank, world_size, kind, seed, alpha):
    """Gradients of one step under a random plan, by name."""
    model = tiny_llama(torch.float64)
    if kind == "adapter":
        layers = ["q_proj", "embed_tokens"]
        config = LoraConfig(r=4, target_modules=layers, init_lora_weights=False)
        model = get_peft_model(model, config).double()
    if kind == "fsdp2":
        sharded(model)
    engine = RandomPlanEngine(Accelerator(cpu=True), seed)
    if alpha is not None:
        engine.settings = ModelSettings(noise=(alpha, SEED))
    engine.attach(model.train())
    ddp = None if kind == "fsdp2" else {}
    batches = own_batches(documents(LENGTHS), rank, world_size)
    ((_, _, found),) = random_steps(engine, model, batches, ddp=ddp)
    return {name: gradient.numpy() for name, gradient in found.items()}


@pytest.mark.nightly
@pytest.mark.processes
def test_sharded_models_and_adapters_on_embeddings_have_the_same_noise(tmp_path):
    kinds = [("ddp", 1, ALPHA), ("fsdp2", 2, ALPHA), ("ddp", 2, None)]
    kinds += [("adapter", 1, ALPHA), ("adapter", 3, ALPHA), ("adapter", 3, None)]
    found = [by_rank[0] for by_rank in run_cases(gradients, 2, kinds)]
    for first, second, quiet in (found[:3], found[3:]):
        assert distance(first, second) < 1e-10 * distance(first, quiet)


def pairs_run(rank, world_size, folder, alpha, cap):
    options = {"settings": {"neftune_noise_alpha": alpha}, "flexseq": {"max_tokens_per_rank": cap}}
    return objectives.run_case(objectives.Case(kind="dpo", steps=2, **options), True, folder)


@pytest.mark.nightly
@pytest.mark.processes
def test_pairs_have_the_same_noise_in_all_passes_of_any_plan(tmp_path):
    objectives.save_inputs(tmp_path)
    cases = [(tmp_path, ALPHA, 30), (tmp_path, ALPHA, 300), (tmp_path, None, 300)]
    split, whole, quiet = (by_rank[0] for by_rank in run_cases(pairs_run, 2, cases))
    assert weights_apart(whole, split) < 1e-6
    assert weights_apart(whole, quiet) > 1e-3
