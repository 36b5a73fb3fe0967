"""Checkpoints of pipelines: ordinary files, from which a run goes on with any number of stages,
with and without FSDP2."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_flexseq.checkpoints.optimizer import FOLDER
from hf_flexseq.checkpoints.optimizer_files import named_state
from hf_flexseq.checkpoints.weight_files import files_by_tensor
from tests.hf.test_reach import make_model
from tests.hf.tiny import VOCAB
from tests.hf.trainers import update_error
from tests.pipeline.test_trainer import (
    FSDP,
    LAYERS,
    TWO_PER_RANK,
    joined,
    make_trainer,
    model_of,
    saved_run,
    weights_of,
)
from tests.ranks import run_cases, run_ranks

pytestmark = pytest.mark.processes

OPTIONS = {"optim": "adamw_torch", "max_steps": 2, "weight_decay": 0.1}
SAVED = {**OPTIONS, "max_steps": 3, "batch": 1}
STALE = (  # of earlier runs, with and without a pipeline
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    f"{FOLDER}/.metadata",
    f"{FOLDER}/__0_0.distcp",
    f"{FOLDER}/state-00003-of-00004.safetensors",
    f"{FOLDER}/index.json.partial",
)


def run_from(folder, ranks, stages, options=None, *, tied=True, resume=None, make=model_of):
    """The weights of a run, which saves after each of its two steps, or goes on from the first.
    The sequences per step stay the same: two ranks draw twice as many each as four."""
    options = {**OPTIONS, "batch": 4 // ranks, **(options or {})}
    return joined(run_ranks(saved_run, ranks, folder, stages, tied, options, resume, make))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_is_an_ordinary_one_and_the_optimizers_state_has_a_file_for_each_stage(
    tmp_path, tied
):
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / FOLDER).mkdir(parents=True)
    for name in STALE:
        (checkpoint / name).write_text("left by an earlier run")
    weights = joined(run_ranks(saved_run, 2, tmp_path, 2, tied, SAVED))

    # 1. the model
    assert sorted(p.name for p in checkpoint.glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    check_weights(checkpoint, weights)

    # 2. the optimizer's state, in which a tied tensor is stored once
    folder = checkpoint / FOLDER
    names = ["state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"]
    found = sorted(path.name for path in folder.iterdir())
    assert found == ["index.json", "scheduler.json", *names]
    assert not list(checkpoint.glob("*.pt"))
    held = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as opened:
            assert not held.keys() & set(opened.keys())
            held.update(dict.fromkeys(opened.keys(), name))
    assert json.loads((folder / "index.json").read_text())["tensors"] == held
    trained = {name for name, _ in model_of(tied).named_parameters()}
    assert {key for key in held if key.endswith(".exp_avg")} == {
        f"state.{name}.exp_avg" for name in trained
    }
    assert named_state(folder).value("param_groups.model.norm.weight.betas") == [0.9, 0.999]
    assert held["state.model.embed_tokens.weight.exp_avg"] == names[0]


def check_weights(checkpoint, weights):
    """A checkpoint is a model of transformers' own with these weights."""
    loaded, info = AutoModelForCausalLM.from_pretrained(
        checkpoint, output_loading_info=True, dtype=torch.float64
    )
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.config._attn_implementation == "sdpa"
    for name, parameter in loaded.named_parameters():
        assert (weights[name] == parameter.detach().numpy()).all(), name


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param((2, 2), [(4, 2), (1, 1)], marks=pytest.mark.nightly),
        pytest.param((1, 1), [(2, 2)], marks=pytest.mark.nightly),
        pytest.param((1, 1), [(4, 2, FSDP)], marks=pytest.mark.nightly),
        ((4, 2, FSDP), [(2, 2)]),
        ((2, 2, TWO_PER_RANK), [(2, 2)]),
    ],
)
def test_resumed_on_any_number_of_stages_it_goes_on_as_before(tmp_path, first, then):
    """By ranks, stages and options."""
    before = {n: p.detach().numpy() for n, p in model_of(True).named_parameters()}
    weights = run_from(tmp_path, *first)
    check_weights(tmp_path / "checkpoint-2", weights)
    for case in then:
        found = run_from(tmp_path, *case, resume=f"{tmp_path}/checkpoint-1")
        assert update_error(before, weights, found) < 1e-8, case


def mixture_of(tied, seed=0):
    """A mixture of experts, whose files have a tensor per expert."""
    return make_model("Qwen3Moe", num_hidden_layers=LAYERS)


def test_experts_are_read_and_written_as_transformers_does(tmp_path):
    weights = run_from(tmp_path, 1, 1, make=mixture_of)
    before = {n: p.detach().numpy() for n, p in mixture_of(False).named_parameters()}
    checkpoint = f"{tmp_path}/checkpoint-1"
    found = run_from(tmp_path / "stages", 2, 2, make=mixture_of, resume=checkpoint)
    assert update_error(before, weights, found) < 1e-5
    names = [set(files_by_tensor(tmp_path / of / "checkpoint-2")) for of in ("", "stages")]
    assert names[0] == names[1]
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in names[0]


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    smaller = model_of(True, num_hidden_layers=LAYERS - 1)
    smaller.save_pretrained(tmp_path / "checkpoint-1")
    message = rf"ValueError: .* has no model.layers.{LAYERS - 1}.*, which this model has"
    with pytest.raises(AssertionError, match=message):
        run_from(tmp_path, 2, 2, resume=f"{tmp_path}/checkpoint-1")


def run_of_layers(rank, world_size, folder, layers, resume=None):
    model = model_of(False, num_hidden_layers=layers)
    trainer = make_trainer(model, folder, 2, save_strategy="steps", save_steps=1, **SAVED)
    trainer.train(resume_from_checkpoint=resume)


def test_stages_refuse_the_state_of_more_layers_than_they_have_together(tmp_path):
    """The weights of more layers are not refused: each stage reads its own."""
    run_ranks(run_of_layers, 2, tmp_path, LAYERS)
    message = r"has optimizer state of model.layers.2\S+, .* which this run does"
    with pytest.raises(AssertionError, match=message):
        run_ranks(run_of_layers, 2, tmp_path, LAYERS - 1, f"{tmp_path}/checkpoint-1")


# ---- models that are loaded stage by stage


def loaded_run(rank, world_size, folder, loads, options):
    """Weights after a step of a model that is loaded stage by stage, or cut in place."""
    model = str(folder) if loads else AutoModelForCausalLM.from_pretrained(folder)
    trainer = make_trainer(model, folder, 2, max_steps=1, **options)
    if loads:
        assert len(list(trainer.model.parameters())) < 2 + 9 * LAYERS
    trainer.train()
    return (weights_of(trainer),)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_loaded_stage_by_stage(tmp_path, tied):
    """Its norms are transformers' own, in float32."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)).double()
    model.save_pretrained(tmp_path)
    options = {} if tied else TWO_PER_RANK
    cases = [(tmp_path, loads, options) for loads in (True, False)]
    found, wanted = (joined(results) for results in run_cases(loaded_run, 2, cases))
    assert wanted.keys() == found.keys()
    assert all((wanted[name] == found[name]).all() for name in wanted)
    assert any((wanted[name] != p.detach().numpy()).any() for name, p in model.named_parameters())
