"""Run pytest on the device: `python -m tests.late_device FILE ... [pytest's options]`."""

import importlib
import os
import sys

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRITON_INTERPRET"] = "1"
importlib.import_module("tests.late_device.install")  # before anything imports torch

# Pytest's own handler of faults would end the process where the device notes one.
OPTIONS = ("-p", "no:faulthandler", "-p", "no:cacheprovider", "-q")

sys.exit(pytest.main([*OPTIONS, *sys.argv[1:]]))
