"""Fitted cost models kept between runs, one JSON file each.

The name of a file is a digest of everything the fit depends on, so that another machine, model or
version finds no file instead of a wrong one. A file appears under its name only when it is
complete.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hf_flexseq.cost import CostModel

FORMAT = 4  # of what is measured and how: raised when older fits must not be used any more


def cache_path(folder: Path, key: Mapping[str, object]) -> Path:
    """The file of a fit that depends on `key`, plain JSON values."""
    record = json.dumps({"format": FORMAT, **key}, sort_keys=True, separators=(",", ":"))
    return folder / f"cost-{hashlib.sha256(record.encode()).hexdigest()[:16]}.json"


def load_cached(path: Path) -> CostModel | None:
    """The model kept there; None when there is none, or none that can be read."""
    try:
        return CostModel.load(path)
    except ValueError:
        return None


def save_whole(cost: CostModel, path: Path) -> None:
    """Write the file so that no reader ever sees a part of it. Raises OSError when the folder
    cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        cost.save(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
