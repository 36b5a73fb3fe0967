"""Run pytest on the device: `python -m tests.late_device FILE ... [pytest's options]`.

With `--device cuda` FILEs are tests that a GPU can run. Their ranks have transfers on streams of
their own, and every finding fails a test.
"""

import importlib
import os
import sys

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRITON_INTERPRET"] = "1"
importlib.import_module("tests.late_device.install")  # before anything imports torch

# Pytest's own handler of faults would end the process where the device notes one.
OPTIONS = ("-p", "no:faulthandler", "-p", "no:cacheprovider", "-q")

if "--device" in sys.argv:
    choose = importlib.import_module("hf_flexseq.kernels.choose")
    choose._fused_for_cuda = choose.TorchFused  # Triton's interpreter takes very long
    lanes, ranks = (
        importlib.import_module(f"tests.{name}") for name in ("late_device.lanes", "ranks")
    )
    ranks.ThreadHub = lanes.LateHub
    OPTIONS += ("-p", "tests.late_device.on_device.conftest")

sys.exit(pytest.main([*OPTIONS, *sys.argv[1:]]))
