"""TRL's SFTTrainer on rows that begin alike: weights and figures of the plain one."""

import datasets
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTTrainer

from tests.differential.case import sft_trainer
from tests.hf.objectives import FLOAT32_BOUND, Case, assert_alike, causal_model, save_inputs
from tests.hf.test_router import mixture
from tests.hf.test_shared_prefixes import conversations, spared
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import difference, trained
from tests.ranks import run_cases, run_ranks

STEP = 12  # rows
OPTIONS = {"max_tokens_per_rank": 120, "lookahead": 0}
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
CASES = {"nll": {}, "dft": {"loss_type": "dft"}, "LoRA": {"peft_config": LORA}}


def rows(count):
    """Rows that begin alike. Of what they share some tokens have a label in all rows, some in a
    part of them, and some in none."""
    found = conversations(count)
    for index, row in enumerate(found):
        if index % 4:
            row["labels"] = row["input_ids"][:10] + row["labels"][10:]
    return found


def run(folder, shared, *, cls=SFTTrainer, batch=STEP, evaluates=True, **settings):
    """A training of three steps, after which another twelve rows are evaluated. shared: None for
    the plain trainer."""
    datasets.disable_progress_bars()
    data = rows(4 * STEP)
    settings = {
        "train_dataset": Dataset.from_list(data[: 3 * STEP]),
        "eval_dataset": Dataset.from_list(data[3 * STEP :]),
        "per_device_eval_batch_size": batch,
        "learning_rate": 0.5,
        "max_steps": 3,
        "flexseq": shared and {**OPTIONS, "shared_prefixes": shared},
        "model": tiny_llama(),
        **settings,
    }
    torch.manual_seed(5)
    return trained(sft_trainer(cls, folder, batch, **settings), evaluates=evaluates)


def compare(rank, world_size, folder, settings):
    """Stock and ours on as many ranks, and the tokens that ours has spared. Only on one rank has
    the plain trainer the mean loss of an evaluation over all targets."""
    given = {"batch": STEP // world_size, "evaluates": world_size == 1, **settings}
    stock, ours = run(folder, None, **given), run(folder, "auto", **given)
    return difference(stock, ours), spared(ours)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_sft_trainer_s_weights_and_figures_are_those_of_the_rows(tmp_path, world_size):
    cases = [(tmp_path, settings) for settings in CASES.values()]
    by_case = run_cases(compare, world_size, cases, seconds=200)
    for name, by_rank in zip(CASES, by_case, strict=True):
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
    return run(folder / str(rank), "auto" if sharding == "fsdp2" else None, **settings)


@pytest.mark.processes
def test_a_sharded_and_checkpointed_model_is_trained_as_the_plain_trainer_does(tmp_path):
    save_inputs(tmp_path)
    (stock,) = run_ranks(run_sharded, 1, tmp_path, "ddp")
    for ours in run_ranks(run_sharded, 2, tmp_path, "fsdp2"):
        assert_alike(difference(stock, ours), weights=FLOAT32_BOUND)
        assert spared(ours) > 50


def run_mixture(rank, world_size, folder, shared):
    settings = {"model": mixture("Qwen3Moe"), "router_aux_loss_coef": 0.3}
    return run(folder, shared, batch=STEP // world_size, **settings)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_router_loss_of_the_sft_trainer_is_that_of_the_rows(tmp_path, world_size):
    """The plain trainer has one batch on one rank: router losses are of a step."""
    stock = run_mixture(0, 1, tmp_path, None)
    assert all("aux_loss" in line for line in stock.log if "loss" in line)
    (by_rank,) = run_cases(run_mixture, world_size, [(tmp_path, "auto")], seconds=200)
    for ours in by_rank:
        assert spared(ours) > 50
        assert_alike(difference(stock, ours), weights=FLOAT32_BOUND)
