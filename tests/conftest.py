"""One thread for every test: ranks are forked, and a forked child of a multi-threaded parent can
hang. And every test finds the process as the first one did: training arguments leave environment
variables and accelerate's state behind, which ranks forked later would inherit."""

import os
import sys

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
