"""Tell a whole checkpoint from one whose saving was interrupted.

    flexseq.json             the marker, the first file: the run and step of the checkpoint
    ...                      weights, optimizer, random numbers, by all ranks
    flexseq_manifest.json    the manifest, the last file: names and sizes of all others

Rank 0 writes both, each at once. A checkpoint is whole if it has both and its files match the
manifest. It is torn without the manifest. One with neither was written by a Trainer without
hf_flexseq, and may be either. All files are on disk before the manifest is written
(`flush_files`), so it holds after a power cut, too.

Rejected: one file that says "complete" at the end. A checkpoint that has lost it would pass for
a checkpoint of a Trainer without hf_flexseq.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_flexseq.checkpoints.files import PARTIAL, flush, write_json

MARKER = "flexseq.json"
MANIFEST = "flexseq_manifest.json"
FORMAT = 1  # of both files; raise it when a reader of the former format would go wrong
LARGEST_BYTES = 64 * 2**20  # of either file: larger files are foreign
NAMED_MOST = 3  # files in one message

# transformers' own mark on a checkpoint that it saves when a job is preempted; it removes the mark
# once it is back from saving, when the manifest is there already.
_PREEMPTED = "checkpoint-is-incomplete.txt"

# What resuming reads, of any way to train. What an earlier save has left of it is removed, so that
# nothing of that save is taken for a part of this one.
_STALE = (
    "flexseq_optimizer",
    "optimizer.pt",
    "optimizer.bin",
    "optimizer_[0-9]*",  # accelerate's FSDP
    "scheduler.pt",
    "scaler.pt",
    "rng_state*.pth",
    "trainer_state.json",
    "latest",  # DeepSpeed
    "global_step*",
    "pytorch_model_fsdp*",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.*",
    f"*{PARTIAL}",
    ".tmp??????",  # safetensors, while it writes
)


# ---- writing


def begin(folder: Path, marker: Mapping[str, Any]) -> None:
    """Make the checkpoint `folder` a torn one, with the marker and nothing that resuming reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # first: from here on the folder is torn
    write_json(folder / MARKER, {"format": FORMAT, "complete": False, **marker})
    for pattern in _STALE:
        for path in folder.glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def finish(folder: Path, marker: Mapping[str, Any]) -> None:
    """Make the checkpoint `folder` a whole one. All files of it must be there, and on disk."""
    write_json(folder / MARKER, {"format": FORMAT, "complete": True, **marker})
    sizes = {}
    for path in _files(folder):
        sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_json(folder / MANIFEST, {"format": FORMAT, "files": sizes})


def flush_files(folder: Path) -> None:
    """Wait until all files that this machine has written into a checkpoint are on disk."""
    if not folder.is_dir():
        return  # of a machine that has written nothing
    flush(folder)
    for path in folder.rglob("*"):
        flush(path)


def _files(folder: Path) -> list[Path]:
    """Return all files of a checkpoint but the manifest, in subfolders, too."""
    left_out = (folder / MANIFEST, folder / _PREEMPTED)
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in left_out and not path.name.endswith(PARTIAL):
            found.append(path)
    return found


# ---- reading


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Findings about a checkpoint before a run resumes from it."""

    marker: Mapping[str, Any] | None = None
    """Metadata as given to `begin`; None if unknown."""
    problem: str | None = None
    """Reason why no run can resume from it."""
    caveat: str | None = None
    """Reason why it is unknown if it is whole."""


def inspect(folder: Path) -> Inspection:
    """Return the findings about a checkpoint from its marker, manifest and sizes of files."""
    has_marker = (folder / MARKER).exists()
    has_manifest = (folder / MANIFEST).exists()
    try:
        if not has_marker and not has_manifest:
            _check_one_optimizer(folder)
            return Inspection(caveat=f"no {MARKER}: not written by hf_flexseq")
        if not has_marker:
            raise ValueError(f"its {MARKER} is missing, while {MANIFEST} is there")
        marker = _read_marker(folder / MARKER)
        if "complete" not in marker:
            _check_one_optimizer(folder)
            return Inspection(marker=marker, caveat="written by an earlier version of hf_flexseq")
        if not has_manifest:
            raise ValueError(f"torn, it has no {MANIFEST}: saving was interrupted")
        _check_files(folder, _read_sizes(folder / MANIFEST))
    except ValueError as error:
        return Inspection(problem=str(error))
    return Inspection(marker=marker)


def is_torn(folder: Path) -> bool:
    """Tell if the writer of a checkpoint did not come to the end."""
    if not (folder / MARKER).exists() or (folder / MANIFEST).exists():
        return False
    try:
        return "complete" in _read_marker(folder / MARKER)
    except ValueError:
        return False  # broken in another way


def _check_one_optimizer(folder: Path) -> None:
    """Raise ValueError for a checkpoint with two optimizers' states, one of an earlier save."""
    if (folder / "flexseq_optimizer").is_dir() and (folder / "optimizer.pt").exists():
        raise ValueError(
            "it has both flexseq_optimizer/ and optimizer.pt, one left by an earlier save: remove "
            "the older"
        )


def _read_marker(path: Path) -> dict[str, Any]:
    """Return the marker. Raises ValueError for a corrupt one."""
    marker = read_object(path)
    size = marker.get("sequences_per_step")
    if not _is_count(size) or size == 0:
        raise ValueError(
            f"its {path.name} is corrupt: sequences_per_step is not a positive integer"
        )
    return marker


def _read_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each file by name. Raises ValueError for a manifest that is corrupt."""
    files = read_object(path).get("files")
    if not isinstance(files, dict) or not all(_is_count(size) for size in files.values()):
        raise ValueError(f"its {path.name} is corrupt: `files` must map names to sizes")
    return files


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a marker or a manifest. Raises ValueError for anything else."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
        if len(text) > LARGEST_BYTES:
            raise ValueError(f"more than {LARGEST_BYTES} bytes")
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"its {path.name} is corrupt: {error}") from error
    if found.get("format", FORMAT) != FORMAT:  # earlier versions wrote none
        raise ValueError(f"its {path.name} is of format {found['format']!r:.20}, not {FORMAT}")
    return found


def _check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise ValueError, naming them, for files that are missing or of another size."""
    wrong = []
    for name, size in sorted(sizes.items()):
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name!a:.60} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{name!a:.60} has {path.stat().st_size} bytes instead of {size}")
    if wrong:
        more = f" and {len(wrong) - NAMED_MOST} more" if len(wrong) > NAMED_MOST else ""
        raise ValueError(f"damaged: {', '.join(wrong[:NAMED_MOST])}{more}")
