"""scripts/convert_optimizer.py: a run goes on from a converted checkpoint as from a new one."""

import pickle
import runpy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hf_flexseq.checkpoints.manifest import MANIFEST, MARKER
from hf_flexseq.checkpoints.optimizer import _FLAT, FOLDER, renamed_key
from tests.hf.trainers import update_error
from tests.pipeline.test_trainer import joined, make_trainer, model_of, saved_run
from tests.planted import Planted, marks
from tests.programs import ROOT
from tests.ranks import run_ranks

OPTIONS = {"optim": "adamw_torch", "max_steps": 5, "weight_decay": 0.1}
SAVING = {"save_strategy": "steps", "save_steps": 3}


def convert(*words, trusted=True):
    """The exit status of the script."""
    main = runpy.run_path(str(ROOT / "scripts/convert_optimizer.py"))["main"]
    return main([*map(str, words), *(["--i-trust-this-file"] if trusted else [])])


def run_of_earlier_version(rank, world_size, folder):
    """A run in two stages that saves after three steps, in the format of earlier versions."""
    trainer = make_trainer(model_of(True), folder, 2, **SAVING, **OPTIONS)
    stage = trainer.flexseq.stage

    def save(output_dir):
        optimizer = trainer.optimizer.optimizer
        state = get_optimizer_state_dict(stage.stack.model, optimizer, options=_FLAT)
        names = stage.renamed()
        named = {renamed_key(key, names): value for key, value in state.items()}
        group = dist.new_group(backend="gloo")
        dcp.save(named, checkpoint_id=f"{output_dir}/{FOLDER}", process_group=group)
        if rank == 0:
            torch.save(trainer.lr_scheduler.state_dict(), f"{output_dir}/scheduler.pt")

    trainer._save_optimizer_and_scheduler = save
    trainer.train()
    return ({name: p.detach().numpy() for name, p in stage.global_parameters()},)


@pytest.mark.nightly
@pytest.mark.processes
def test_a_converted_checkpoint_goes_on_as_before(tmp_path, capsys):
    """In two stages, and on one rank without a pipeline."""
    old, new = tmp_path / "checkpoint-3", tmp_path / "converted"
    before = {name: p.detach().numpy() for name, p in model_of(True).named_parameters()}
    first = joined(run_ranks(run_of_earlier_version, 2, tmp_path))
    (old / MANIFEST).unlink()  # earlier versions wrote none, and this alone into the marker:
    (old / MARKER).write_text('{"sequences_per_step": 8}')

    assert convert(old, new, trusted=False) == 2
    refusal = capsys.readouterr().err
    assert refusal.endswith("which can run any code: pass --i-trust-this-file if you trust it\n")
    assert refusal.count("\n") == 1
    assert not new.exists()

    assert convert(old, new) == 0
    names = ["index.json", "state-00001-of-00001.safetensors"]
    assert sorted(p.name for p in (new / FOLDER).iterdir()) == names
    assert (old / FOLDER / ".metadata").is_file(), "the old checkpoint stays as it is"
    for ranks, stages in ((2, 2), (1, 1)):
        resumed = OPTIONS | {"batch": 4 // ranks}
        found = run_ranks(saved_run, ranks, tmp_path / "resumed", stages, True, resumed, str(new))
        assert update_error(before, first, joined(found)) < 1e-8, (ranks, stages)

    assert convert(old, new) == 2
    assert capsys.readouterr().err == f"{new} exists already\n"
    assert convert(new, tmp_path / "again") == 2
    assert capsys.readouterr().err.endswith("is not there: nothing needs converting\n")


def test_nothing_is_unpickled_without_the_flag(tmp_path):
    """With the flag the planted code runs, which is why the flag is asked for."""
    folder = tmp_path / "old" / FOLDER
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path)))
    assert convert(tmp_path / "old", tmp_path / "new", trusted=False) == 2
    assert not marks(tmp_path)
    with pytest.raises(AttributeError):  # what was unpickled is no metadata
        convert(tmp_path / "old", tmp_path / "new")
    assert marks(tmp_path)
    assert not (tmp_path / "new").exists()
