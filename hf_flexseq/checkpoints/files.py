"""Write files that appear when they are whole: under a partial name, which is then changed. Remove
the files of earlier saves. Read tensors out of several files, by rows."""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PARTIAL = ".partial"  # what the name of a file ends with until all of it is written


def clear(folder: Path, patterns: Iterable[str]) -> None:
    """Make `folder`, and remove the files of earlier saves from it. patterns: of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


def write_json(path: Path, value: Any) -> None:
    """Write plain JSON values. The file is on disk when the call returns."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors of any shapes as safetensors. metadata: for readers that ask for it."""
    partial = path.with_name(path.name + PARTIAL)
    save_file(_each_with_its_own_memory(tensors), partial, metadata=metadata)
    partial.replace(path)


def stored_tensors(folder: Path, files: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name with the slice of its file that gives the tensor by rows, file by
    file. files: name of each tensor's file in `folder`."""
    for file in sorted(set(files.values())):
        with safe_open(folder / file, framework="pt") as opened:
            for name, its_file in files.items():
                if its_file == file:
                    yield name, opened.get_slice(name)


def _each_with_its_own_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors without shared memory, which safetensors refuses: quantised
    optimizers keep one table for all parameters."""
    taken: set[int] = set()
    separate = {}
    for key, tensor in tensors.items():
        own = tensor.detach().contiguous()
        address = own.untyped_storage().data_ptr()
        if address in taken:
            own = own.clone()
        taken.add(address)
        separate[key] = own
    return separate


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk, if the file system supports
    that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)
