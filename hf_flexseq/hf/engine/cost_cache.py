"""Keep the factors that runs have found, one JSON file each, in the folder `hf_flexseq` of the
HuggingFace cache.

The name of a file is a digest of everything that its factors depend on, so another machine, model
or version finds no file instead of a wrong one.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from hf_flexseq.base.reading import parse_json, read_text
from hf_flexseq.checkpoints.files import write_json

FORMAT = 7  # version of what is kept; raised when older files must not be used any more


def cache_path(key: Mapping[str, object]) -> Path:
    """Return the path of the factors that depend on `key`, a mapping of plain JSON values."""
    # Sorted and without spaces, so that equal keys give equal text.
    record = json.dumps({"format": FORMAT, **key}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(record.encode()).hexdigest()
    return Path(HF_HOME) / "hf_flexseq" / f"factors-{digest[:16]}.json"


def load_cached(path: Path) -> Any:
    """Return the JSON value at `path`; None if it is missing or unreadable."""
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError):
        return None


def keep(path: Path, record: Mapping[str, Any]) -> None:
    """Write a file atomically. Raises OSError if the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
