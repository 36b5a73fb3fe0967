"""The parts of `scripts/gpu_check.py`.

    report.py          settings, a section of the page, commands in processes of their own
    subject.py         a small model, documents, their true gradients, random plans
    kernels.py         CUDA kernels against float32, and their seconds
    one_device.py      all strategies and pipelines, with ranks that are threads of one process
    several.py         the same plans over NCCL, under DDP, FSDP2 and HSDP
    lost_rank.py       a rank that is killed in the middle of a step
    stub.py            a rank of many, all alone: its messages arrive at once
    kinds.py           windows, chunks, sinks and softcaps, every strategy
    recurrent.py       recurrent layers, and milliseconds of their scans
    tuning.py          how long Triton's tuned kernels may compile
    fused.py           Triton's kernels for merging and packing
    figures.py         calibration, memory, and the host's share of a layer
    training.py        FlexSeqTrainer against the stock Trainer
    images.py          the same on images

Every part runs in a process of its own, so that one that dies leaves the others, and leaves no
memory on the GPU. On a CPU all of them can be rehearsed, with small sizes.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # ranks as threads and plans are tests'
