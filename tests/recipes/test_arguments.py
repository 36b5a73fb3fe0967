"""YAML and command line to dataclasses; every YAML of the recipes; one line for every mistake."""

import io
import os
from contextlib import nullcontext, redirect_stderr, suppress
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from albums import AlbumArguments
from arguments import (
    DataArguments,
    ModelArguments,
    PreferenceArguments,
    PromptArguments,
    parse,
)
from dpo import FlexSeqDPOConfig
from grpo import FlexSeqGRPOConfig
from hf_flexseq import FlexSeqConfig
from hf_flexseq.distributed.agreement import ErrorCapture
from mistakes import refusals_in_a_line
from tests.ranks import join, run_cases
from vision_model import VisionModelArguments

RECIPES = Path(__file__).parents[2] / "recipes"
TASKS = sorted(set(RECIPES.glob("*/*.yaml")) - set(RECIPES.glob("accelerate_configs/*.yaml")))
# The types that a recipe's options come from; a task file is for the recipe that its name has.
TYPES = {
    "dpo": (FlexSeqDPOConfig, PreferenceArguments),
    "grpo": (FlexSeqGRPOConfig, PromptArguments),
    "sft": (FlexSeqConfig, DataArguments),
    "vlm": (FlexSeqConfig, AlbumArguments),
}
MODELS = {"vlm": VisionModelArguments}  # other than ModelArguments
# TRL asks for bfloat16 where nothing else is said, which a machine may not have.
PLAIN = {"dpo": {"bf16": False}, "grpo": {"bf16": False}, "sft": {}, "vlm": {}}
NEW_MODEL = {"model_config": {"model_type": "llama", "hidden_size": 8}, "use_cpu": True}


def parsed(tmp_path, *argv, yaml="", recipe="sft", defaults=NEW_MODEL):
    """The three dataclasses of a new tiny model, a YAML text and a command line."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml)
    argv = ["--config", str(config), "--output_dir", str(tmp_path), *argv]
    training_type, data_type = TYPES[recipe]
    return parse(argv, training_type, defaults | PLAIN[recipe], data_type)


def test_yaml_fills_all_three_and_the_command_line_wins(tmp_path):
    yaml = """
        tokenizer_vocab_size: 512
        max_length: 77
        long_sequences: split
        planner: static
        sp_degree: 2
        learning_rate: 1e-4
        gradient_checkpointing: true
        lora_target_modules: [q_proj, v_proj]
        model_revision: null
    """
    argv = ("--max_length", "99", "--long_sequences=drop")
    model, data, training = parsed(tmp_path, *argv, yaml=yaml)
    assert (model.tokenizer_vocab_size, model.lora_target_modules) == (512, ["q_proj", "v_proj"])
    assert model.model_revision is None
    assert model.model_config == NEW_MODEL["model_config"]
    assert (data.max_length, data.long_sequences) == (99, "drop")
    assert (training.planner, training.sp_degree) == ("static", 2)
    assert training.learning_rate == 1e-4
    assert training.gradient_checkpointing
    _, data, _ = parsed(tmp_path, yaml="max_length: 5", defaults=NEW_MODEL | {"max_length": 7})
    assert data.max_length == 5


def test_a_named_model_wins_over_a_config_and_one_is_needed(tmp_path, capsys):
    model, _, _ = parsed(tmp_path, "--model_name_or_path", "some/model", "--lora_r", "8")
    assert (model.model_name_or_path, model.lora_r) == ("some/model", 8)
    with pytest.raises(SystemExit):
        parsed(tmp_path, defaults={"use_cpu": True})
    assert "give model_name_or_path (a trained model) or model_config" in capsys.readouterr().err


@pytest.mark.parametrize("path", TASKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_task_file_parses(path, tmp_path):
    name = path.stem.split("_")[0]
    recipe = name if name in TYPES else "sft"
    argv = ["--config", str(path), "--output_dir", str(tmp_path)]
    training_type, data_type = TYPES[recipe]
    model_type = MODELS.get(recipe, ModelArguments)
    model, data, training = parse(
        argv, training_type, {"use_cpu": True}, data_type, model_type=model_type
    )
    if recipe == "sft":
        assert data.long_sequences in ("split", "drop")
    else:
        assert f"recipes/{recipe}.py" in path.read_text()
    if recipe != "dpo":
        assert training.eval_on_start, "a run ends with the held-out figures of both ends"
    assert (model.model_name_or_path is None) == (path.parent.name == "quickstart")


def test_a_shared_option_is_what_ours_says_and_reaches_all(tmp_path):
    for argv, length in (((), 4096), (("--max_length", "50"), 50)):
        model, data, training = parsed(
            tmp_path, "--trust_remote_code", "true", *argv, recipe="dpo"
        )
        assert (data.max_length, training.max_length) == (length, length)
        assert model.trust_remote_code
        assert training.trust_remote_code


@pytest.mark.parametrize(
    "path", sorted(RECIPES.glob("accelerate_configs/*.yaml")), ids=lambda p: p.stem
)
def test_every_accelerate_config_is_one(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == (2 if path.stem == "cpu" else 8)
    assert config.use_cpu is False


@pytest.mark.parametrize(
    ("recipe", "argv", "yaml", "message"),
    [
        ("sft", "", "max_lenght: 7", "unknown option 'max_lenght', did you mean 'max_length'?"),
        ("sft", "", "long_sequences: cut", "invalid choice: 'cut'"),
        ("sft", "", "- a list", "must be a mapping of options, got a list"),
        ("sft", "", "a: [", "is not YAML"),
        ("sft", "", "learning_rate: fast", "invalid float value: 'fast'"),
        ("sft", "", "eval_on_start: maybe", "Truthy value expected"),
        ("sft", "", "deterministic: true", "deterministic was removed"),
        ("sft", "--deterministic true", "", "deterministic was removed"),
        ("sft", "--max_length 1", "", "a sequence needs two tokens"),
        ("sft", "--held_out_fraction 1", "", "give a share"),
        ("sft", "--lora_r -1", "", "give a rank"),
        ("sft", "--lora_r 8", "", "lora_r needs model_name_or_path"),
        ("sft", "", "distributed_config: {ep: 2}", "distributed_config has no field 'ep'"),
        ("sft", "", "distributed_config: {fsdp_size: 4, ep_size: 3}", "`ep_size` must divide"),
        ("sft", "--distributed_config [1]", "", "distributed_config must be a mapping"),
        ("sft", "--planner static", "", "needs sp_degree"),
        ("sft", "--no_such_option 1", "", "no_such_option"),
        ("sft", "--config no/such/file.yaml", "", "no/such/file.yaml"),
        ("dpo", "--max_length 1", "", "a prompt and an answer need a token each"),
        ("dpo", "--long_pairs split", "", "invalid choice: 'split'"),
        ("dpo", "--loss_weights 1 2", "", "same length as `loss_type`"),
        ("dpo", "--long_sequences split", "", "long_sequences"),
        ("grpo", "--max_prompt_length 0", "", "a prompt needs a token"),
        ("grpo", "--reward_functions exact good", "", "unknown reward function 'good'"),
        ("grpo", "--num_generations 1", "", "at least 2 generations"),
        ("grpo", "--held_out_fraction 1", "", "give a share"),
    ],
)
def test_a_mistake_is_one_line(recipe, argv, yaml, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(tmp_path, *argv.split(), yaml=yaml, recipe=recipe)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


REFUSED = {True: {"cost_model": ""}, False: {"planner": "best"}}  # a job says a line once


def said(rank, world_size, refused_on, is_bug, together):
    """What each process says of an error that some have met, which they raise together or each by
    itself."""
    written = io.StringIO()
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        with redirect_stderr(written), suppress(SystemExit), refusals_in_a_line():
            with ErrorCapture() if together else nullcontext() as attempt:
                if rank in refused_on:
                    int("x") if is_bug else FlexSeqConfig(**REFUSED[together])
            if together:
                attempt.raise_on_all_ranks(join().cpu_group.gather_values, "collating")
    except ValueError:
        return "a traceback"
    return written.getvalue()


@pytest.mark.processes
def test_a_refusal_is_said_once_in_a_job_and_a_bug_keeps_its_traceback_where_it_is():
    cases = [([0, 1], False, True), ([1], False, True), ([1], True, True), ([1], False, False)]
    *together, of_bug, alone = run_cases(said, 2, cases)
    for lines in map("".join, together):
        assert lines.count("error: ") == lines.count("\n") == 1
        assert "cost_model=''" in lines
    other, own = of_bug
    assert other.startswith("error: rank 1, collating: invalid literal")
    assert own == "a traceback"
    assert alone[0] == ""
    assert alone[1].startswith("error: planner")
