"""Checkpoints as the Trainer writes them, and the one that a run goes on from."""

import json
import logging
import re
import shutil
from dataclasses import replace

import pytest
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler

from hf_flexseq import FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.hf import saving
from hf_flexseq.hf.calibration import choose, source
from hf_flexseq.profiler import estimate
from hf_flexseq.steps.manifest import MANIFEST, MARKER, inspect, is_torn
from tests.hf.test_trainer import logged
from tests.hf.tiny import documents, tiny_llama

LENGTHS = [1 + (i * i * 7) % 30 for i in range(24)]


def make_trainer(folder, kind=FlexSeqTrainer, **options):
    """On one rank, without a planner's process. Four steps, saved after the second and fourth."""
    args = FlexSeqConfig(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "learning_rate": 1e-2,
            "save_steps": 2,
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "max_tokens_per_rank": 40,
            "lookahead": 0,
            "cost_model": "estimate",
            **options,
        },
    )
    return kind(model=tiny_llama(), args=args, train_dataset=documents(LENGTHS))


def losses_of(folder, resume=None, **options):
    trainer = make_trainer(folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer.state.log_history, "loss")


def tear(checkpoint):
    """As a kill just before the manifest leaves it."""
    (checkpoint / MANIFEST).unlink()


# ---- what is written


class SavesItsState(FlexSeqTrainer):
    """Writes the state into the output folder with every checkpoint, before the optimizer."""

    def _save(self, *args, **kwargs):
        super()._save(*args, **kwargs)
        self.save_state()


def test_a_state_that_is_written_elsewhere_does_not_end_the_checkpoint(tmp_path):
    make_trainer(tmp_path, SavesItsState, max_steps=2).train()
    files = json.loads((tmp_path / "checkpoint-2" / MANIFEST).read_text())["files"]
    assert "optimizer.pt" in files


def test_the_marker_is_the_first_file_and_the_manifest_the_last(tmp_path, monkeypatch):
    seen = []

    def noting(name):
        method = getattr(Trainer, name)

        def note(self, output_dir, *args, **kwargs):
            folder = tmp_path / "checkpoint-2"
            seen.append((name, is_torn(folder), inspect(folder).problem is None))
            return method(self, output_dir, *args, **kwargs)

        monkeypatch.setattr(Trainer, name, note)

    for name in ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state"):
        noting(name)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: None)
    noting("_push_from_checkpoint")
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    monkeypatch.setattr(trainer, "push_to_hub", lambda **options: None)
    trainer.train()
    assert seen[:4] == [
        ("save_model", True, False),
        ("_save_optimizer_and_scheduler", True, False),
        ("_save_rng_state", True, False),
        ("_push_from_checkpoint", False, True),
    ]
    files = json.loads((tmp_path / "checkpoint-2" / MANIFEST).read_text())["files"]
    written = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert set(files) == written - {MANIFEST}
    assert {"optimizer.pt", "rng_state.pth", "trainer_state.json", "training_args.bin"} <= written
    assert "save_to_json" not in vars(trainer.state)


def test_no_callback_of_ours_stands_among_the_users(tmp_path):
    def kinds(trainer):
        handler: CallbackHandler = trainer.callback_handler
        return [type(callback) for callback in handler.callbacks]

    assert kinds(make_trainer(tmp_path)) == kinds(make_trainer(tmp_path, kind=Trainer))


@pytest.mark.parametrize("options", [{"save_only_model": True}, {"save_total_limit": 1}])
def test_other_ways_to_save_are_whole_too(tmp_path, options):
    losses_of(tmp_path, **options)
    kept = sorted(tmp_path.glob("checkpoint-*"))
    assert [folder.name for folder in kept][-1] == "checkpoint-4"
    assert len(kept) == (1 if "save_total_limit" in options else 2)
    assert all(inspect(folder).problem is None for folder in kept)


def test_a_whole_checkpoint_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    """Also where only one is to be kept."""
    trainer = make_trainer(tmp_path, save_total_limit=1)
    finish = saving.finish

    def killed_at_the_second(folder, marker):
        if folder.name == "checkpoint-4":
            raise KeyboardInterrupt
        finish(folder, marker)

    monkeypatch.setattr(saving, "finish", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert inspect(tmp_path / "checkpoint-2").problem is None
    assert is_torn(tmp_path / "checkpoint-4")


def test_a_pipelines_optimizer_of_an_earlier_save_does_not_stay(tmp_path):
    folder = tmp_path / "checkpoint-2" / "flexseq_optimizer"
    folder.mkdir(parents=True)
    (folder / "index.json").write_text("{}")
    losses_of(tmp_path)
    assert not folder.exists()
    assert (folder.parent / "optimizer.pt").is_file()


def told_of_files(caplog):
    """What this library has said, but of seconds, which differ from machine to machine."""
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("hf_flexseq")]
    return [message for message in messages if not message.startswith("a step takes")]


def test_torn_checkpoints_are_removed_before_whole_ones(tmp_path, caplog):
    """The Trainer's own rotation would keep the torn one, whose step is the highest."""
    losses_of(tmp_path)
    shutil.move(tmp_path / "checkpoint-4", tmp_path / "checkpoint-9")
    tear(tmp_path / "checkpoint-9")
    losses_of(tmp_path, resume=True, save_total_limit=1)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert "checkpoint-9 is removed: its writer did not come to the end" in caplog.text


# ---- what is resumed


def test_the_newest_whole_checkpoint_is_taken_and_the_torn_one_named(tmp_path, caplog):
    wanted = losses_of(tmp_path)
    tear(tmp_path / "checkpoint-4")
    trainer = make_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._flexseq_resumed.folder == str(tmp_path / "checkpoint-2")
    assert logged(trainer.state.log_history, "loss") == wanted
    warnings = told_of_files(caplog)
    assert warnings == [
        "going on from checkpoint-2, not from checkpoint-4: torn, it has no "
        "flexseq_manifest.json: its writer did not come to the end"
    ]


def test_a_named_checkpoint_that_is_not_whole_is_refused(tmp_path):
    losses_of(tmp_path)
    tear(tmp_path / "checkpoint-4")
    with pytest.raises(ValueError, match="checkpoint-4: torn, .*; name checkpoint-2 instead$"):
        losses_of(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-2" / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(
        ValueError,
        match=r"checkpoint-2: damaged: 'optimizer.pt' has 4 bytes instead of \d+; restore it, or "
        "remove flexseq.json and flexseq_manifest.json to have it taken as it is$",
    ):
        losses_of(tmp_path, resume=str(tmp_path / "checkpoint-2"))
    with pytest.raises(ValueError, match="no whole checkpoint in .* \\(checkpoint-4: torn"):
        losses_of(tmp_path, resume=True)


def test_without_any_checkpoint_there_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        losses_of(tmp_path, resume=True)
    with pytest.raises(ValueError, match="'nowhere': there is no such folder"):
        losses_of(tmp_path, resume="nowhere")


def test_the_plain_trainers_checkpoint_is_taken_with_one_warning(tmp_path, caplog):
    options = {"per_device_train_batch_size": 1}  # its collator does not pad
    make_trainer(tmp_path, kind=Trainer, **options).train()
    losses_of(tmp_path, resume=str(tmp_path / "checkpoint-2"), **options)
    told = told_of_files(caplog)
    assert told == [
        f"{tmp_path}/checkpoint-2: no flexseq.json: not written by hf_flexseq, so nothing tells "
        "if it is whole"
    ]


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        (("optimizer.pt",), "optimizer"),
        (("scheduler.pt",), "scheduler"),
        (("optimizer.pt", "scheduler.pt"), "optimizer and the scheduler"),
    ],
)
def test_a_checkpoint_without_an_optimizer_says_so(tmp_path, caplog, lost, missing):
    losses_of(tmp_path)
    folder = tmp_path / "checkpoint-2"
    for name in (*lost, MARKER, MANIFEST):
        (folder / name).unlink()
    losses_of(tmp_path, resume=str(folder))
    told = f"{folder} has no state of the {missing}: optimizer and learning rate start anew"
    assert told in [record.getMessage() for record in caplog.records]


# ---- the cost model


@pytest.fixture
def measured(monkeypatch):
    """Another measurement each time, as without a cache. Returns what was measured."""
    found = []

    def measure(name, subject, communicator):
        factor = 1 + len(found) / 100
        found.append(replace(subject.estimate, linear_s=subject.estimate.linear_s * factor))
        return found[-1], "measured now"

    monkeypatch.setattr(source, "make_cost", measure)
    return found


def digests(trace):
    return {json.loads(line)["cost_model"] for line in trace.read_text().splitlines()}


def test_a_resumed_run_keeps_its_cost_model_and_measures_nothing(tmp_path, measured, caplog):
    caplog.set_level(logging.INFO, logger="hf_flexseq")
    wanted = losses_of(tmp_path, cost_model="auto", plan_trace=str(tmp_path / "first"))
    assert len(measured) == 1
    digest = measured[0].digest()
    kept = json.loads((tmp_path / "checkpoint-2" / MARKER).read_text())["cost_model"]
    assert (kept["digest"], kept["record"]) == (digest, measured[0].to_record())

    resume = str(tmp_path / "checkpoint-2")
    options = {"cost_model": "auto", "plan_trace": str(tmp_path / "then")}
    assert losses_of(tmp_path, resume=resume, **options) == wanted
    assert len(measured) == 1
    assert digests(tmp_path / "first") == digests(tmp_path / "then") == {digest}
    told = [r.getMessage() for r in caplog.records if "digest" in r.getMessage()]
    name = measured[0].name
    assert told == [
        f"cost model {name}, digest {digest}: measured now",
        f"cost model {name}, digest {digest}: from checkpoint-2",
    ]
    # a run that does not resume takes nothing over
    losses_of(tmp_path, cost_model="auto")
    assert len(measured) == 2


def other_device(monkeypatch):
    monkeypatch.setattr(choose, "device_name", lambda device: "NVIDIA H100")
    return {}


def other_memory(monkeypatch):
    memory_bytes = estimate.device_memory_bytes
    monkeypatch.setattr(
        estimate, "device_memory_bytes", lambda device, ranks: memory_bytes(device, ranks) / 2
    )
    return {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_device, r'this run differs in device \(".*" then, "NVIDIA H100" now\)$'),
        (other_memory, r"this run differs in memory_bytes \(\d.* then, \d.* now\)$"),
        (
            lambda monkeypatch: {"cost_model": "estimate"},
            r'this run differs in cost_model \("auto" then, "estimate" now\)$',
        ),
        (
            lambda monkeypatch: {"gradient_checkpointing": True},
            r"this run differs in checkpointing \(false then, true now\)$",
        ),
        (
            lambda monkeypatch: {"cost_model": "flexsp-gpt-7b-a100"},
            r"cost_model='flexsp-gpt-7b-a100' is used instead of '.*' of checkpoint-2: "
            "plans may differ",
        ),
    ],
)
def test_where_the_run_differs_one_warning_says_in_what(
    tmp_path, measured, monkeypatch, caplog, change, told
):
    losses_of(tmp_path, cost_model="auto", gradient_checkpointing=False)
    options = {"cost_model": "auto", **change(monkeypatch)}
    trainer = make_trainer(tmp_path, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    trainer.evaluate(documents(LENGTHS[:4]))  # finds the cost model once more
    (warning,) = told_of_files(caplog)
    assert re.search(told, warning)
    assert len(warning) < 300


def test_a_named_cost_model_that_stayed_the_same_gives_no_warning(tmp_path, caplog):
    losses_of(tmp_path, cost_model="flexsp-gpt-7b-a100")
    losses_of(tmp_path, resume=True, cost_model="flexsp-gpt-7b-a100")
    assert not told_of_files(caplog)


def test_a_cost_model_of_another_version_is_not_used_and_not_fatal(tmp_path, measured, caplog):
    losses_of(tmp_path, cost_model="auto")
    folder = tmp_path / "checkpoint-2"
    marker = json.loads((folder / MARKER).read_text())
    marker["cost_model"]["record"]["new_constant"] = 1.0
    text = json.dumps(marker)
    (folder / MARKER).write_text(text)
    sizes = json.loads((folder / MANIFEST).read_text())
    sizes["files"][MARKER] = len(text)
    (folder / MANIFEST).write_text(json.dumps(sizes))
    losses_of(tmp_path, resume=str(folder), cost_model="auto")
    told = told_of_files(caplog)
    assert any("checkpoint-2 is not used: not a cost model: unknown keys" in one for one in told)
    assert len(measured) == 2
