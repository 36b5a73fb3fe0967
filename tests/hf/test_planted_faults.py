"""Code that is planted as a pickle, in any file of a checkpoint, does not run when a run resumes.

The planted checkpoint has neither marker nor manifest, which would refuse the changed file by its
size before anything reads it.
"""

import pickle
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors import SafetensorError

from hf_flexseq.checkpoints.manifest import MANIFEST, MARKER
from tests.hf.test_saving import make_trainer
from tests.hf.test_sharded_checkpoints import EP2, FIRST, loaded, save_models, trained, trainer_of
from tests.planted import Planted, marks
from tests.ranks import run_ranks

# of all who read a checkpoint's files: JSON, safetensors, torch, transformers
REFUSALS = (ValueError, OSError, RuntimeError, pickle.UnpicklingError, SafetensorError)


def pickled(planted, path):
    path.write_bytes(pickle.dumps(planted))


def files_read(original, folder, resume, prefixes=("",), by_torch=()):
    """The files of a checkpoint that a resumed run has refused, each in turn replaced by a pickle,
    which was not executed.

    prefixes: of names of the files that are replaced. by_torch: suffixes of files that are also
    replaced by a pickle as torch writes it.
    """
    checkpoint = folder / "planted"
    names = [path.relative_to(original) for path in original.rglob("*") if path.is_file()]
    read = []
    for name in sorted(path.as_posix() for path in names):
        ways = (pickled, torch.save) if name.endswith(by_torch) else (pickled,)
        for plant in ways if name.startswith(prefixes) else ():
            shutil.copytree(original, checkpoint)
            (checkpoint / MARKER).unlink()
            (checkpoint / MANIFEST).unlink()
            plant(Planted(folder), checkpoint / name)
            try:
                resume(str(checkpoint))
            except REFUSALS:
                read.append(name)
            assert not marks(folder), (name, plant)
            shutil.rmtree(checkpoint)
    return read


@pytest.mark.parametrize("plant", [pickled, torch.save])
def test_the_planted_pickles_would_run(tmp_path, plant):
    plant(Planted(tmp_path), tmp_path / "file")
    with suppress(RuntimeError):  # what was unpickled is not of torch's format
        torch.load(tmp_path / "file", weights_only=False)
    assert len(marks(tmp_path)) == 1


@pytest.mark.slow
def test_no_file_of_a_checkpoint_runs_code(tmp_path):
    make_trainer(tmp_path, max_steps=2).train()

    def resume(checkpoint):
        trainer = make_trainer(tmp_path / "then", max_steps=2, save_strategy="no")
        trainer.train(resume_from_checkpoint=checkpoint)

    read = files_read(
        tmp_path / "checkpoint-2", tmp_path, resume, by_torch=(".pt", ".pth", ".bin")
    )
    assert "training_args.bin" not in read
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert read.count(name) == 2
    assert {MARKER, "model.safetensors"} <= set(read)


def saved_experts(rank, ranks, models, folder):
    trained(rank, ranks, models, folder, "experts", EP2, None, {"max_steps": 1})


@pytest.mark.processes
def test_no_file_of_a_sharded_models_checkpoint_runs_code(tmp_path):
    """Read here by one rank without shards; ranks with shards, and stages of a pipeline, read it
    with the same functions."""
    models = save_models(tmp_path / "models")
    run_ranks(saved_experts, 2, models, tmp_path)

    def resume(checkpoint):
        model = loaded(models / "experts", "experts", None)
        trainer = trainer_of(model, tmp_path / "then", 1, max_steps=1, save_strategy="no")
        trainer.train(resume_from_checkpoint=checkpoint)

    own = ("flexseq_optimizer/", "model", "config", "generation")  # others are any checkpoint's
    read = files_read(tmp_path / FIRST, tmp_path, resume, prefixes=own)
    states = {f"flexseq_optimizer/{name}.json" for name in ("index", "scheduler")}
    assert states | {"config.json", "model.safetensors"} <= set(read)
    assert len([name for name in read if "optimizer/state-" in name]) >= 2
