"""The parts of `scripts/gpu_check.py`: what only a GPU can show. What a CPU can compute as well is
a test: `pytest --device cuda`.

    report.py          settings, a section of the page, commands in processes of their own, tests
    rates.py           the speed of attention, alone and on packs, and what cuDNN's plans cost
    cudnn_packs.py     cuDNN on packs, by its own front end
    nccl.py            posts of a world of one, and whether attention hides them
    one_rank.py        a Llama that runs micro-batches on one rank
    layers.py          where the milliseconds of four layers of Llama-3.1-8B go
    training.py        FlexSeqTrainer against the stock Trainer
    figures.py         calibration and memory
    fused.py           the speed of Triton's kernels for merging and packing
    several.py         random plans over NCCL, under DDP, FSDP2 and HSDP
    lost_rank.py       a rank that is killed in the middle of a step

`several` and `lost_rank` need the tests' packages (pip install -e ".[test]"), all others none.
Every part runs in a process of its own, so that one that dies leaves the others, and leaves no
memory on the GPU. On a CPU all of them can be rehearsed, with small sizes.
"""

import sys
from pathlib import Path

# random plans and the plain softmax are those of the tests
sys.path.append(str(Path(__file__).resolve().parents[2]))
