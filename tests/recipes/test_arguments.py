"""YAML and command line to dataclasses; every YAML of the recipes; one line for every mistake."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from arguments import parse, to_argv
from hf_flexseq import FlexSeqConfig

RECIPES = Path(__file__).parents[2] / "recipes"
TASKS = sorted([*RECIPES.glob("quickstart/*.yaml"), *RECIPES.glob("llama-3.1-8b/*.yaml")])
NEW_MODEL = {"model_config": {"model_type": "llama", "hidden_size": 8}, "use_cpu": True}


def parsed(tmp_path, *argv: str, yaml: str | None = None, defaults: dict | None = None):
    """The three dataclasses of a new tiny model, a YAML text and a command line."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml or "")
    argv = ["--config", str(config), "--output_dir", str(tmp_path), *argv]
    return parse(argv, FlexSeqConfig, NEW_MODEL if defaults is None else defaults)


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
    model, data, training = parsed(
        tmp_path, "--max_length", "99", "--long_sequences=drop", yaml=yaml
    )
    assert (model.tokenizer_vocab_size, model.lora_target_modules) == (512, ["q_proj", "v_proj"])
    assert model.model_revision is None
    assert model.model_config == NEW_MODEL["model_config"]
    assert (data.max_length, data.long_sequences) == (99, "drop")
    assert (training.planner, training.sp_degree) == ("static", 2)
    assert training.learning_rate == 1e-4
    assert training.gradient_checkpointing


def test_yaml_wins_over_defaults(tmp_path):
    _, data, _ = parsed(tmp_path, yaml="max_length: 5", defaults=NEW_MODEL | {"max_length": 7})
    assert data.max_length == 5


def test_mappings_lists_and_null_become_arguments():
    assert to_argv({"a": {"b": 1}, "c": [1, 2], "d": None, "e": False, "f": -1}) == [
        '--a={"b": 1}',
        "--c",
        "1",
        "2",
        "--e=False",
        "--f=-1",
    ]


def test_a_named_model_wins_over_a_config_and_one_is_needed(tmp_path, capsys):
    model, _, _ = parsed(tmp_path, "--model_name_or_path", "some/model", "--lora_r", "8")
    assert (model.model_name_or_path, model.lora_r) == ("some/model", 8)
    with pytest.raises(SystemExit):
        parsed(tmp_path, defaults={"use_cpu": True})
    assert "give model_name_or_path (a trained model) or model_config" in capsys.readouterr().err


@pytest.mark.parametrize("path", TASKS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_task_file_parses(path, tmp_path):
    argv = ["--config", str(path), "--output_dir", str(tmp_path)]
    model, data, training = parse(argv, FlexSeqConfig, {"use_cpu": True})
    assert data.long_sequences in ("split", "drop")
    assert training.eval_on_start, (
        "the last lines of a run compare the held-out loss with the one at its start"
    )
    assert (model.model_name_or_path is None) == (path.parent.name == "quickstart")


@pytest.mark.parametrize(
    "path", sorted(RECIPES.glob("accelerate_configs/*.yaml")), ids=lambda p: p.stem
)
def test_every_accelerate_config_is_one(path):
    config = load_config_from_file(str(path))
    assert config.num_processes == (2 if path.stem == "cpu" else 8)
    assert config.use_cpu is False


@pytest.mark.parametrize(
    ("argv", "yaml", "message"),
    [
        ([], "max_lenght: 7", "there is no option 'max_lenght', did you mean 'max_length'?"),
        ([], "long_sequences: cut", "invalid choice: 'cut'"),
        ([], "- a list", "must be a mapping of options, got a list"),
        ([], "a: [", "is no YAML"),
        ([], "learning_rate: fast", "invalid float value: 'fast'"),
        ([], "eval_on_start: maybe", "Truthy value expected"),
        (["--max_length", "1"], "", "a sequence needs two tokens"),
        (["--held_out_fraction", "1"], "", "give a share"),
        (["--lora_r", "-1"], "", "give a rank"),
        (["--lora_r", "8"], "", "lora_r needs model_name_or_path"),
        (["--planner", "static"], "", "needs sp_degree"),
        (
            ["--pipeline_parallel_size", "2", "--deterministic", "true"],
            "",
            "not available in a pipeline",
        ),
        (["--no_such_option", "1"], "", "no_such_option"),
        (["--config", "no/such/file.yaml"], "", "no/such/file.yaml"),
    ],
)
def test_a_mistake_is_one_line(argv, yaml, message, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(tmp_path, *argv, yaml=yaml)
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_only_the_first_process_complains(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        parsed(tmp_path, "--max_length", "1")
    assert capsys.readouterr().err == ""
