"""scripts/convert_optimizer.py: a run goes on from a converted checkpoint as from a new one."""

import importlib.util
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hf_flexseq.pipeline.optimizer import _FLAT, FOLDER, _other_names, _renamed
from hf_flexseq.steps.manifest import MANIFEST, MARKER
from tests.hf.test_trainer import update_error
from tests.pipeline.test_optimizer_files import Planted, marks
from tests.pipeline.test_trainer import joined, make_trainer, model_of, saved_run
from tests.ranks import run_ranks

SCRIPT = Path(__file__).parents[2] / "scripts/convert_optimizer.py"
OPTIONS = {"optim": "adamw_torch", "max_steps": 5, "weight_decay": 0.1}


def load():
    spec = importlib.util.spec_from_file_location("convert_optimizer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


convert_optimizer = load()


def run_of_earlier_version(rank, world_size, folder):
    """A run in two stages that saves after three steps, in the format of earlier versions."""
    trainer = make_trainer(
        model_of(True), folder, 2, save_strategy="steps", save_steps=3, **OPTIONS
    )
    executor = trainer.flexseq.executor

    def save(output_dir):
        names = _other_names(executor.stage)
        state = get_optimizer_state_dict(
            executor.stage.stack.model, trainer.optimizer.optimizer, options=_FLAT
        )
        named = {_renamed(key, names): value for key, value in state.items()}
        dcp.save(
            named,
            checkpoint_id=f"{output_dir}/{FOLDER}",
            process_group=dist.new_group(backend="gloo"),
        )
        if rank == 0:
            torch.save(trainer.lr_scheduler.state_dict(), f"{output_dir}/scheduler.pt")

    trainer._save_optimizer_and_scheduler = save
    trainer.train()
    return ({name: p.detach().numpy() for name, p in executor.stage.global_parameters()},)


@pytest.mark.nightly
@pytest.mark.processes
def test_a_converted_checkpoint_goes_on_as_before(tmp_path, capsys):
    """In two stages, and on one rank without a pipeline."""
    old, new = tmp_path / "checkpoint-3", tmp_path / "converted"
    before = {name: p.detach() for name, p in model_of(True).named_parameters()}
    first = joined(run_ranks(run_of_earlier_version, 2, tmp_path))
    wanted = {name: torch.as_tensor(p) for name, p in first.items()}
    assert (old / FOLDER / ".metadata").is_file()
    (old / MANIFEST).unlink()  # earlier versions wrote none, and this alone into the marker:
    (old / MARKER).write_text('{"sequences_per_step": 8}')

    assert convert_optimizer.main([str(old), str(new)]) == 2
    refusal = capsys.readouterr().err
    assert refusal.strip().endswith(
        "which can run any code: pass --i-trust-this-file if you trust it"
    )
    assert refusal.count("\n") == 1
    assert not new.exists()

    assert convert_optimizer.main([str(old), str(new), "--i-trust-this-file"]) == 0
    assert sorted(p.name for p in (new / FOLDER).iterdir()) == [
        "index.json",
        "state-00001-of-00001.safetensors",
    ]
    assert (old / FOLDER / ".metadata").is_file(), "the old checkpoint stays as it is"
    for ranks, stages in ((2, 2), (1, 1)):
        resumed = OPTIONS | {"batch": 4 // ranks}
        found = run_ranks(saved_run, ranks, tmp_path / "resumed", stages, True, resumed, str(new))
        assert update_error(before, wanted, joined(found)) < 1e-8, (ranks, stages)

    assert convert_optimizer.main([str(old), str(new), "--i-trust-this-file"]) == 2
    assert capsys.readouterr().err == f"{new} exists already\n"
    assert convert_optimizer.main([str(new), str(tmp_path / "again"), "--i-trust-this-file"]) == 2
    assert capsys.readouterr().err.endswith("is not there: nothing needs converting\n")


@pytest.mark.parametrize("trusted", [False, True])
def test_nothing_is_unpickled_without_the_flag(tmp_path, trusted):
    """With the flag the planted code runs, which is why the flag is asked for."""
    folder = tmp_path / "old" / FOLDER
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path)))
    arguments = [str(tmp_path / "old"), str(tmp_path / "new")]
    if trusted:
        with pytest.raises(AttributeError):  # what was unpickled is no metadata
            convert_optimizer.main([*arguments, "--i-trust-this-file"])
    else:
        assert convert_optimizer.main(arguments) == 2
    assert bool(marks(tmp_path)) == trusted
    assert not (tmp_path / "new").exists()
