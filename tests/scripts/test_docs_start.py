"""The blocks of docs/start.md, docs/migrating.md and docs/loop.md run as they stand there, in
their order."""

# What every forked rank would import again.
import deepspeed  # noqa: F401
import pytest
from transformers import LlamaForCausalLM  # noqa: F401
from trl import SFTTrainer  # noqa: F401

import hf_flexseq.hf.trainer  # noqa: F401
from tests.programs import ROOT
from tests.scripts.docs_blocks import (
    blocks_of,
    commands_of,
    left_out,
    run,
    run_together,
    write_files,
)

# A recipe's run is cut short.
SHORT = ["--max_steps", "2"]

# Each rank puts the weights of a loop aside before the next one can write others.
KEEP = "import os, shutil; shutil.copytree('loop/model', 'kept-' + os.environ['RANK'])"


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder that has of the clone what the pages name."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path


def followed(page, folder):
    """What each command of a page has printed, but for those of torchrun, which come last."""
    commands = commands_of(page)
    scripts = [words for words in commands if words[0] == "torchrun"]
    printed = {}
    for words in commands:
        if words not in scripts:
            more = SHORT if words[0] == "accelerate" else []
            printed[" ".join(words)] = run(words + more, folder)
    run_together(scripts, folder)
    return printed


def test_blocks_that_do_not_run_everywhere_say_so_in_their_titles():
    assert left_out("start.md") == ["installs", "needs GPUs"]
    assert left_out("migrating.md") == ["axolotl 0.19", "ms-swift 4.6"]
    assert left_out("loop.md") == []


@pytest.mark.nightly
@pytest.mark.processes
def test_a_newcomer_gets_from_an_example_to_scripts_of_their_own(clone):
    write_files("start.md", clone)
    printed = followed("start.md", clone)
    (recipe,) = (text for words, text in printed.items() if "my-run.yaml" in words)
    (view,) = (text for words, text in printed.items() if "flexseq view" in words)
    assert "held-out loss: 6.9" in recipe
    assert "step    2  loss 6." in recipe
    assert view.startswith("Step 0: 16 sequences")
    assert (clone / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert len(printed) == 7
    named = [block.title for block in blocks_of("start.md") if block.title.endswith(".py")]
    run_by_page = " ".join(" ".join(words) for words in commands_of("start.md"))
    assert [title for title in named if title not in run_by_page] == ["my_data.py"]
    write_files("loop.md", clone)
    check_resumed_loop(clone)


def check_resumed_loop(folder):
    """A loop that goes on where it was saved ends with the weights of one that did not stop."""
    whole, resumed = commands_of("loop.md")
    assert resumed == [*whole, "4"]
    (folder / "keep.py").write_text(KEEP)
    run_together([whole, [*whole[:-1], "keep.py"], resumed], folder)
    found = (folder / "loop" / "model" / "model.safetensors").read_bytes()
    assert found == (folder / "kept-0" / "model.safetensors").read_bytes()
    assert found != (folder / "my-model" / "model.safetensors").read_bytes()


@pytest.mark.nightly
@pytest.mark.processes
def test_those_who_move_run_the_same_model_and_data(clone):
    write_files("start.md", clone)
    run(["python", "make_example.py"], clone)
    write_files("migrating.md", clone)
    printed = followed("migrating.md", clone)
    assert len(printed) == 4
    assert sum("checkpoint:    ./out" in text for text in printed.values()) == 2
