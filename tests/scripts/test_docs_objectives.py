"""The scripts of docs/objectives/ run as they stand there, on two processes as they say."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

# What every forked rank would import again.
from transformers import LlamaForCausalLM, LlamaForSequenceClassification  # noqa: F401
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer  # noqa: F401

from hf_flexseq import FlexSeqMixin
from rewards import check_columns, load_rewards
from tests.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "docs/objectives"
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md")))
BLOCK = re.compile(r'^```python title="(\w+\.py)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
SHARED = "tiny.py"  # what the others import
REWARDS = "my_rewards.py"  # for a recipe
SCRIPTS = dict(BLOCK.findall(TEXT))


def test_every_python_block_of_the_pages_has_a_name():
    assert TEXT.count("```python") == len(SCRIPTS)
    assert SHARED in SCRIPTS


def run_script(rank, world_size, folder, name):
    """Run a script beside the one that it imports; return the trainer's log, and the figures of
    its steps."""
    steps = []
    note = FlexSeqMixin._note_figures

    def noting(trainer, number, figures):
        steps.append(figures)
        note(trainer, number, figures)

    FlexSeqMixin._note_figures = noting  # in a process of its own
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    names = {"__name__": "__main__"}
    exec(compile(SCRIPTS[name], name, "exec"), names)
    return names["trainer"].state.log_history, steps


def test_the_reward_function_of_the_pages_is_one_of_a_recipe(tmp_path):
    (tmp_path / REWARDS).write_text(SCRIPTS[REWARDS], encoding="utf-8")
    names = [f"{tmp_path / REWARDS}:starts_like"]
    (reward,) = load_rewards(names)
    check_columns(names, [reward], ["prompt", "answer"])
    assert reward(completions=["4 it is", "5"], answer=["4", "4"], prompts=["2 + 2?"] * 2) == [
        1,
        0,
    ]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(set(SCRIPTS) - {SHARED, REWARDS}))
def test_a_script_of_the_pages_trains(tmp_path, name):
    (tmp_path / SHARED).write_text(SCRIPTS[SHARED], encoding="utf-8")
    for log, figures in run_ranks(run_script, 2, tmp_path, name, seconds=120):
        steps = [entry for entry in log if "loss" in entry]
        assert len(steps) == 3
        assert torch.isfinite(torch.tensor([entry["loss"] for entry in steps])).all()
        # several sequences were too long for one rank, and packed beside others
        assert all(entry["flexseq/micro_batches"] > 1 for entry in steps)
        assert [of_step["groups_of_2"] > 0 for of_step in figures] == [True] * 3
