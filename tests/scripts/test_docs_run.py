"""The blocks of the pages run as they stand there, in their order, once a week; every time they
are read."""

import json
import os
import re
import sys

# What every forked rank would import again.
import deepspeed  # noqa: F401
import pytest
import torch
from transformers import LlamaForCausalLM, LlamaForSequenceClassification  # noqa: F401
from trl import (  # noqa: F401
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    RewardTrainer,
    RLOOTrainer,
    SFTTrainer,
)

from hf_flexseq.hf.trainer.trainer_log import TrainerLog
from rewards import check_columns, load_rewards
from tests.programs import ROOT
from tests.ranks import run_ranks
from tests.scripts.docs_blocks import commands_of, files_of, left_out, run

# By page: titles of the blocks that do not run everywhere, and files that no command names.
PAGES = {
    "start.md": (["installs", "needs GPUs"], ["my_data.py"]),
    "migrating.md": (["axolotl 0.19", "ms-swift 4.6"], []),
    "integrations.md": (["needs axolotl"], ["axolotl.yaml", "plugin.py", "qlora.py"]),
}


@pytest.mark.parametrize("page", PAGES)
def test_files_of_a_page_are_read_and_named_by_its_commands(page):
    titles, imported = PAGES[page]
    assert left_out(page) == titles
    commands = " ".join(commands_of(page))
    for name, text in files_of(page).items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        assert (name in commands) == (name not in imported)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that has of the clone what the pages name."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


def write_files(page, folder):
    for name, text in files_of(page).items():
        (folder / name).write_text(text, encoding="utf-8")


def followed(page, folder):
    """What each command of a page has printed. A recipe's run is cut short. Scripts come last,
    because they are of other readers than the recipes and write to the same folders."""
    scripts = re.compile(r"torchrun --nproc_per_node \d+ \w+\.py")
    commands = sorted(commands_of(page), key=lambda command: bool(scripts.match(command)))
    return {command: run(command, folder, "--max_steps", "2") for command in commands}


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_newcomer_gets_from_an_example_to_scripts_of_their_own(clone):
    write_files("start.md", clone)
    printed = followed("start.md", clone)
    recipe, _ = (text for command, text in printed.items() if "my-run.yaml" in command)
    (view,) = (text for command, text in printed.items() if "flexseq view" in command)
    assert "held-out loss: 6.9" in recipe
    assert "step    2  loss 6." in recipe
    assert view.startswith("Step 0: 16 sequences")
    for html in re.findall(r"--html (\S+)", " ".join(printed)):
        text = (clone / html).read_text(encoding="utf-8")
        assert text.startswith("<!doctype html>")
        assert len(text) < 2e6
    traces = [clone / f"runs/{name}/plan_trace.jsonl" for name in ("mine", "static")]
    planned, static = (json.loads(trace.read_text().splitlines()[0]) for trace in traces)
    assert planned["lengths"] == static["lengths"]


def commands_with(name, page):
    """The commands of a page that name a file, or a part of it."""
    return [command for command in commands_of(page) if name in command]


@pytest.mark.nightly
@pytest.mark.processes
def test_a_loop_that_goes_on_ends_with_the_weights_of_one_that_did_not_stop(clone):
    write_files("start.md", clone)
    run("python make_example.py", clone)
    write_files("integrations.md", clone)
    whole, resumed = commands_with("resumable.py", "integrations.md")
    assert resumed == f"{whole} 4"
    saved = clone / "loop/model/model.safetensors"
    weights = []
    for command in (whole, resumed):
        run(command, clone)
        weights.append(saved.read_bytes())
        saved.unlink()
    assert weights[0] == weights[1]


@pytest.mark.nightly
@pytest.mark.processes
def test_those_who_move_run_the_same_model_and_data(clone):
    write_files("start.md", clone)
    run("python make_example.py", clone)
    write_files("migrating.md", clone)
    printed = followed("migrating.md", clone)
    assert sum("checkpoint:    ./out" in text for text in printed.values()) == 2


@pytest.mark.nightly
@pytest.mark.processes
def test_a_command_of_trl_runs_with_another_beginning(clone):
    write_files("integrations.md", clone)
    run("python make_trl_example.py", clone)
    (command,) = commands_with("trl_sft.yaml", "integrations.md")
    assert "Training completed" in run(command, clone, "--max_steps", "2")
    LlamaForCausalLM.from_pretrained(clone / "out")


# ---- objectives

SCRIPTS = files_of("objectives.md")
# as the page says: the same with other classes, and without a reference
RLOO = (
    SCRIPTS["grpo.py"]
    .replace("GRPO", "RLOO")
    .replace("    args=RLOOConfig(\n", "    args=RLOOConfig(beta=0.0,\n")
)
SHARED = "tiny.py"  # what the others import
REWARDS = "my_rewards.py"  # for a recipe


def test_every_python_block_of_the_objectives_is_a_file_that_compiles():
    text = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")
    assert text.count("```python") == len(SCRIPTS)
    for name, script in SCRIPTS.items():
        compile(script, name, "exec")


def test_the_reward_function_of_the_pages_is_one_of_a_recipe(tmp_path):
    (tmp_path / REWARDS).write_text(SCRIPTS[REWARDS], encoding="utf-8")
    names = [f"{tmp_path / REWARDS}:starts_like"]
    (reward,) = load_rewards(names)
    check_columns(names, [reward], ["prompt", "answer"])
    scores = reward(completions=["4 it is", "5"], answer=["4", "4"], prompts=["2 + 2?"] * 2)
    assert scores == [1, 0]


def run_script(rank, world_size, folder, name):
    """Run a script beside the one that it imports; return the trainer's log, and the figures of
    its steps."""
    steps = []
    note = TrainerLog.note

    def noting(log, number, figures):
        steps.append(figures)
        note(log, number, figures)

    TrainerLog.note = noting  # in a process of its own
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    names = {"__name__": "__main__"}
    script = SCRIPTS.get(name, RLOO)
    exec(compile(script, name, "exec"), names)
    return names["trainer"].state.log_history, steps


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize("name", sorted({*SCRIPTS, "rloo.py"} - {SHARED, REWARDS}))
def test_a_script_of_the_objectives_trains(tmp_path, name):
    (tmp_path / SHARED).write_text(SCRIPTS[SHARED], encoding="utf-8")
    for log, figures in run_ranks(run_script, 2, tmp_path, name, seconds=120):
        steps = [entry for entry in log if "loss" in entry]
        assert len(steps) == 3
        assert torch.isfinite(torch.tensor([entry["loss"] for entry in steps])).all()
        # several sequences were too long for one rank, and packed beside others
        assert all(entry["flexseq/micro_batches"] > 1 for entry in steps)
        assert [of_step["groups_of_2"] > 0 for of_step in figures] == [True] * 3
