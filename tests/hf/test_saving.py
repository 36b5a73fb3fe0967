"""Checkpoints as the Trainer writes them, and the one that a run goes on from."""

import json
import logging
import re
import shutil
from dataclasses import replace

import pytest
from transformers import Trainer

from hf_flexseq import FlexSeqTrainer
from hf_flexseq.checkpoints.manifest import MANIFEST, MARKER, inspect, is_torn
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.engine import cost_choice as choose
from hf_flexseq.hf.engine import cost_source
from hf_flexseq.hf.engine.cost_choice import CostSubject
from hf_flexseq.hf.trainer import whole_checkpoints
from hf_flexseq.hf.trainer.whole_checkpoints import warn_without_optimizer
from hf_flexseq.memory import device
from tests.hf.plain import flexseq_trainer, logged
from tests.hf.tiny import documents
from tests.ranks import run_ranks

LENGTHS = [1 + (i * i * 7) % 30 for i in range(24)]


def make_trainer(folder, kind=FlexSeqTrainer, **options):
    """On one rank, without a planner's process. Four steps, saved after the second and fourth."""
    defaults = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lookahead": 0}
    data = documents(LENGTHS)
    return flexseq_trainer(folder, kind=kind, train_dataset=data, **{**defaults, **options})


def losses_of(folder, resume=None, **options):
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer.state.log_history, "loss")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a run that came to its end, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, losses_of(folder)


@pytest.fixture
def saved(whole_run, tmp_path):
    """A folder with the checkpoints of that run."""
    shutil.copytree(whole_run[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def tear(checkpoint):
    """As a kill just before the manifest leaves it."""
    (checkpoint / MANIFEST).unlink()


def told_of_files(caplog):
    """What this library has said, but of seconds, which differ from machine to machine."""
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("hf_flexseq")]
    return [message for message in messages if not message.startswith("a step takes")]


# ---- what is written


def test_the_marker_is_the_first_file_and_the_manifest_the_last(tmp_path, monkeypatch):
    seen = []
    folder = tmp_path / "checkpoint-2"

    def noting(name):
        method = getattr(Trainer, name)

        def note(self, output_dir, *args, **kwargs):
            seen.append((name, is_torn(folder), inspect(folder).problem is None))
            return method(self, output_dir, *args, **kwargs)

        monkeypatch.setattr(Trainer, name, note)

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: None)
    while_writing = ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state")
    for name in (*while_writing, "_push_from_checkpoint"):
        noting(name)
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    monkeypatch.setattr(trainer, "push_to_hub", lambda **options: None)
    trainer.train()
    wanted = [(name, True, False) for name in while_writing]
    assert seen[:4] == [*wanted, ("_push_from_checkpoint", False, True)]
    files = json.loads((folder / MANIFEST).read_text())["files"]
    written = {path.name for path in folder.iterdir()}
    assert set(files) == written - {MANIFEST}
    assert {"optimizer.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"} <= written
    assert "save_to_json" not in vars(trainer.state)


def on_a_full_disk(rank, world_size, folder):
    def fail(checkpoint):
        raise OSError("no space left")

    whole_checkpoints.flush_files = fail  # in this rank's process
    with pytest.raises(RuntimeError) as raised:
        make_trainer(folder, max_steps=2).train()
    return str(raised.value)


@pytest.mark.processes
def test_files_that_cannot_be_flushed_are_an_error_of_all_ranks(tmp_path):
    found = run_ranks(on_a_full_disk, 2, tmp_path)
    assert found == ["rank 0, flushing checkpoint-2: OSError: no space left"] * 2
    assert is_torn(tmp_path / "checkpoint-2")


def test_no_callback_of_ours_stands_among_the_users(tmp_path):
    ours, stock = (
        [type(callback) for callback in make_trainer(tmp_path, kind).callback_handler.callbacks]
        for kind in (FlexSeqTrainer, Trainer)
    )
    assert ours == stock


def test_a_whole_checkpoint_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    """Also where only one is to be kept."""
    trainer = make_trainer(tmp_path, save_total_limit=1)
    finish = whole_checkpoints.finish

    def killed_at_the_second(folder, marker):
        if folder.name == "checkpoint-4":
            raise KeyboardInterrupt
        finish(folder, marker)

    monkeypatch.setattr(whole_checkpoints, "finish", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert inspect(tmp_path / "checkpoint-2").problem is None
    assert is_torn(tmp_path / "checkpoint-4")


# ---- what is resumed


def test_the_newest_whole_checkpoint_is_taken_and_the_torn_one_named(saved, whole_run, caplog):
    tear(saved / "checkpoint-4")
    trainer = make_trainer(saved)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._flexseq_resumed.folder == str(saved / "checkpoint-2")
    assert logged(trainer.state.log_history, "loss") == whole_run[1]
    assert told_of_files(caplog) == [
        "going on from checkpoint-2, not from checkpoint-4: torn, it has no "
        "flexseq_manifest.json: saving was interrupted"
    ]


def test_a_named_checkpoint_that_is_not_whole_is_refused(saved):
    tear(saved / "checkpoint-4")
    with pytest.raises(ValueError, match="checkpoint-4: torn, .*; name checkpoint-2 instead$"):
        losses_of(saved, resume=str(saved / "checkpoint-4"))
    (saved / "checkpoint-2" / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(
        ValueError,
        match=r"checkpoint-2: damaged: 'optimizer.pt' has 4 bytes instead of \d+; restore it, or "
        "remove flexseq.json and flexseq_manifest.json to have it taken as it is$",
    ):
        losses_of(saved, resume=str(saved / "checkpoint-2"))
    with pytest.raises(ValueError, match="no whole checkpoint in .* \\(checkpoint-4: torn"):
        losses_of(saved, resume=True)


def test_without_any_checkpoint_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        losses_of(tmp_path, resume=True)
    with pytest.raises(ValueError, match="'nowhere': no such folder"):
        losses_of(tmp_path, resume="nowhere")


@pytest.mark.slow
def test_the_plain_trainers_checkpoint_is_taken_with_one_warning(tmp_path, caplog):
    options = {"batch": 1}  # its collator does not pad
    make_trainer(tmp_path, kind=Trainer, max_steps=2, **options).train()
    losses_of(tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    assert told_of_files(caplog) == [
        f"{tmp_path}/checkpoint-2: no flexseq.json: not written by hf_flexseq, so it is unknown "
        "if it is whole"
    ]


def test_a_checkpoint_without_an_optimizer_says_so(saved, caplog):
    folder = saved / "checkpoint-2"
    for name in (MARKER, MANIFEST, "optimizer.pt"):
        (folder / name).unlink()
    losses_of(saved, resume=str(folder))
    then = "optimizer and learning rate start anew"
    assert f"{folder} has no state of the optimizer: {then}" in told_of_files(caplog)
    (folder / "scheduler.pt").unlink()
    warn_without_optimizer(str(folder), Communicator())
    assert (
        caplog.messages[-1] == f"{folder} has no state of the optimizer and the scheduler: {then}"
    )
    (folder / "optimizer_0").touch()
    warn_without_optimizer(str(folder), Communicator())
    assert caplog.messages[-1] == f"{folder} has no state of the scheduler: {then}"


# ---- the cost model


@pytest.fixture
def estimated(tmp_path, monkeypatch):
    """Another estimate each time, as of another version, and no cache. Returns the estimates."""
    found, real = [], CostSubject.counted

    def counted(subject):
        cost = real(subject)
        found.append(replace(cost, linear_s=cost.linear_s * (1 + len(found) / 100)))
        return found[-1]

    monkeypatch.setattr(CostSubject, "counted", counted)
    monkeypatch.setattr(cost_source, "HF_HOME", str(tmp_path / "cache"))
    return found


def digests(trace):
    """Of the cost model of each step, by its number."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    return {line["step"]: line["cost_model"] for line in lines}


@pytest.mark.slow
def test_a_resumed_run_keeps_its_cost_model_and_what_it_has_learned(tmp_path, estimated, caplog):
    caplog.set_level(logging.INFO, logger="hf_flexseq")
    options = {"cost_model": "auto", "max_steps": 7}
    wanted = losses_of(tmp_path, plan_trace=str(tmp_path / "first"), **options)
    assert len(estimated) == 1
    kept = json.loads((tmp_path / "checkpoint-2" / MARKER).read_text())["cost_model"]
    digest = kept["digest"]
    assert kept["record"]["linear_s"] == estimated[0].linear_s
    # learned from the first two steps, for all from the fourth on; the checkpoint has frozen it
    assert [first_step for first_step, _ in kept["learned"]["versions"]] == [3]
    first = digests(tmp_path / "first")
    assert first[2] == digest != first[3]
    assert len({*first.values()}) == 2

    resume = str(tmp_path / "checkpoint-2")
    assert losses_of(tmp_path, resume, plan_trace=str(tmp_path / "then"), **options) == wanted
    assert len(estimated) == 1
    assert digests(tmp_path / "then") == {step: first[step] for step in range(2, 7)}
    told = [message for message in caplog.messages if "digest" in message]
    named = f"cost model {estimated[0].name}, digest {digest}"
    origins = ("estimated; the first steps correct it", "from checkpoint-2")
    assert told == [f"{named}: {origin}" for origin in origins]
    # a run that does not resume takes nothing over
    losses_of(tmp_path, cost_model="auto", max_steps=1)
    assert len(estimated) == 2


DIFFERENCES = {
    "device": r'this run differs in device \(".*" then, "NVIDIA H100" now\)$',
    "memory": r"this run differs in memory_bytes \(\d.* then, \d.* now\)$",
    "cost_model": r'this run differs in cost_model \("auto" then, "estimate" now\)$',
    "checkpointing": r'activations \("nothing recomputed" then, "\d layers recomputed" now\), '
    r"checkpointing \(false then, true now\)$",
    "preset": r"cost_model='flexsp-gpt-7b-a100' is used instead of '.*' of checkpoint-2: "
    "plans may differ",
}
CHANGED_OPTIONS = {
    "cost_model": {"cost_model": "estimate"},
    "checkpointing": {"gradient_checkpointing": True},
    "preset": {"cost_model": "flexsp-gpt-7b-a100"},
}


@pytest.mark.slow
def test_where_the_run_differs_one_warning_says_in_what(tmp_path, estimated, caplog):
    options = {"cost_model": "auto", "gradient_checkpointing": False}
    losses_of(tmp_path, max_steps=2, **options)
    memory_bytes = device.device_memory_bytes
    for change, told in DIFFERENCES.items():
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            if change == "device":
                patch.setattr(choose, "device_name", lambda device: "NVIDIA H100")
            if change == "memory":
                patch.setattr(device, "device_memory_bytes", lambda *args: memory_bytes(*args) / 2)
            changed = options | CHANGED_OPTIONS.get(change, {})
            trainer = make_trainer(tmp_path, max_steps=3, **changed)
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
            trainer.evaluate(documents(LENGTHS[:4]))  # finds the cost model once more
        (warning,) = told_of_files(caplog)
        assert re.search(told, warning), change
        assert len(warning) < 300
