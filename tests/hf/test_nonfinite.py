"""A NaN in one gradient of one rank ends training on all ranks, before anything is saved."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer
from transformers.distributed import DistributedConfig

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqEngine
from hf_flexseq.distributed.reduction import local
from hf_flexseq.steps import rank_step
from tests.hf.test_dispatch_ahead import Behind
from tests.hf.tiny import documents, tiny_llama
from tests.hf.trainers import trainer_of, zero
from tests.ranks import run_ranks

STEPS = 4
POISONED_RANK = 1  # of the last stage in a pipeline
PARAMETER = "model.norm.weight"
OF_KIND = {
    "ddp": {},
    "fsdp2": {"save_only_model": True},  # the Trainer saves nothing else of it
    "pipeline": {"flexseq": {"pipeline_parallel_size": 2}},
    "zero": {},
}
SAVING = {"save_strategy": "steps", "save_steps": 1}
WARNING = {"on_nonfinite": "warn"}
EVERY_STEP = ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4"]


def make_trainer(kind, models, folder, *, on_nonfinite="raise", **settings):
    model = tiny_llama(torch.float32)
    if kind == "fsdp2":
        shards = DistributedConfig(fsdp_size=2)
        model = LlamaForCausalLM.from_pretrained(models, distributed_config=shards)
    settings = {**OF_KIND[kind], "max_steps": STEPS, **settings}
    options = {"lookahead": 0, "on_nonfinite": on_nonfinite, **settings.pop("flexseq", {})}
    return trainer_of(Trainer, folder, flexseq=options, model=model, batch=1, **settings)


def poison(trainer, step):
    """Put a NaN into one gradient of one rank when the backwards of a step are over."""
    finished = trainer.flexseq._finished
    look_at = finished.look_at

    def poisoned(planned, model):
        if planned.number == step and trainer.args.process_index == POISONED_RANK:
            parameters = dict(model.named_parameters())
            name = PARAMETER if PARAMETER in parameters else f"module.{PARAMETER}"
            local(parameters[name].grad)[0] = torch.nan
        look_at(planned, model)

    finished.look_at = poisoned


def outcome(trainer, folder):
    """What training raised, the steps that it counted, and the checkpoints it saved."""
    said = None
    try:
        trainer.train()
    except FloatingPointError as error:
        said = str(error)
    saved = sorted(path.name for path in folder.glob("checkpoint-*"))
    return said, trainer.state.global_step, saved


def poisoned_runs(rank, world_size, folder, kind, runs):
    found = []
    for number, (step, options) in enumerate(runs):
        own = folder / str(number)
        trainer = make_trainer(kind, folder / "model", own, **options)
        poison(trainer, step)
        found.append(outcome(trainer, own))
    return found


# the poisoned step, options; then the steps that are counted and what is saved
SAVED = (1, SAVING, 2, ["checkpoint-1"])
RUNS = [
    SAVED,
    (1, {}, 2, []),  # the next step runs, but its optimizer does not
    (3, {}, 4, []),  # the last one
    (1, SAVING | WARNING, 4, EVERY_STEP),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "runs"), [("ddp", RUNS), ("fsdp2", [SAVED]), ("pipeline", [SAVED])]
)
def test_all_ranks_name_it_and_save_nothing_afterwards(tmp_path, kind, runs):
    if kind == "fsdp2":
        tiny_llama(torch.float32).save_pretrained(tmp_path / "model")
    given = [run[:2] for run in runs]
    for found in run_ranks(poisoned_runs, 2, tmp_path, kind, given):
        for (said, counted, saved), (step, options, *wanted) in zip(found, runs, strict=True):
            assert [counted, saved] == wanted, (step, options)
            if options.get("on_nonfinite") == "warn":
                assert said is None
            else:
                where = f"NaN or infinity in the gradients of {PARAMETER};"
                assert said.startswith(f"optimizer step {step}, counted from 0: {where}")


def zero_run(rank, world_size, folder):
    trainer = make_trainer("zero", None, folder, deepspeed=zero(3), **SAVING)
    trainer.model.model.norm.register_forward_hook(poisoned_output(trainer))
    return outcome(trainer, folder)


def to_nan(gradient):
    return gradient * torch.nan


to_nan.__module__ = "torch"  # a hook of the user's that is not linear is refused


def poisoned_output(trainer):
    """A hook that makes the gradient of a module's output NaN in one step on one rank."""

    def hook(module, args, output):
        if trainer.state.global_step == 1 and trainer.args.process_index == POISONED_RANK:
            output.register_hook(lambda gradient: gradient * torch.nan)

    return hook


@pytest.mark.processes
def test_under_zero_the_norm_of_all_gradients_tells(tmp_path):
    for said, counted, saved in run_ranks(zero_run, 2, tmp_path, seconds=120):
        assert "step 1, counted from 0: NaN or infinity in the gradients of all param" in said
        assert "(by DeepSpeed's norm)" in said
        assert counted == 2
        assert saved == ["checkpoint-1"]


# ---- a loop of its own, in one process


def loop(on_nonfinite="raise", *, scaler=None, poisoned=None):
    """The steps that a plain loop ran until it came to its end or raised, and those of its
    optimizer; with what it raised, None for nothing."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler
    args = FlexSeqArguments(lookahead=0, cost_model="estimate", on_nonfinite=on_nonfinite)
    engine = FlexSeqEngine(accelerator, args)
    model = tiny_llama(torch.float32)
    engine.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updates = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    loader = DataLoader(documents([5] * STEPS), collate_fn=DataCollatorForFlexSeq())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ran = 0
    try:
        for number, step in enumerate(engine.steps(loader)):
            if number == poisoned:
                model.model.norm.weight.register_hook(to_nan)
            step.backward(model)
            ran += 1
            optimizer.step()
            optimizer.zero_grad()
    except FloatingPointError as error:
        return ran, len(updates), str(error)
    finally:
        engine.detach()
    return ran, len(updates), None


@pytest.mark.slow
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_loop_of_its_own_raises_a_step_later_and_at_its_end(monkeypatch, is_behind):
    if is_behind:
        monkeypatch.setattr(rank_step, "Stopwatch", Behind)
    assert loop() == (STEPS, STEPS, None)
    assert loop("warn", poisoned=1) == (STEPS, STEPS, None)
    for poisoned, wanted in ((1, 3), (STEPS - 1, STEPS)):
        ran, updates, said = loop(poisoned=poisoned)
        assert (ran, updates) == (wanted, wanted)
        assert f"in the gradients of {PARAMETER};" in said


def test_steps_that_the_loss_scaler_skips_do_not_count():
    """The first scale is far too large, the second is not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
    assert loop(scaler=scaler) == (STEPS, STEPS - 1, None)
