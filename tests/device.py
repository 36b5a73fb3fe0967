"""The device of the tests that are marked `on_device`: the CPU, or what --device names.

    pytest --device cuda                       all of them, on a GPU, and no other test
    pytest --device cuda tests/attention -x    those of one folder

Ranks are threads there, too, each with a stream of its own on the one device.
"""

import argparse
import os
import sys

import torch

from hf_flexseq.kernels.choose import choose_kernel
from tests.kernels.reference import Reference

_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_parser.add_argument("--device", default="cpu")
NAME = _parser.parse_known_args(sys.argv[1:])[0].device
if NAME == "cpu":
    # Read by Triton when it is imported, by whichever library is first: kernels run on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device(NAME)


def own_kernel(dtype, head_dim, **needs):
    """The device's kernel for calls of 16 bits, and for all calls of a CPU; the plain softmax for
    more bits on a GPU, whose kernels have 16. Raises ValueError where none serves such calls."""
    if DEVICE.type != "cpu" and dtype.itemsize > 2:
        return Reference()
    return choose_kernel(DEVICE, dtype, head_dim, **needs)
