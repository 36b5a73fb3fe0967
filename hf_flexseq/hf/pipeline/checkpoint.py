"""The weights of a pipeline as one ordinary HF checkpoint.

    model-00001-of-00002.safetensors   by each stage its own tensors under their global names, a
                                       tied tensor once, and
                                       whole when its ranks share them
    model.safetensors.index.json       by rank 0

All ranks read and write one folder, so the file system must be shared. Files of an earlier save
that do not belong to this one are removed first: an index and a `model.safetensors` side by side
would leave open which one counts.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from hf_flexseq.distributed.control import gather_objects
from hf_flexseq.hf.pipeline.engine import PipelineEngine
from hf_flexseq.pipeline.sharding import divided_like, whole
from hf_flexseq.pipeline.stages import Stage

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def save_stage(engine: PipelineEngine, folder: str) -> None:
    """Write this stage's part of the checkpoint, by one of its ranks. Collective over the
    world."""
    path, stage = Path(folder), engine.stage
    name = f"model-{stage.index + 1:05d}-of-{stage.count:05d}.safetensors"
    tensors = _owned_tensors(engine)
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    written = gather_objects(engine.communicator, (name, sizes))
    if engine.communicator.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        _save_config(stage, path)
        weight_map = {key: file for file, keys in written for key in keys}
        total = sum(size for _, keys in written for size in keys.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    _barrier(engine)  # the folder is there, and empty of what is old
    if tensors:
        save_file(tensors, path / name, metadata={"format": "pt"})
    _barrier(engine)


def _owned_tensors(engine: PipelineEngine) -> dict[str, torch.Tensor]:
    """The stage's tensors by global name, on one of its ranks. Of a tied tensor the first stage's
    copy counts. Collective over the ranks of a stage that share its parameters."""
    stage = engine.stage
    copied = stage.tied_parameter() if stage.is_last else None
    dropped = {name for name, p in stage.stack.model.named_parameters() if p is copied}
    tensors = {}
    for name, tensor in stage.stack.model.state_dict().items():
        if name not in dropped:
            gathered = whole(tensor.detach()).contiguous()
            if engine.place == 0:
                # never the stage twice
                tensors[name] = gathered if engine.sharded is None else gathered.cpu()
    return tensors


def _remove_stale(path: Path) -> None:
    for pattern in (
        "model*.safetensors",
        INDEX,
        "pytorch_model*.bin",
        "pytorch_model.bin.index.json",
    ):
        for file in path.glob(pattern):
            file.unlink()


def _save_config(stage: Stage, path: Path) -> None:
    model = stage.stack.model
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    former = model.config._attn_implementation
    model.config.save_pretrained(path)
    assert model.config._attn_implementation == former, (
        "saving the configuration changed the attention"
    )
    if model.can_generate():
        model.generation_config.save_pretrained(path)


def load_stage(engine: PipelineEngine, folder: str) -> None:
    """Read this stage's tensors from any HF checkpoint in safetensors. Raises ValueError, naming
    them, for those that are missing."""
    path, stage = Path(folder), engine.stage
    files = _files_by_tensor(path)
    own = dict(stage.stack.model.state_dict(keep_vars=True))
    tied = stage.tied_parameter()
    wanted = {
        name: stage.tied_name if tensor is tied and stage.tied_name else name
        for name, tensor in own.items()
    }
    missing = sorted({name for name in wanted.values() if name not in files})
    if missing:
        raise ValueError(
            f"{folder} has no {', '.join(missing)}: it is no checkpoint of this model"
        )
    for file in sorted({files[name] for name in wanted.values()}):
        with safe_open(path / file, framework="pt") as tensors, torch.no_grad():
            for name, source in wanted.items():
                if files[source] == file:
                    own[name].copy_(divided_like(tensors.get_tensor(source), own[name]))


def _files_by_tensor(path: Path) -> dict[str, str]:
    """Which file of a checkpoint has which tensor."""
    if (path / INDEX).is_file():
        return dict(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (path / WHOLE).is_file():
        raise ValueError(f"{path} has neither {INDEX} nor {WHOLE}")
    with safe_open(path / WHOLE, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), WHOLE)


def _barrier(engine: PipelineEngine) -> None:
    dist.barrier(group=engine.communicator.control)
