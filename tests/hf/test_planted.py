"""Code that is planted as a pickle, in any file of a checkpoint, does not run when a run resumes.

The planted checkpoint has neither marker nor manifest, which would refuse the changed file by its
size before anything reads it.
"""

import pickle
import shutil

import pytest
import torch
from safetensors import SafetensorError

from hf_flexseq.steps.manifest import MANIFEST, MARKER
from tests.hf.test_saving import make_trainer
from tests.pipeline.test_optimizer_files import SAVED, Planted, marks
from tests.pipeline.test_trainer import make_trainer as make_pipeline_trainer
from tests.pipeline.test_trainer import model_of, saved_run
from tests.ranks import run_ranks

# of all who read a checkpoint's files: JSON, safetensors, torch, transformers
REFUSALS = (ValueError, OSError, RuntimeError, pickle.UnpicklingError, SafetensorError)


def pickled(path, planted):
    path.write_bytes(pickle.dumps(planted))


def saved_by_torch(path, planted):
    torch.save(planted, path)


def run_planted(original, folder, name, plant, resume):
    """Resume from a copy of a checkpoint with a pickle in place of one file; how that ended."""
    checkpoint = folder / "planted"
    shutil.rmtree(checkpoint, ignore_errors=True)
    shutil.copytree(original, checkpoint)
    (checkpoint / MARKER).unlink()
    (checkpoint / MANIFEST).unlink()
    plant(checkpoint / name, Planted(folder))
    try:
        resume(str(checkpoint))
    except REFUSALS as error:
        return type(error).__name__
    return "not read"


def files_of(checkpoint):
    paths = [path for path in checkpoint.rglob("*") if path.is_file()]
    return sorted(path.relative_to(checkpoint).as_posix() for path in paths)


def test_the_planted_pickles_would_run(tmp_path):
    for plant in (pickled, saved_by_torch):
        plant(tmp_path / "file", Planted(tmp_path))
    torch.load(tmp_path / "file", weights_only=False)
    assert len(marks(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("plant", [pickled, saved_by_torch])
def test_no_file_of_a_checkpoint_runs_code(tmp_path, plant):
    make_trainer(tmp_path, max_steps=2).train()

    def resume(checkpoint):
        make_trainer(tmp_path / "then", save_strategy="no").train(
            resume_from_checkpoint=checkpoint
        )

    ended = {}
    for name in files_of(tmp_path / "checkpoint-2"):
        ended[name] = run_planted(tmp_path / "checkpoint-2", tmp_path, name, plant, resume)
        assert not marks(tmp_path), name
    assert ended["training_args.bin"] == "not read"
    for name in (MARKER, "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors"):
        assert ended[name] != "not read", "the file was not reached"


@pytest.mark.processes
def test_no_file_of_a_pipelines_checkpoint_runs_code(tmp_path):
    """Read here by one rank without a pipeline; stages read it with the same functions."""
    run_ranks(saved_run, 2, tmp_path, 2, True, SAVED)
    options = {**SAVED, "batch": 2, "max_steps": 4}

    def resume(checkpoint):
        trainer = make_pipeline_trainer(model_of(True), tmp_path / "then", 1, **options)
        trainer.train(resume_from_checkpoint=checkpoint)

    ended = {}
    for name in files_of(tmp_path / "checkpoint-3"):
        ended[name] = run_planted(tmp_path / "checkpoint-3", tmp_path, name, pickled, resume)
        assert not marks(tmp_path), name
    read = [name for name in ended if name.startswith(("flexseq_optimizer/", "model"))]
    assert len(read) == 7
    assert all(ended[name] != "not read" for name in read)
