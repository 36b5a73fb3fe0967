"""Keep fitted cost models between runs, one JSON file each.

The name of a file is a digest of everything that its fit depends on, so another machine, model or
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

FORMAT = 6  # version of what is measured and how; raised when older fits must not be used any more


def cache_path(folder: Path, key: Mapping[str, object]) -> Path:
    """Return the path of the fit that depends on `key`, a mapping of plain JSON values."""
    # Sorted and without spaces, so that equal keys give equal text.
    record = json.dumps({"format": FORMAT, **key}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(record.encode()).hexdigest()
    return folder / f"cost-{digest[:16]}.json"


def load_cached(path: Path) -> CostModel | None:
    """Load the cost model at `path`, or return None if it is missing or unreadable."""
    try:
        return CostModel.load(path)
    except ValueError:
        return None


def save_whole(cost: CostModel, path: Path) -> None:
    """Write the file atomically. Raises OSError if the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        cost.save(unfinished)
        os.replace(unfinished, path)
    except BaseException:  # an interrupted save leaves no half of a file behind
        Path(unfinished).unlink(missing_ok=True)
        raise
