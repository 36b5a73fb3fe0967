"""TRL's command line on planned steps: TRL's own scripts read the options, make the trainer, train
and save; weights are compared with those that the same scripts save without hf_flexseq."""

import json
import random
import runpy
import sys
from pathlib import Path

import datasets
import pytest
import torch
import trl
import yaml
from safetensors.numpy import load_file
from transformers import LlamaForSequenceClassification
from trl.cli.commands import TrainingCommand, get_commands

from hf_flexseq import FlexSeqArguments, FlexSeqMixin
from hf_flexseq.integrations.trl import TRAINERS, main, parse, planning
from tests.hf.objectives import classifier, labelled, pairs, prompts, words_of
from tests.hf.tiny import tiny_llama
from tests.hf.trainers import distance, word_tokenizer
from tests.ranks import run_ranks

ROWS = 32
OPTIONS = {"cost_model": "estimate", "lookahead": 1}


def texts(count):
    """Rows of text, some of which are too long for one rank."""
    rng = random.Random(0)
    lengths = [rng.choice([4, 9, 20, 100]) for _ in range(count)]
    return datasets.Dataset.from_list([{"text": words_of(rng, length)} for length in lengths])


def lengths_of_words(completions, **columns):
    """A reward function that TRL's scripts import by its name."""
    return [len(set(completion.split())) / 8 for completion in completions]


ROLLS_OUT = {
    "reward_funcs": [f"{__name__}.lengths_of_words"],
    "num_generations": 4,
    "max_completion_length": 12,
}
WHOLE = {"max_length": None}
# By command: data, further options, the cap by which some of the data need two ranks, and whether
# one process can stand beside two.
CASES = {
    "sft": (texts, WHOLE, 60, True),
    "dpo": (pairs, WHOLE, 30, True),
    "reward": (pairs, WHOLE, 30, True),
    "kto": (labelled, WHOLE, 30, False),  # its loss reads means of a rank's batch
    "grpo": (prompts, ROLLS_OUT, 14, False),  # ranks draw other samples
    "rloo": (prompts, ROLLS_OUT, 14, False),
    "distillation": (prompts, {"max_completion_length": 12}, 14, False),
}


def write_inputs(folder, command, steps):
    """Save a model, a tokenizer and data. Return options as a user of TRL has them."""
    make, options, _, _ = CASES[command]
    if command == "reward":
        model = classifier(LlamaForSequenceClassification, 1, torch.float64)
    else:
        model = tiny_llama(pad_token_id=0)
    model.save_pretrained(folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    make(ROWS).to_json(folder / "data/train.jsonl")
    if command == "distillation":
        tiny_llama(seed=1, pad_token_id=0).save_pretrained(folder / "teacher")
        options = options | {"teacher_model_name_or_path": str(folder / "teacher")}
    return options | {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "data"),
        "dtype": "auto",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
        "max_steps": steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def run_command(rank, world_size, folder, command, name, options):
    """Run TRL's script with these options, with hf_flexseq if there are some of it."""
    datasets.disable_progress_bars()
    config = folder / f"{name}.yaml"
    if rank == 0:
        config.write_text(yaml.dump({**options, "output_dir": str(folder / name)}))
    torch.distributed.barrier()
    words = ["--config", str(config)]
    if "cost_model" in options:
        main([command, *words])
    else:
        sys.argv = [command, *words]
        runpy.run_module(f"trl.scripts.{command}", run_name="__main__")


def trained(world_size, folder, command, name, options):
    """The weights that a run saves."""
    run_ranks(run_command, world_size, folder, command, name, options, seconds=150)
    return load_file(folder / name / "model.safetensors")


def weights_apart(folder, command, steps):
    """How far two planned ranks end from TRL's own script, over the update; and the log of ours.

    TRL's script runs on one process with the same batch, or on two where that is another loss.
    """
    options = write_inputs(folder, command, steps)
    trace = str(folder / "trace.jsonl")
    _, _, cap, on_one = CASES[command]
    batch = 4
    stock_ranks = 1 if on_one else 2
    own = options | {"per_device_train_batch_size": batch * 2 // stock_ranks}
    stock = trained(stock_ranks, folder, command, "stock", own)
    options |= OPTIONS | {"max_tokens_per_rank": cap, "plan_trace": trace}
    own = options | {"per_device_train_batch_size": batch}
    ours = trained(2, folder, command, "ours", own)
    start = load_file(folder / "model/model.safetensors")
    plans = [json.loads(line) for line in Path(trace).read_text().splitlines()]
    return distance(stock, ours) / distance(stock, start), plans


COMMANDS = [one.name for one in get_commands() if isinstance(one, TrainingCommand)]
STEPS = [("sft", 3), *(pytest.param(one, 20, marks=pytest.mark.nightly) for one in COMMANDS)]


@pytest.mark.processes
@pytest.mark.parametrize("command, steps", STEPS)
def test_two_planned_ranks_end_with_the_weights_of_the_script(
    command, steps, tmp_path, monkeypatch
):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    apart, plans = weights_apart(tmp_path, command, steps)
    assert len(plans) == steps
    micro_batches = [one for plan in plans for one in plan["micro_batches"]]
    assert any(len(group["ranks"]) == 2 for one in micro_batches for group in one["groups"])
    print(f"{command}, {steps} steps: {apart:.1e} of the update")
    assert apart < 1e-6


# ---- options

PLAIN = "learning_rate: 1e-3"
TRAINING = ("--output_dir", "out", "--use_cpu", "true", "--bf16", "false")


def parsed(tmp_path, yaml_text, *words, command="sft"):
    config = tmp_path / "config.yaml"
    config.write_text(yaml_text)
    return parse(command, ["--config", str(config), *TRAINING, *words])


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_both_are_read_from_a_file_and_the_command_line_wins(command, tmp_path):
    text = "learning_rate: 1e-3\nlookahead: 2\nplanner: static\nsp_degree: 2"
    *of_script, options = parsed(tmp_path, text, "--lookahead", "3", command=command)
    assert len(of_script) == 4
    assert of_script[1].learning_rate == 1e-3
    assert options == FlexSeqArguments(lookahead=3, planner="static", sp_degree=2)


def test_every_training_command_of_trl_is_known(monkeypatch, capsys):
    assert set(COMMANDS) <= set(TRAINERS)
    monkeypatch.setitem(TRAINERS, "older", "OlderTrainer")
    with pytest.raises(SystemExit, match="2"):
        main(["older"])
    assert f"error: TRL {trl.__version__} has no command 'older'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words, message",
    [
        ("max_lenght: 7", "", "unknown option 'max_lenght', did you mean 'max_length'?"),
        (PLAIN, "--plannner=auto", "unknown option 'plannner', did you mean 'planner'?"),
        (PLAIN, "a_word", "'a_word' belongs to no option"),
        ("num_processes: 2", "", "write --num_processes between `accelerate launch` and -m"),
        ("accelerate_config: fsdp2", "", "write --config_file between `accelerate launch` and -m"),
        ("deterministic: true", "", "deterministic was removed"),
        ("planner: static", "", "needs sp_degree"),
        ("max_tokens_per_rank: many", "", "invalid int value: 'many'"),
        ("pipeline_parallel_size: 2", "", "pipeline_parallel_size=2: TRL's scripts load"),
        ("a: [", "", "while parsing a flow node"),
    ],
)
def test_a_mistake_ends_the_process_with_one_line(text, words, message, tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["sft", "--config", str(config), *TRAINING, *words.split()])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ")
    assert message in said


@pytest.mark.parametrize("argv", [[], ["sftt"]])
def test_a_command_is_needed(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "error: expected a command, one of distillation, dpo," in capsys.readouterr().err


def test_trl_has_its_own_trainer_again_after_a_run():
    stock = trl.SFTTrainer
    with planning("SFTTrainer", FlexSeqArguments()):
        assert trl.SFTTrainer.__mro__[1] is FlexSeqMixin
        assert issubclass(trl.SFTTrainer, stock)
    assert trl.SFTTrainer is stock
