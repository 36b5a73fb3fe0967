"""The weights of a pipeline, written as one ordinary HF checkpoint.

    model-00001-of-00002.safetensors   each stage's tensors under their global names, by one of its
                                       ranks: a tied tensor once, a sharded tensor whole
    model.safetensors.index.json       which file has which tensor, by rank 0

All ranks write one folder, so the file system must be shared. Files of an earlier save that do not
belong to this one are removed first: an index and a `model.safetensors` side by side would leave
open which one counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_flexseq.checkpoints.files import clear, write_json, write_tensors
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.checkpoints.weight_files import INDEX
from hf_flexseq.distributed.agreement import ErrorCapture
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.pipeline.stages import Stage

FILE = "model-{part:05d}-of-{parts:05d}.safetensors"  # of one stage

# what an earlier save, of a pipeline or of a Trainer, may have left
_WRITTEN = ("model*.safetensors", INDEX, "pytorch_model*.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMember:
    """A rank as a member of its stage: everything needed to write its checkpoints."""

    stage: Stage
    """This rank's part of the model."""
    communicator: Communicator
    """All ranks of the pipelines."""
    index: int
    """Counts the ranks of the stage from 0; rank 0 of a stage writes its files."""
    is_sharded: bool
    """True if the ranks of the stage share its parameters by FSDP2."""

    @property
    def writes(self) -> bool:
        """True on the rank that writes the files of its stage."""
        return self.index == 0


Tensors = dict[str, torch.Tensor]  # by global name


def save_stage(member: StageMember, folder: str, as_stored: Callable[[Tensors], Tensors]) -> None:
    """Write the stage's part of the checkpoint, by one of its ranks. Collective over the world.

    as_stored: turns a model's tensors into its checkpoints' tensors, such as a tensor of all
        experts into one tensor per expert.
    """
    path = Path(folder)
    communicator = member.communicator
    gather = communicator.cpu_group.gather_values

    # 1. the tensors of this rank's file
    tensors = _owned_tensors(member)
    with ErrorCapture() as converting:
        tensors = as_stored(tensors)
    converting.raise_on_all_ranks(gather, f"saving to {folder}")

    # 2. the folder is there, and empty of what is old
    with ErrorCapture() as clearing:
        if communicator.rank == 0:
            clear(path, _WRITTEN)
            _save_config(member.stage, path)
    clearing.raise_on_all_ranks(gather, f"clearing {folder}")

    # 3. each stage's tensors, in a file of their own
    file = FILE.format(part=member.stage.index + 1, parts=member.stage.count)
    with ErrorCapture() as writing:
        if tensors:
            write_tensors(path / file, tensors, metadata={"format": "pt"})
    writing.raise_on_all_ranks(gather, f"writing {folder}")

    # 4. the index, when all files are there
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    written = gather((file, sizes))
    with ErrorCapture() as indexing:
        if communicator.rank == 0:
            _save_index(path, written)
    indexing.raise_on_all_ranks(gather, f"writing the index of {folder}")


def _owned_tensors(member: StageMember) -> Tensors:
    """Return the stage's whole tensors by global name on the rank that writes them, {} elsewhere;
    the first stage's copy of a tied one. Collective over ranks that share the parameters."""
    stage = member.stage
    tensors = {}
    for name, tensor in stage.stack.model.state_dict(keep_vars=True).items():
        if tensor is stage.second_copy:
            continue
        gathered = whole(tensor.detach()).contiguous()  # [rows / ranks, ...] -> [rows, ...]
        if member.writes:
            # A gathered tensor leaves the device, which has no room for the stage twice.
            tensors[name] = gathered.cpu() if member.is_sharded else gathered
    return tensors


def _save_index(path: Path, written: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Write the index. written: (file, bytes of each tensor in it) of every rank."""
    weight_map = {}
    total = 0
    for file, sizes in written:
        for name, size in sizes.items():
            weight_map[name] = file
            total += size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(path / INDEX, index)


def _save_config(stage: Stage, path: Path) -> None:
    """Write the model's configuration, as `from_pretrained` reads it."""
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
