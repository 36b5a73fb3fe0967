"""Checkpoints of models that `DistributedConfig` has sharded: a run goes on from them, to the bit
on the same ranks, and within rounding on others."""

import gc
import json
import os
import random
import re
import shutil
import signal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    KimiLinearForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_flexseq import FlexSeqArguments, FlexSeqCallback
from hf_flexseq.checkpoints import optimizer
from hf_flexseq.checkpoints.manifest import MANIFEST, MARKER, inspect, is_torn
from hf_flexseq.checkpoints.optimizer import FOLDER
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.trainer.checkpoint_forms import load_weights
from tests.hf import experts
from tests.hf.plain import flexseq_trainer, logged, training_arguments
from tests.hf.tiny import SIZES, documents, refused
from tests.hf.trainers import update_error
from tests.ranks import run_cases, run_ranks

SAVED_AT = 1
STEPS = 2
FIRST = f"checkpoint-{SAVED_AT}"
ROWS = 8
KINDS = {"experts": Qwen3MoeForCausalLM, "dense": LlamaForCausalLM}
LORA = experts.ADAPTERS["attention and experts"]
EP4 = {"fsdp_size": 4, "ep_size": 4}
EP2 = {"fsdp_size": 2, "ep_size": 2}
HSDP = {"fsdp_size": 2, "dp_replicate_size": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def save_models(folder):
    """Save the models as they are before training; return the folder."""
    experts.make("Qwen3Moe", num_hidden_layers=1).float().save_pretrained(folder / "experts")
    torch.manual_seed(0)
    # rows that the ranks divide: tied ones are trained wrongly otherwise
    sizes = {**SIZES, "num_hidden_layers": 1, "vocab_size": 64}
    dense = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    dense.save_pretrained(folder / "dense")
    return folder


def loaded(path, kind, layout, *, spoilt=False):
    """A model, sharded unless `layout` is None; of a spoilt one no weight is right."""
    if layout is None:
        model = KINDS[kind].from_pretrained(path, experts_implementation="eager")
    else:
        model = experts.spread(path, KINDS[kind], layout, torch.float32)
    if spoilt:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    return model


def trainer_of(model, folder, ranks, **options):
    """Of four sequences a step, on any number of ranks. It saves after its first step and at its
    end."""
    defaults = {"save_strategy": "steps", "save_steps": SAVED_AT, "max_steps": STEPS}
    defaults |= {"optim": "adamw_torch", "weight_decay": 0.1, "lookahead": 0}
    data = documents([1 + (i * i * 7) % 30 for i in range(ROWS)])
    options = {"batch": 4 // ranks, "train_dataset": data, **defaults, **options}
    return flexseq_trainer(folder, model=model, **options)


def trained(rank, ranks, models, folder, kind, layout, resume=None, options=None):
    """What a run has at its end: weights, the optimizer's state, and the rest. options: of the
    trainer, and whether it trains an adapter."""
    options = dict(options or {})
    resumes = resume is not None
    has_adapter = options.pop("lora", False)
    model = loaded(models / kind, kind, layout, spoilt=resumes and not has_adapter)
    if has_adapter:
        model = adapted(model, int(resumes))
    trainer = trainer_of(model, folder, ranks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return found(trainer)


def adapted(model, seed):
    """With an adapter by random numbers of a seed."""
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))


def found(trainer):
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    state = {}
    for parameter, values in trainer.optimizer.optimizer.state.items():
        for key, value in values.items():
            state[f"{names[id(parameter)]} {key}"] = copied(value)
    weights = {n: copied(p) for n, p in trainer.model.named_parameters() if p.requires_grad}
    rest = (
        logged(trainer.state.log_history, "loss"),
        trainer.lr_scheduler.state_dict(),
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
    )
    return weights, state, rest


def copied(tensor):
    return whole(tensor.detach()).numpy().copy()


def are_equal(first, second):
    return first.keys() == second.keys() and all((first[n] == second[n]).all() for n in first)


def assert_same_bits(wanted, found):
    """On every rank."""
    for run, other in zip(wanted, found, strict=True):
        for values, others in zip(run[:2], other[:2], strict=True):
            assert values
            assert are_equal(values, others)
        assert run[2] == other[2]


def error(models, kind, wanted, found):
    """Of the update, relative."""
    return error_of(KINDS[kind].from_pretrained(models / kind), wanted, found)


def error_of(model, wanted, found):
    """Of the update of `model`, as it was before training."""
    before = {n: copied(p) for n, p in model.named_parameters() if p.requires_grad}
    return update_error(before, wanted[0], found[0])


# ---- killed while it saves


def killed_run(rank, ranks, models, folder, layout):
    """A run of which rank 1 is killed when the second checkpoint's state is half written."""
    if rank == 1:
        write = optimizer._write_part

        def killed(path, *args, **kwargs):
            write(path, *args, **kwargs)
            if f"checkpoint-{STEPS}" in str(path):
                os.truncate(path, 100)
                os.kill(os.getpid(), signal.SIGKILL)

        optimizer._write_part = killed
    return trained(rank, ranks, models, folder, "experts", layout)


# ---- resuming


def each(rank, ranks, function, *args):
    """Cases of several functions, on the same forked ranks."""
    return function(rank, ranks, *args)


@pytest.fixture(scope="module")
def four(models, tmp_path_factory):
    """On four ranks: a folder with the checkpoint of a run that was killed as it saved the next
    one, a whole run, and one that goes on after the kill."""
    folder = tmp_path_factory.mktemp("four")
    with pytest.raises(AssertionError, match="the process died"):
        run_ranks(killed_run, 4, models, folder / "killed", EP4, seconds=120)
    assert is_torn(folder / "killed" / f"checkpoint-{STEPS}")
    shutil.copytree(folder / "killed" / FIRST, folder / FIRST)
    cases = [
        (models, folder / "whole", "experts", EP4),
        (models, folder / "killed", "experts", EP4, True),
    ]
    return folder, *run_cases(trained, 4, cases, seconds=120)


@pytest.fixture(scope="module")
def two(models, four, tmp_path_factory):
    """On two ranks: experts that go on from those on four; a model with tied embeddings, a whole
    run and one that goes on; and the lines with which changed checkpoints are refused."""
    folder = tmp_path_factory.mktemp("two")
    checkpoint = four[0] / FIRST
    dense = (models, folder / "dense", "dense", {"fsdp_size": 2})
    cases = [
        (trained, models, folder / "experts", "experts", EP2, str(checkpoint)),
        (trained, *dense),
        (trained, *dense, str(folder / "dense" / FIRST)),
        (refusals, models, checkpoint, folder),
    ]
    return run_cases(each, 2, cases, seconds=120)


@pytest.mark.processes
def test_killed_while_saving_it_goes_on_with_the_same_bits(four):
    """Weights, the optimizer's state, the scheduler, losses and random numbers; from the newest
    whole checkpoint."""
    folder, whole_run, after_kill = four
    assert_same_bits(whole_run, after_kill)
    assert inspect(folder / "killed" / f"checkpoint-{STEPS}").problem is None


@pytest.mark.processes
def test_a_dense_model_goes_on_with_the_same_bits(two):
    assert_same_bits(two[1], two[2])


@pytest.mark.processes
def test_on_other_ranks_it_goes_on_as_before(models, four, two, tmp_path):
    """With other expert groups, and on one process without any shards."""
    folder, whole_run, _ = four
    assert error(models, "experts", whole_run[0], two[0][0]) < 1e-6
    alone = trained(0, 1, models, tmp_path, "experts", None, str(folder / FIRST))
    assert error(models, "experts", whole_run[0], alone) < 1e-6


@pytest.mark.processes
def test_a_checkpoint_is_an_ordinary_model_and_the_ranks_share_the_optimizers_state(four):
    checkpoint = four[0] / "whole" / f"checkpoint-{STEPS}"
    weights, state, _ = four[1][0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert are_equal(weights, {name: copied(p) for name, p in model.named_parameters()})
    assert not list(checkpoint.glob("*.pt"))
    files = json.loads((checkpoint / FOLDER / "index.json").read_text())["tensors"]
    assert len(set(files.values())) >= 4
    left = dict(state)
    for file in set(files.values()):
        with safe_open(checkpoint / FOLDER / file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                name, _, part = key.removeprefix("state.").rpartition(".")
                assert files[key] == file
                assert (opened.get_tensor(key).numpy() == left.pop(f"{name} {part}")).all()
    assert not left


# ---- more layouts and phases


LAYOUTS = [
    (2, "experts", EP2),
    (2, "experts", {"fsdp_size": 2}),
    (2, "dense", {"fsdp_size": 2}),
    (4, "experts", {"fsdp_size": 4, "ep_size": 2}),
    (4, "experts", HSDP | {"ep_size": 2}),
    (4, "dense", HSDP),
]


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "kind", "layout"), LAYOUTS)
def test_a_layout_goes_on_from_itself_and_from_others(models, four, tmp_path, ranks, kind, layout):
    """From one process too, whose optimizer the Trainer has saved, and the other way round."""
    wanted = trained(0, 1, models, tmp_path / "one", kind, None)
    assert (tmp_path / "one" / FIRST / "optimizer.pt").is_file()
    cases = [
        (models, tmp_path / "whole", kind, layout),
        (models, tmp_path / "then", kind, layout, str(tmp_path / "whole" / FIRST)),
        (models, tmp_path / "then", kind, layout, str(tmp_path / "one" / FIRST)),
    ]
    if kind == "experts":
        cases.append((models, tmp_path / "then", kind, layout, str(four[0] / FIRST)))
    by_case = run_cases(trained, ranks, cases, seconds=170)
    assert_same_bits(by_case[0], by_case[1])
    alone = trained(0, 1, models, tmp_path / "then", kind, None, str(tmp_path / "whole" / FIRST))
    for found in (*(results[0] for results in by_case), alone):
        assert error(models, kind, wanted, found) < 1e-6


@pytest.mark.nightly
@pytest.mark.processes
def test_adapters_on_a_sharded_model_go_on(models, tmp_path):
    first = {ranks: str(tmp_path / str(ranks) / FIRST) for ranks in (1, 2)}
    # AdamW makes much of the rounding of a gradient that is smaller than its epsilon
    lora = {"lora": True, "adam_epsilon": 1e-4}
    alone = trained(0, 1, models, tmp_path / "1", "experts", None, None, lora)
    cases = [(models, tmp_path / "2", "experts", EP2, resume, lora) for resume in (None, first[2])]
    cases.append((models, tmp_path / "then", "experts", EP2, first[1], lora))
    whole_run, again, of_one = run_cases(trained, 2, cases)
    assert_same_bits(whole_run, again)
    of_two = trained(0, 1, models, tmp_path / "then", "experts", None, first[2], lora)
    layout = {"fsdp_size": 4, "ep_size": 2}
    on_four = (models, tmp_path / "then", "experts", layout, first[2], lora)
    (by_four,) = run_cases(trained, 4, [on_four])
    before = adapted(loaded(models / "experts", "experts", None), 0)
    for other in (alone, of_two, of_one[0], by_four[0]):
        assert error_of(before, whole_run[0], other) < 1e-6


def best(rank, ranks, models, folder):
    """Trained with a rate at which it gets worse. The losses of evaluations, and after the best
    model is loaded, and its checkpoint."""
    options = {"learning_rate": 10.0, "load_best_model_at_end": True, "max_steps": 3}
    for what in ("eval", "save"):
        options |= {f"{what}_strategy": "steps", f"{what}_steps": 1}
    model = loaded(models / "experts", "experts", EP2)
    data = documents([5, 9, 13, 8])
    trainer = trainer_of(model, folder, ranks, eval_dataset=data, **options)
    trainer.train()
    losses = logged(trainer.state.log_history, "eval_loss")
    return losses, trainer.evaluate()["eval_loss"], trainer.state.best_model_checkpoint


@pytest.mark.nightly
@pytest.mark.processes
def test_the_best_model_is_loaded_at_the_end(models, tmp_path):
    for losses, again, checkpoint in run_ranks(best, 2, models, tmp_path):
        assert min(losses) < max(losses)
        assert again == pytest.approx(min(losses), rel=1e-6)
        assert checkpoint.endswith(f"checkpoint-{1 + losses.index(min(losses))}")


# ---- the constructor


class SavesOtherwise(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)


def constructed(rank, ranks, models, folder):
    """What trainers of one sharded model say and do about its checkpoints."""
    model = loaded(models / "experts", "experts", EP2)
    options = {"max_steps": 1, "save_steps": 1}
    only = trainer_of(model, folder / "only", ranks, save_only_model=True, **options)
    only.train()
    assert not (folder / "only" / "checkpoint-1" / FOLDER).exists()
    with refused("save_on_each_node=True with a model that Distri.*: all ranks", ValueError):
        trainer_of(model, folder, ranks, save_on_each_node=True)

    # a stock Trainer refuses resuming before the callback is there
    planned = FlexSeqArguments(cost_model="estimate", lookahead=0)
    for kind in (Trainer, SavesOtherwise):
        args = training_arguments(
            TrainingArguments, folder / "stock", batch=1, accumulation=1, max_steps=1
        )
        args.save_strategy, args.save_only_model, args.save_steps = "steps", True, 1
        stock = kind(model=model, args=args, train_dataset=documents([5, 9]))
        if kind is SavesOtherwise:
            with refused("SavesOtherwise._save_optimizer_and_scheduler would not be called for"):
                stock.add_callback(FlexSeqCallback(stock, planned))
            continue
        stock.add_callback(FlexSeqCallback(stock, planned))
        stock.args.save_only_model = False
        stock.train()
        assert inspect(folder / "stock" / "checkpoint-1").problem is None
        assert (folder / "stock" / "checkpoint-1" / FOLDER / "index.json").is_file()


@pytest.mark.nightly
@pytest.mark.processes
def test_save_only_model_is_honoured_and_the_users_own_code_is_called_or_refused(models, tmp_path):
    run_ranks(constructed, 2, models, tmp_path)


# ---- checkpoints that do not fit


OTHER_MODELS = {
    "holds 16 experts in a layer, but this run has 8$": {"num_experts": 16},
    r"holds \S+ as \[\d+, \d+\], but this run has \[\d+, \d+\]$": {"vocab_size": 90},
    r"has model.layers.\d\S+, .* and \d+ others, which this model does not have$": {
        "num_hidden_layers": 5
    },
    r"has no model.layers.\d\S+, .* and \d+ others, which this model has$": {
        "num_hidden_layers": 1
    },
}


@pytest.mark.parametrize("said", OTHER_MODELS)
def test_weights_of_another_model_are_refused_in_one_line(tmp_path, said):
    experts.make("Qwen3Moe", **OTHER_MODELS[said]).save_pretrained(tmp_path)
    with refused(said, ValueError):
        load_weights(experts.make("Qwen3Moe"), str(tmp_path), Communicator())


def test_an_adapter_is_no_checkpoint_of_the_whole_model(tmp_path):
    model = experts.make("Qwen3Moe")
    get_peft_model(experts.make("Qwen3Moe"), LoraConfig(**LORA)).save_pretrained(tmp_path)
    with refused("holds an adapter, but this run trains the whole model$", ValueError):
        load_weights(model, str(tmp_path), Communicator())


def mixed_up(rank, ranks, path, folder):
    """Whether a model is read as it was saved whose rows transformers would mix up."""
    model = experts.spread(path, KimiLinearForCausalLM, {"fsdp_size": 2})
    before = {name: copied(p) for name, p in model.named_parameters()}
    model.save_pretrained(folder, is_main_process=rank == 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    load_weights(model, str(folder), Communicator())
    assert any(isinstance(p, DTensor) for p in model.parameters())
    left = [one for one in gc.get_objects() if isinstance(one, KimiLinearForCausalLM)]
    assert len(left) == 1, "the second model is freed"
    return are_equal(before, {name: copied(p) for name, p in model.named_parameters()})


@pytest.mark.processes
def test_rows_that_transformers_would_mix_up_are_read_right(tmp_path):
    path = experts.save(experts.Training(kind="plain", family="KimiLinear"), tmp_path)
    assert run_ranks(mixed_up, 2, path, tmp_path / "saved") == [True, True]


def without_state(folder):
    shutil.rmtree(folder / FOLDER)


def of_accelerate(folder):
    without_state(folder)
    (folder / "optimizer.bin").touch()


# What is done to a checkpoint, and the line with which a run refuses it. Others are those of
# `tests/checkpoints/test_optimizer_files.py`.
CHANGES = {
    lambda folder: (folder / FOLDER / "scheduler.json").unlink(): "but none of the scheduler's$",
    of_accelerate: "has the optimizer.s state in optimizer.bin, which a model that Distributed",
}


def refusals(rank, ranks, models, checkpoint, folder):
    """The lines by which a run refuses a checkpoint that was changed."""
    lines = []
    model = loaded(models / "experts", "experts", EP2)
    for number, change in enumerate(CHANGES):
        changed = folder / str(number)
        if rank == 0:
            shutil.copytree(checkpoint, changed)
            (changed / MARKER).unlink()
            (changed / MANIFEST).unlink()
            change(changed)
        torch.distributed.barrier()
        trainer = trainer_of(model, folder / "then", ranks)
        with pytest.raises(ValueError) as raised:
            trainer.train(resume_from_checkpoint=str(changed))
        lines.append(str(raised.value))
    return lines


@pytest.mark.processes
def test_no_checkpoint_goes_on_with_a_part_of_its_state(two):
    for lines in two[3]:
        for line, said in zip(lines, CHANGES.values(), strict=True):
            assert re.search(said, line), line
            assert "\n" not in line
