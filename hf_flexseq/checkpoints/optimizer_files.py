"""The files of an optimizer's state: tensors as safetensors, everything else as JSON.

    state-00001-of-00002.safetensors   tensors that one rank has written: its stage's tensors, or
                                       a part of a sharded model's tensors
    scheduler.json                     the state of the learning rate's scheduler; scheduler.pt
                                       next to the folder, as the Trainer's, where JSON cannot hold
                                       it
    index.json                         which file holds which tensor, and all other values

A state is flat. Keys are `state.<parameter>.exp_avg` and `param_groups.<parameter>.lr`, where
<parameter> is a name in the whole model. A tensor is whole in its file, whatever ranks shared it.
`state.<parameter>` itself is null for a parameter that had no gradient yet, and so no state.

A folder is written in this order, and files appear whole (`files.py`), so no reader mistakes half
of it for all of it:

1. `clear` removes the index first, then the files of an earlier save.
2. `write_tensors` writes each file, `write_json` the scheduler's state.
3. `write_index` writes the index. A folder without an index is refused.

`named_state` reads a folder, and `numbered_state` the `optimizer.pt` of a Trainer.

Rejected: `torch.distributed.checkpoint`. Its `.metadata` is a pickle, and to unpickle a file is to
run code from it. Its writer for safetensors knows tensors only, so learning rates would need a
separate file anyway. Folders of that format are refused; scripts/convert_optimizer.py reads
folders that its user trusts.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_flexseq.checkpoints.files import PARTIAL, stored_tensors, write_json

INDEX = "index.json"
SCHEDULER = "scheduler.json"
TENSORS = "state-{part:05d}-of-{parts:05d}.safetensors"
PICKLED = ".metadata"  # the index of torch.distributed.checkpoint, which earlier versions wrote
FORMAT = 1  # of the index; raise it when a reader of the former format would go wrong
CONVERTER = "python scripts/convert_optimizer.py OLD NEW --i-trust-this-file"

# What a save may have left in the folder, one by an earlier version too. The index goes first.
WRITTEN = (INDEX, PICKLED, SCHEDULER, "state-*.safetensors", f"*{PARTIAL}", "*.distcp")
_PLAIN = bool | int | float | str | None  # what JSON gives back as it was


# ---- writing


def check_plain(key: str, value: Any) -> None:
    """Raise ValueError, naming `key`, for a value that JSON would not give back as it was."""
    parts = value if isinstance(value, tuple | list) else (value,)
    for part in parts:
        if not isinstance(part, _PLAIN):
            raise ValueError(
                f"the optimizer's {key} holds a {type(part).__name__}; only tensors, numbers, "
                "strings, None and tuples of them can be saved"
            )


def is_plain(value: Any) -> bool:
    """Tell if JSON gives a value back as it was, but for lists instead of tuples."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(part) for key, part in value.items())
    if isinstance(value, tuple | list):
        return all(is_plain(part) for part in value)
    return isinstance(value, _PLAIN)


def write_index(folder: Path, tensors: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Write the index: by key, the file that holds a tensor, and each other value."""
    index = {"format": FORMAT, "tensors": dict(tensors), "values": dict(values)}
    write_json(folder / INDEX, index)


# ---- reading


class SavedState:
    """A saved state by key. Tensors stay on disk until they are asked for."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Any],
        values: Mapping[str, Any],
        read: Callable[[dict[str, Any]], Iterable[tuple[str, Any]]],
    ) -> None:
        """path: for messages. tensors: by key, a tensor or its place. values: all others. read:
        yields some of `tensors`, each by rows."""
        self._path = path
        self._tensors = tensors
        self._values = values
        self._read = read

    def keys(self) -> set[str]:
        """Return the keys of all tensors and of all other values."""
        return self._tensors.keys() | self._values.keys()

    def value(self, key: str) -> Any:
        """Return a value other than a tensor, maybe a list for a tuple. Raises ValueError for a
        tensor."""
        if key not in self._values:
            raise ValueError(f"{self._path} holds {key} as a tensor, not as this run's number")
        return self._values[key]

    def tensors(self, keys: Iterable[str]) -> Iterable[tuple[str, Any]]:
        """Yield each key with its whole tensor, or with the slice of a file that gives it by rows.
        Raises ValueError for other values."""
        wanted = {}
        for key in keys:
            if key not in self._tensors:
                raise ValueError(f"{self._path} holds {key} as a number, not as this run's tensor")
            wanted[key] = self._tensors[key]
        return self._read(wanted)


def named_state(folder: Path) -> SavedState:
    """Return the state in a folder. Raises ValueError for a folder without an index, or with a
    pickle."""
    if (folder / PICKLED).exists():
        raise ValueError(
            f"{folder / PICKLED} is a pickle, which could run any code and is not read: "
            f"`{CONVERTER}` makes a checkpoint NEW of a checkpoint OLD that you trust"
        )
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has no {INDEX}: saving was interrupted")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{folder / INDEX} is not an index of format {FORMAT}")
    files: dict[str, str] = index["tensors"]
    return SavedState(folder, files, index["values"], partial(stored_tensors, folder))


def numbered_state(path: Path, groups: Sequence[Sequence[str]]) -> SavedState:
    """Return the state in a Trainer's `optimizer.pt`, with the keys that it would have by names.

    groups: names of parameters in the order of their numbers. Raises ValueError when the file has
    others.
    """
    saved = torch.load(  # noqa: TID251
        path, map_location="cpu", weights_only=True, mmap=True
    )
    own = [list(group) for group in groups if group]
    found = [group for group in saved["param_groups"] if group["params"]]
    sizes, expected = ([len(group["params"]) for group in found], [len(g) for g in own])
    if sizes != expected:
        raise ValueError(
            f"{path} has the state of {sum(sizes)} parameters in groups of {sizes}, but this "
            f"run trains {sum(expected)} in groups of {expected}"
        )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for group, names in zip(found, own, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        for name, number in zip(names, group["params"], strict=True):
            state = saved["state"].get(number)
            if not state:
                values[f"state.{name}"] = None
            for prefix, part in (("param_groups", options), ("state", state or {})):
                for key, value in part.items():
                    kind = tensors if isinstance(value, torch.Tensor) else values
                    kind[f"{prefix}.{name}.{key}"] = value
    return SavedState(path, tensors, values, dict.items)


def parameters_of(keys: Iterable[str]) -> set[str]:
    """Return the names of the parameters that a state with these keys is of."""
    options = [
        key.removeprefix("param_groups.") for key in keys if key.startswith("param_groups.")
    ]
    return {option.rpartition(".")[0] for option in options}
