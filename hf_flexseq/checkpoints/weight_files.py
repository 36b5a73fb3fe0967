"""The files of a model's weights as `save_pretrained` writes them: safetensors, and an index where
there are several."""

import json
from pathlib import Path

from safetensors import safe_open

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def files_by_tensor(path: Path) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint. Raises ValueError without any."""
    if (path / INDEX).is_file():
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return dict(index["weight_map"])
    if not (path / WHOLE).is_file():
        raise ValueError(f"{path} has neither {INDEX} nor {WHOLE}")
    with safe_open(path / WHOLE, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), WHOLE)
