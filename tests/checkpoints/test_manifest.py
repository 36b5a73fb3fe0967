"""What marker and manifest say about a checkpoint's folder."""

import json

import pytest

from hf_flexseq.checkpoints import manifest
from hf_flexseq.checkpoints.manifest import MANIFEST, MARKER, begin, finish, inspect, is_torn

KEPT = {"sequences_per_step": 4, "cost_model": None}


def written(folder, *, until_the_end=True):
    """A checkpoint with a file in a folder of its own, too."""
    begin(folder, KEPT)
    (folder / "weights").write_bytes(b"123")
    (folder / "global_step5").mkdir()
    (folder / "global_step5" / "shard").write_bytes(b"12345")
    if until_the_end:
        finish(folder, KEPT)
    return folder


def test_a_whole_checkpoint_has_no_problem_and_brings_its_marker(tmp_path):
    """transformers' mark of a preempted job may go afterwards."""
    mark = tmp_path / "checkpoint-is-incomplete.txt"
    mark.touch()
    folder = written(tmp_path)
    mark.unlink()
    found = inspect(folder)
    assert (found.problem, found.caveat) == (None, None)
    assert found.marker == {**KEPT, "format": 1, "complete": True}
    assert not is_torn(folder)
    sizes = json.loads((folder / MANIFEST).read_text())["files"]
    marker_bytes = (folder / MARKER).stat().st_size
    assert sizes == {MARKER: marker_bytes, "global_step5/shard": 5, "weights": 3}


def test_without_a_manifest_it_is_torn(tmp_path):
    folder = written(tmp_path / "new", until_the_end=False)
    assert json.loads((folder / MARKER).read_text())["complete"] is False
    assert is_torn(folder)
    assert inspect(folder).problem.startswith(
        f"torn, it has no {MANIFEST}: saving was interrupted"
    )


def test_whole_again_it_is_torn_from_the_first_moment(tmp_path, monkeypatch):
    """A kill before the new marker is written leaves no manifest of the former save."""
    folder = written(tmp_path)

    def killed(path, value):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        begin(folder, KEPT)
    assert is_torn(folder)
    assert (folder / "weights").exists()


def test_a_new_save_removes_what_resuming_would_read_and_nothing_else(tmp_path):
    kept = ("notes.txt", "my_model.safetensors.txt", "tokenizer.json")
    stale = ("optimizer.pt", "scheduler.pt", "rng_state_3.pth", "model-00001-of-00002.safetensors")
    for name in (*kept, *stale, "index.json.partial", ".tmpUkmVPc"):
        (tmp_path / name).write_text("of an earlier save")
    for name in ("flexseq_optimizer", "global_step3", "optimizer_0", "pytorch_model_fsdp_0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("of an earlier save")
    begin(tmp_path, KEPT)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, MARKER}


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("weights", None, "damaged: 'weights' is missing"),
        ("global_step5/shard", b"1", "damaged: 'global_step5/shard' has 1 bytes instead of 5"),
        (MARKER, None, f"its {MARKER} is missing, while {MANIFEST}"),
        (MARKER, b"\x80\x04half", f"its {MARKER} is corrupt"),
        (MARKER, b"[" * 100_000, f"its {MARKER} is corrupt"),
        (MARKER, b"[]", f"its {MARKER} is corrupt: no JSON"),
        (
            MARKER,
            b'{"sequences_per_step": true}',
            f"its {MARKER} is corrupt: sequences_per_step is not a positive integer",
        ),
        (MARKER, b'{"format": 2}', f"its {MARKER} is of format 2, not 1"),
        (MANIFEST, b"{", f"its {MANIFEST} is corrupt"),
        (
            MANIFEST,
            b'{"files": {"weights": -1}}',
            f"its {MANIFEST} is corrupt: `files` must map names to sizes",
        ),
    ],
)
def test_what_is_broken_is_named_in_one_short_line(tmp_path, file, content, problem):
    folder = written(tmp_path)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    found = inspect(folder).problem
    assert found.startswith(problem)
    assert "\n" not in found
    assert len(found) < 200
    assert not is_torn(folder)


def test_many_missing_files_are_counted(tmp_path):
    begin(tmp_path, KEPT)
    for number in range(9):
        (tmp_path / f"\x1b[31m{'long' * 40}-{number}").write_text("")
    finish(tmp_path, KEPT)
    for path in tmp_path.glob("*long*"):
        path.unlink()
    problem = inspect(tmp_path).problem
    assert problem.endswith(" is missing and 6 more")
    assert problem.isprintable()
    assert len(problem) < 300


def test_a_file_that_is_larger_than_any_marker_is_not_read(tmp_path):
    written(tmp_path)
    with (tmp_path / MARKER).open("wb") as file:
        file.truncate(2**40)  # sparse
    assert inspect(tmp_path).problem.startswith(f"its {MARKER} is corrupt: more than")


def test_checkpoints_that_nothing_is_known_of_come_with_a_caveat(tmp_path):
    found = inspect(tmp_path)
    assert (found.problem, found.marker) == (None, None)
    assert found.caveat == f"no {MARKER}: not written by hf_flexseq"
    (tmp_path / MARKER).write_text('{"sequences_per_step": 4}')
    found = inspect(tmp_path)
    assert (found.problem, found.marker) == (None, {"sequences_per_step": 4})
    assert found.caveat == "written by an earlier version of hf_flexseq"
    assert not is_torn(tmp_path)


@pytest.mark.parametrize("earlier_marker", [False, True])
def test_two_optimizers_of_different_saves_are_refused(tmp_path, earlier_marker):
    (tmp_path / "flexseq_optimizer").mkdir()
    (tmp_path / "optimizer.pt").write_bytes(b"")
    if earlier_marker:
        (tmp_path / MARKER).write_text('{"sequences_per_step": 4}')
    wanted = "it has both flexseq_optimizer/ and optimizer.pt, one left by an earlier save: remove"
    assert inspect(tmp_path).problem.startswith(wanted)
