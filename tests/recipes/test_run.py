"""What recipes do around their training: where a run starts, what it prints, and how it ends."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import dpo
import grpo
import launch
import run
from arguments import ModelArguments, PreferenceArguments
from hf_flexseq import PlanInfeasible
from model import load_base
from tests.programs import ROOT

# ---- where a run starts


def args_for(folder, asked=None):
    return SimpleNamespace(
        output_dir=str(folder), resume_from_checkpoint=asked, plan_trace=None, process_index=0
    )


def test_a_run_goes_on_from_its_last_checkpoint_unless_told_otherwise(tmp_path):
    assert run.checkpoint_to_resume(args_for(tmp_path / "not-there")) is None
    assert run.checkpoint_to_resume(args_for(tmp_path)) is None
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        run.checkpoint_to_resume(args_for(tmp_path, "true"))
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    last = str(tmp_path / "checkpoint-10")
    for asked, found in {None: last, "true": last, "false": None, "a/path": "a/path"}.items():
        assert run.checkpoint_to_resume(args_for(tmp_path, asked)) == found


def test_only_a_new_run_starts_a_new_trace(tmp_path):
    trace = tmp_path / "plan_trace.jsonl"
    trace.write_text("{}\n")
    args = args_for(tmp_path)
    run.start_trace(args, anew=False)
    assert (args.plan_trace, trace.exists()) == (str(trace), True)
    run.start_trace(args, anew=True)
    assert not trace.exists()


NEW = {"model_config": {"model_type": "llama"}}


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launch.check_world(SimpleNamespace(world_size=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch.check_world(SimpleNamespace(world_size=2))
    with pytest.raises(ValueError, match="2 processes were launched, but this one sees 1: launch"):
        launch.check_world(SimpleNamespace(world_size=1))


def test_the_cpu_is_used_where_there_is_nothing_better(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    for kind, options in ((None, {"use_cpu": True}), ("mps", {"use_cpu": True}), ("cuda", {})):
        device = kind and SimpleNamespace(type=kind)
        monkeypatch.setattr(
            "torch.accelerator.current_accelerator", lambda check_available, found=device: found
        )
        assert launch.device_defaults() == options


@pytest.mark.parametrize("name", launch.ALLOCATOR_VARIABLES)
def test_segments_expand_on_a_gpu_unless_the_environment_says_otherwise(monkeypatch, capsys, name):
    for variable in launch.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    with monkeypatch.context() as own:
        own.setenv(name, "backend:native")
        launch.device_defaults()
        assert os.environ[name] == "backend:native"
        assert not capsys.readouterr().out
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that the test's end restores it
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    launch.device_defaults()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "expandable_segments:True" in capsys.readouterr().out


# ---- models

TINY = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
}


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path, tokenizer):
    LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=200)).save_pretrained(tmp_path)
    args = ModelArguments(model_name_or_path=str(tmp_path))
    with pytest.raises(ValueError, match="has 288 tokens, and .* embeds 200: name the tokenizer"):
        load_base(args, tokenizer)


def test_the_reference_of_a_new_model_has_the_same_weights(tokenizer):
    model_args = ModelArguments(model_config=TINY)
    training = SimpleNamespace(seed=3, precompute_ref_log_probs=False)
    set_seed(training.seed)
    model = load_base(model_args, tokenizer)
    reference = dpo.load_reference(model_args, training, tokenizer)
    assert reference is not model
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)
    adapters = ModelArguments(model_name_or_path="some/model", lora_r=8)
    assert dpo.load_reference(adapters, training, tokenizer) is None
    training.precompute_ref_log_probs = True
    assert dpo.load_reference(model_args, training, tokenizer) is None


def test_the_reference_of_a_divergence_is_the_revision_that_was_named():
    training = SimpleNamespace(beta=0.1, model_init_kwargs=None)
    for options, kwargs in (
        ({}, None),
        ({"model_revision": "v2", "lora_r": 8}, None),
        ({"model_revision": "v2"}, {"revision": "v2"}),
    ):
        named = ModelArguments(model_name_or_path="some/model", **options)
        grpo.find_reference(training, named)
        assert training.model_init_kwargs == kwargs
    new = ModelArguments(**NEW)
    grpo.find_reference(SimpleNamespace(beta=0.0), new)
    with pytest.raises(ValueError, match="beta=0.1: .* give model_name_or_path, or set beta to 0"):
        grpo.find_reference(training, new)


# ---- how it ends


def test_a_sequence_that_fits_nowhere_ends_a_run_with_one_line(capsys):
    def infeasible(**options):
        raise PlanInfeasible("sequence 0 has 9 tokens")

    trainer = SimpleNamespace(args=SimpleNamespace(disable_tqdm=True), train=infeasible)
    with pytest.raises(SystemExit, match="2"):
        run.train(trainer, None, summary=None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: sequence 0 has 9 tokens")


def test_data_that_cannot_be_used_ends_a_run_with_one_line(capsys):
    args = SimpleNamespace(process_index=0, main_process_first=nullcontext)
    data = PreferenceArguments(dataset="no-such.jsonl")
    with pytest.raises(SystemExit, match="2"):
        run.prepare(None, data, args, made={}, texts_of=None, to_rows=None)
    said = capsys.readouterr().err
    assert said == "error: dataset='no-such.jsonl': no such file or folder\n"


def test_options_that_do_not_go_together_are_one_line(capsys):
    config = str(ROOT / "recipes/quickstart/grpo.yaml")
    with pytest.raises(SystemExit, match="2"):
        grpo.main(["--config", config, "--beta", "0.1"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: beta=0.1: TRL loads the reference by name")
