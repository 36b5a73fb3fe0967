"""Steps whose rows share prefixes: the plain trainers' weights and figures, and what is spared."""

import random
from dataclasses import replace
from functools import partial

import datasets
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GPTNeoXForTokenClassification,
    Trainer,
)
from trl import SFTTrainer

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqEngine
from hf_flexseq.base.versions import is_older
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.shared_prefixes import reason_not_shared
from hf_flexseq.steps import prefetch
from tests.budget import others_nightly
from tests.differential.case import sft_trainer
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.objectives import (
    BOUNDS,
    FLOAT32_BOUND,
    FLOAT64_BOUND,
    Case,
    _rows,
    assert_alike,
    causal_model,
    make_trainer,
    run_case,
    save_inputs,
    words_of,
)
from tests.hf.test_exactness import gradients_under_random_plans
from tests.hf.test_objectives import (
    DISTILLED,
    FixedCompletions,
    FlexSeqDistillation,
    distillation,
)
from tests.hf.test_reach import keep_float64, make_model
from tests.hf.tiny import VOCAB, reference_loss, tiny_arguments, tiny_llama
from tests.hf.trainers import difference, trained, trainer_of
from tests.ranks import run_cases, run_ranks

SPARED = "flexseq/tokens_spared"


def spared(run):
    return sum(line.get(SPARED, 0.0) for line in run.log)


# ---- a loss that is a sum over tokens


def conversations(count):
    """Rows of which several begin alike: a prompt with answers, an agent's growing context, rows
    that repeat each other, and some by themselves."""
    generator = torch.Generator().manual_seed(0)

    def drawn(tokens):
        return torch.randint(2, VOCAB, (tokens,), generator=generator).tolist()

    rows = []
    while len(rows) < count:
        prompt, answers = drawn(24), [drawn(n) for n in (3, 9, 1)]
        for answer in answers:
            rows.append((prompt + answer, [-100] * len(prompt) + answer))
        context = drawn(20)
        for _ in range(3):
            answer = drawn(6)
            rows.append((context + answer, [-100] * len(context) + answer))
            context = context + answer + drawn(2)
        repeated = drawn(30)
        rows += [(repeated, repeated)] * 2
        rows.append((drawn(17), [-100] * 16 + drawn(1)))
    return [{"input_ids": ids, "labels": labels} for ids, labels in rows[:count]]


def train_on_conversations(rank, world_size, folder, checkpointed):
    datasets.disable_progress_bars()
    settings = {"train_dataset": conversations(36), "batch": 12 // world_size, "max_steps": 3}
    settings["gradient_checkpointing"] = checkpointed
    settings["train_sampling_strategy"] = "sequential"  # rows that repeat each other in one step

    def run(shared):
        torch.manual_seed(5)
        return trained(
            trainer_of(
                Trainer,
                folder / f"{shared}",
                flexseq=None if shared is None else {"shared_prefixes": shared},
                **settings,
            )
        )

    stock, apart, shared = run(None), run("off"), run("auto")
    return difference(stock, shared), difference(apart, shared), spared(apart), spared(shared)


# Without checkpointing TRL's trainers below train so, and those with a router loss.
@pytest.mark.processes
@pytest.mark.parametrize("checkpointed", others_nightly([False, True], tried=[True]))
def test_the_trainer_s_loss_counts_a_shared_token_once_for_each_row(tmp_path, checkpointed):
    by_rank = run_ranks(train_on_conversations, 2, tmp_path, checkpointed, seconds=200)
    for stock, apart, nothing, tokens in by_rank:
        assert_alike(stock, weights=FLOAT64_BOUND)
        assert_alike(apart, weights=1e-10)
        assert nothing == 0
        assert tokens > 200


def under_random_plans(rank, world_size, sharding, checkpointing, families):
    """The largest relative error of a gradient, by family."""
    found = {}
    units = []
    find = prefetch.units_of
    settings = (sharding, checkpointing, torch.float64, 2)
    with pytest.MonkeyPatch.context() as patch:
        keep_float64(patch)
        patch.setattr(prefetch, "units_of", lambda rows: units.append(find(rows)) or units[-1])
        for family in families:
            make = partial(make_hybrid if family in HYBRIDS else make_model, family)
            if family is None:
                make = tiny_llama
            own = {"make": make, "attention": "eager", "examples": conversations(18)}
            worst = gradients_under_random_plans(rank, world_size, *settings, **own)
            found[family] = max(worst.values())
    assert rank or all(len(of_step) == 6 for of_step in units)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_random_plans_with_units_give_the_gradients_of_one_process(world_size):
    families = (None, "GptOss", "Gemma4 with shared keys", "DeepseekV3")
    hybrids = ("Qwen3Next", "KimiLinear", "Bamba", "Lfm2")
    under_ddp, under_fsdp2 = (*families, *hybrids), (*families[:2], *hybrids[:1])
    if world_size == 2:  # most families once
        under_ddp = ("Gemma4 with shared keys", "DeepseekV3", "Bamba")
        # sinks are parameters of attention itself, and recurrent mixers read the weights of their
        # convolution without calling it
        under_fsdp2 = ("GptOss", "Qwen3Next")
        if not is_older("transformers", "5.23"):  # whose layers are refused by what they ask for
            under_fsdp2 += ("Gemma4 with shared keys",)  # which go from unit to unit
    cases = [("ddp", True, under_ddp), ("fsdp2", True, under_fsdp2)]
    options = {"ranks_per_node": 2 if world_size == 4 else None, "seconds": 200}
    for by_rank in run_cases(under_random_plans, world_size, cases, **options):
        for worst in by_rank:
            assert {family: error for family, error in worst.items() if not error < 1e-10} == {}


# ---- losses on whole samples


def long_pairs(count):
    return _rows(
        count,
        lambda rng: {
            "prompt": words_of(rng, rng.randrange(17, 33)),
            "chosen": " " + words_of(rng, rng.randrange(1, 13)),
            "rejected": " " + words_of(rng, rng.randrange(1, 13)),
        },
    )


def long_labelled(count):
    """Several completions of every prompt."""
    prompts = long_prompts(-(-count // 3))
    rng = random.Random(1)
    rows = []
    for prompt in prompts["prompt"]:
        for is_good in (True, False, True):
            completion = " " + words_of(rng, rng.randrange(1, 13))
            rows.append({"prompt": prompt, "completion": completion, "label": is_good})
    return Dataset.from_list(rows[:count])


def long_prompts(count):
    return _rows(count, lambda rng: {"prompt": words_of(rng, rng.randrange(20, 33))})


DATA = {
    "dpo": long_pairs,
    "kto": long_labelled,
    "reward": long_pairs,
    "grpo": long_prompts,
    "rloo": long_prompts,
}
WIDE = {"max_tokens_per_rank": 120}
of = partial(Case, steps=2, flexseq=WIDE)
CASES = {
    "dpo": of(kind="dpo", evaluates=True),
    "dpo, ipo": of(kind="dpo", accumulation=2, settings={"loss_type": "ipo"}),
    "dpo, apo": of(kind="dpo", settings={"loss_type": "apo_zero"}),
    "kto": of(kind="kto", steps=3, accumulation=2),
    "reward": of(kind="reward"),
    "grpo": of(kind="grpo", settings={"num_iterations": 2}),
    "rloo": of(kind="rloo", accumulation=2),
}
OFTEN = ("dpo", "reward", "grpo")  # the others with `-m nightly`


def compare(rank, world_size, folder, case):
    datasets.disable_progress_bars()
    data = DATA[case.kind]
    given = {"train_dataset": data(64), "eval_dataset": data(6)}
    stock, ours = (run_case(case, is_ours, folder, **given) for is_ours in (False, True))
    return difference(stock, ours), spared(ours)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_ranks_train_as_trl_s_trainers_do(tmp_path, world_size):
    save_inputs(tmp_path)
    names = OFTEN if world_size == 2 else tuple(CASES)
    by_case = run_cases(
        compare, world_size, [(tmp_path, CASES[name]) for name in names], seconds=300
    )
    for name, by_rank in zip(names, by_case, strict=True):
        for apart, tokens in by_rank:
            assert tokens > 0, name
            assert_alike(apart, weights=BOUNDS[CASES[name].kind])


def distil(rank, world_size, cls, folder):
    """With every prompt, and so every sample, twice in a step."""
    prompts = long_prompts(8)["prompt"]
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts for _ in range(2)])
    case = replace(DISTILLED, flexseq={"max_tokens_per_rank": 100})
    return trained(distillation(cls, folder, case, train_dataset=rows))


@pytest.mark.processes
def test_a_student_learns_what_trl_s_does_of_samples_that_are_equal(tmp_path):
    cases = [(cls, tmp_path) for cls in (FixedCompletions, FlexSeqDistillation)]
    for stock, ours in zip(*run_cases(distil, 2, cases, seconds=200), strict=True):
        assert spared(ours) > 0
        assert_alike(difference(stock, ours), weights=FLOAT32_BOUND)


# ---- groups of generated samples


def spared_by_grpo(rank, world_size, folder, shared):
    datasets.disable_progress_bars()
    options = WIDE | {"shared_prefixes": shared}
    case = Case(kind="grpo", steps=4, settings={"steps_per_generation": 4}, flexseq=options)
    given = {"train_dataset": long_prompts(64), "eval_dataset": long_prompts(4)}
    run = run_case(case, True, folder, **given)
    return spared(run), [line["loss"] for line in run.log if "loss" in line]


@pytest.mark.processes
def test_a_group_that_stays_in_one_step_shares_its_prompt(tmp_path):
    save_inputs(tmp_path)
    cases = [(tmp_path, "auto"), (tmp_path, "groups")]
    (auto, *_), (groups, *_) = run_cases(spared_by_grpo, 2, cases, seconds=200)
    assert groups[0] > 1.5 * auto[0] > 0
    assert len(groups[1]) == len(auto[1]) == 4


# ---- where it is off


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_loop_of_your_own_shares_prefixes_where_its_model_has_no_code_of_yours(has_hook):
    model, rows = tiny_llama(), conversations(12)
    if has_hook:
        model.get_input_embeddings().register_forward_hook(lambda *args: None)
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    engine.attach(model)
    for step in engine.steps([DataCollatorForFlexSeq()(rows)]):
        step.backward(model)
        wanted = reference_loss(tiny_llama(), rows).item()
        assert step.mean_loss() == pytest.approx(wanted, rel=1e-10)
        assert (step.plan.tokens_spared == 0) == has_hook


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (None, {"shared_prefixes": "off"}, "shared_prefixes='off'"),
        (None, {"planner": "zeppelin"}, "planner='zeppelin' plans rows"),
        (
            lambda model: setattr(model, "extra", nn.Dropout(0.1)),
            {},
            "dropout in extra is",
        ),
        (
            lambda model: setattr(model.config, "ffn_config", {"moe_jitter_eps": 0.01}),
            {},
            "config.ffn_config.moe_jitter_eps=0.01 is",
        ),
        (lambda model: setattr(model, "extra", nn.Dropout(0.0)), {}, None),
    ],
)
def test_what_would_not_be_exact_is_computed_row_by_row(change, options, said):
    model = tiny_llama()
    if change is not None:
        change(model)
    found = reason_not_shared(model, model, FlexSeqArguments(**options))
    assert found is None if said is None else said in found


def test_dropout_of_a_head_for_classes_is_that_of_models_with_such_a_head():
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 9}
    config = GPTNeoXConfig(**small)
    assert config.classifier_dropout == 0.1
    model, classifier = GPTNeoXForCausalLM(config), GPTNeoXForTokenClassification(config)
    assert reason_not_shared(model, model, FlexSeqArguments()) is None
    found = reason_not_shared(classifier, classifier, FlexSeqArguments())
    assert found.startswith("dropout in dropout is drawn once")


def with_a_hook(rank, world_size, folder):
    """Train with a hook in the last rank's model alone."""
    datasets.disable_progress_bars()
    settings = {"train_dataset": conversations(24), "batch": 12 // world_size, "max_steps": 2}
    trainer = trainer_of(Trainer, folder, flexseq={}, **settings)
    if rank == world_size - 1:
        trainer.model.get_input_embeddings().register_forward_hook(lambda *args: None)
    return spared(trained(trainer))


@pytest.mark.processes
def test_a_hook_on_one_rank_keeps_the_rows_of_all_ranks_apart(tmp_path):
    assert run_cases(with_a_hook, 2, [(tmp_path,)], seconds=100) == [[0, 0]]


def noisy(module, args, output):
    return output + 0.01 * torch.randn_like(output)


def with_noise(rank, world_size, folder, library):
    """Train by DPO with noise of a library's, or of the user's where None is given."""
    datasets.disable_progress_bars()
    given = {"train_dataset": long_pairs(16), "eval_dataset": long_pairs(4)}
    trainer = make_trainer(Case(kind="dpo", steps=1, flexseq=WIDE), True, folder, **given)
    noisy.__module__ = library or __name__
    trainer.model.get_input_embeddings().register_forward_hook(noisy)
    return spared(trained(trainer))


@pytest.mark.processes
def test_noise_that_nothing_announced_ends_training(tmp_path):
    save_inputs(tmp_path)
    with pytest.raises(AssertionError, match="draws random numbers, once for a token"):
        run_cases(with_noise, 1, [(tmp_path, "peft")], seconds=100)
    assert run_cases(with_noise, 1, [(tmp_path, None)], seconds=100) == [[0]]


class CountsLabels(Trainer):
    """Its figures depend on labels, which rows that share a token need not all have."""

    def flexseq_figures(self, outputs, inputs):
        return {"has_label": (inputs["labels"][0] != IGNORE_INDEX).double()}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        self.counted = (
            int(outputs.has_label.sum()),
            int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum()),
        )
        return -outputs.log_probs.sum() / num_items_in_batch


def of_ones_own(outputs, labels, num_items_in_batch=None):
    return -outputs.log_probs.sum() / num_items_in_batch


@pytest.mark.parametrize("code", ["none", "figures", "hook"])
def test_a_loss_of_ones_own_shares_prefixes_unless_code_of_its_owner_sees_tokens(tmp_path, code):
    settings = {"train_dataset": rows_alike(STEP), "batch": STEP, "max_steps": 1, "flexseq": WIDE}
    if code == "figures":
        trainer = trainer_of(CountsLabels, tmp_path, **settings)
    else:
        trainer = trainer_of(Trainer, tmp_path, compute_loss_func=of_ones_own, **settings)
    if code == "hook":
        trainer.model.get_input_embeddings().register_forward_hook(lambda *args: None)
    assert (spared(trained(trainer)) > 0) == (code == "none")
    if code == "figures":
        found, wanted = trainer.counted
        assert found == wanted


# ---- TRL's SFTTrainer


STEP = 12  # rows
CAPPED = {"max_tokens_per_rank": 120, "lookahead": 0}
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
OF_ROWS = {"nll": {}, "dft": {"loss_type": "dft"}, "LoRA": {"peft_config": LORA}}


def rows_alike(count):
    """Rows that begin alike. Of what they share some tokens have a label in all rows, some in a
    part of them, and some in none."""
    found = conversations(count)
    for index, row in enumerate(found):
        if index % 4:
            row["labels"] = row["input_ids"][:10] + row["labels"][10:]
    return found


def train_on_rows(folder, shared, *, cls=SFTTrainer, batch=STEP, evaluates=True, **settings):
    """A training of three steps, after which another twelve rows are evaluated. shared: None for
    the plain trainer."""
    datasets.disable_progress_bars()
    data = rows_alike(4 * STEP)
    settings = {
        "train_dataset": Dataset.from_list(data[: 3 * STEP]),
        "eval_dataset": Dataset.from_list(data[3 * STEP :]),
        "per_device_eval_batch_size": batch,
        "learning_rate": 0.5,
        "max_steps": 3,
        "flexseq": shared and {**CAPPED, "shared_prefixes": shared},
        "model": tiny_llama(),
        **settings,
    }
    torch.manual_seed(5)
    return trained(sft_trainer(cls, folder, batch, **settings), evaluates=evaluates)


def compare_rows(rank, world_size, folder, settings):
    """Stock and ours on as many ranks, and the tokens that ours has spared. Only on one rank has
    the plain trainer the mean loss of an evaluation over all targets."""
    given = {"batch": STEP // world_size, "evaluates": world_size == 1, **settings}
    stock, ours = train_on_rows(folder, None, **given), train_on_rows(folder, "auto", **given)
    return difference(stock, ours), spared(ours)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_sft_trainer_s_weights_and_figures_are_those_of_the_rows(tmp_path, world_size):
    cases = [(tmp_path, settings) for settings in OF_ROWS.values()]
    by_case = run_cases(compare_rows, world_size, cases, seconds=200)
    for name, by_rank in zip(OF_ROWS, by_case, strict=True):
        for apart, tokens in by_rank:
            assert tokens > 50, name
            assert_alike(apart, weights=FLOAT32_BOUND)
            assert apart.figures > 20


def run_sharded(rank, world_size, folder, sharding):
    """The plain trainer on one process, ours on several under FSDP2. There the plain one's loss
    and gradients are smaller by one factor, which clipping hides from the weights."""
    case = Case(kind="dpo", sharding=sharding)
    settings = {"model": causal_model(case, folder / "model"), "evaluates": False}
    settings |= {"batch": STEP // world_size, "gradient_checkpointing": True}
    return train_on_rows(folder / str(rank), "auto" if sharding == "fsdp2" else None, **settings)


@pytest.mark.processes
def test_a_sharded_and_checkpointed_model_is_trained_as_the_plain_trainer_does(tmp_path):
    save_inputs(tmp_path)
    (stock,) = run_ranks(run_sharded, 1, tmp_path, "ddp")
    for ours in run_ranks(run_sharded, 2, tmp_path, "fsdp2"):
        assert_alike(difference(stock, ours), weights=FLOAT32_BOUND)
        assert spared(ours) > 50
