"""Turn a checkpoint whose optimizer's state is pickled into one that a run can go on from.

    python scripts/convert_optimizer.py runs/checkpoint-300 new/checkpoint-300 --i-trust-this-file

Earlier versions wrote `flexseq_optimizer/` by torch.distributed.checkpoint. Reading such a folder
unpickles files of it, and a pickle can run any code with the rights of whoever reads it. Training
therefore refuses the folder, and this script wants to be told that OLD is trusted: say so only of
a checkpoint that you wrote, or whose writer you know.

OLD stays as it is. NEW must not exist yet; it gets a copy of all other files of OLD, weights
included.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hf_flexseq.checkpoints.files import PARTIAL, clear, write_tensors
from hf_flexseq.checkpoints.optimizer import FOLDER
from hf_flexseq.checkpoints.optimizer_files import (
    PICKLED,
    TENSORS,
    WRITTEN,
    check_plain,
    write_index,
)

TRUSTED = "--i-trust-this-file"


def unpickled_state(folder: Path) -> dict[str, object]:
    """Return the flat state that `folder` holds: tensors, each whole and on the CPU, and values.

    Runs whatever the folder's pickles say.
    """
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state: dict[str, object] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        else:
            state[key] = None  # dcp.load puts the value here
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def convert(old: Path, new: Path) -> int:
    """Write the checkpoint `new` from `old`, and return the number of keys of its state."""
    state = unpickled_state(old / FOLDER)
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    values = {key: value for key, value in state.items() if key not in tensors}
    for key, value in values.items():
        check_plain(key, value)

    # A checkpoint without its optimizer's state would train on from none, so NEW appears complete.
    partial = new.with_name(new.name + PARTIAL)
    shutil.copytree(old, partial, ignore=shutil.ignore_patterns(FOLDER), dirs_exist_ok=True)
    folder = partial / FOLDER
    file = TENSORS.format(part=1, parts=1)
    clear(folder, WRITTEN)
    write_tensors(folder / file, tensors)
    write_index(folder, dict.fromkeys(tensors, file), values)
    partial.rename(new)
    return len(state)


def main(arguments: list[str] | None = None) -> int:
    """Convert, or say in one line why not; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="the checkpoint")
    parser.add_argument(
        "new", type=Path, metavar="NEW", help="where the converted checkpoint goes"
    )
    parser.add_argument(
        TRUSTED, action="store_true", dest="trusted", help="OLD may run code on this machine"
    )
    given = parser.parse_args(arguments)
    pickled = given.old / FOLDER / PICKLED
    if not pickled.is_file():
        refusal = f"{pickled} is not there: nothing needs converting"
    elif given.new.exists():
        refusal = f"{given.new} exists already"
    elif not given.trusted:
        refusal = f"{pickled} is a pickle, which can run any code: pass {TRUSTED} if you trust it"
    else:
        count = convert(given.old, given.new)
        print(f"{count} values of the optimizer's state written to {given.new / FOLDER}")
        return 0
    print(refusal, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
