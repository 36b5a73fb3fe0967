"""What every test finds, and the sets of tests.

    pytest                   all tests
    pytest -m quick -n 2     those that start no process and compute little, properties on a tenth
                             of their examples
    pytest -m nightly        those that no other command runs, since they take very long: all
                             families of models, all draws, the programs of the documentation
    pytest -m kernels        kernels of packages that no other test needs, interpreted on a CPU
    pytest --device cuda     those that a GPU can run, and no other (`device.py`)

A test that forks ranks or starts a command is marked `processes`, one that computes for more than
a third of a second `slow`; every other test is `quick`. A quick test that starts a process all the
same fails, whichever set runs, and says which mark it lacks.

Every test runs on one thread, because ranks are forked and a forked child of a multi-threaded
parent can hang. Python's garbage collector would take a third of the time in which pytest finds
the tests, so it starts afterwards, and leaves out all objects of that time, and again after every
file: a full collection, which accelerate asks for after every training, would walk all of them. A
forked rank leaves out all that its parent had (`ranks.py`). And every test finds the process as
the first one did: training arguments leave environment variables and accelerate's state behind,
which ranks forked later would inherit.
"""

import contextlib
import functools
import gc
import os
import subprocess
import sys
from collections import Counter

# Read by libraries when they are loaded, and by accelerate, which would give ranks more threads.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests import budget, device

gc.disable()  # until pytest has found all tests
torch.set_num_threads(1)
# Fake tensors have a CUDA build of torch on a machine without a GPU take it that there is one. Its
# autograd then starts a thread for the device, after which a forked rank has no backward.
if device.NAME == "cpu":
    torch._C._ensureCUDADeviceGuardSet = lambda: None
# For all that tests start, too: a thread that wakes up does not push aside one that runs. Tests of
# several ranks on two cores spend 0.6 of the system time then. Linux alone has it.
with contextlib.suppress(AttributeError, PermissionError):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

_STARTS_A_PROCESS = ("fork", "forkpty", "posix_spawn", "posix_spawnp")  # of the module os
# Lists the fonts of the machine for matplotlib, once for every user.
_FONT_LIST = "fc-list"
SHOWN_FROM_S = 60.0  # a run that takes less shows no files
SHOWN_FILES = 25
_watched: list[str] = []  # the quick test that runs now


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="cuda: run the tests marked on_device there")


def pytest_configure(config: pytest.Config) -> None:
    budget.quick = config.option.markexpr == "quick"
    # No audit hook, which would be called for every frame that torch and transformers look at: it
    # took a fiftieth of all tests.
    for name in _STARTS_A_PROCESS:
        setattr(os, name, _refused(getattr(os, name), name))
    subprocess.Popen.__init__ = _refused(subprocess.Popen.__init__, "subprocess.Popen")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for mark in ("nightly", "kernels"):
        if mark not in config.option.markexpr:
            _deselect(config, items, lambda item, mark=mark: item.get_closest_marker(mark))
    if device.NAME != "cpu":
        _deselect(config, items, lambda item: not item.get_closest_marker("on_device"))
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    for item in items:
        marks = ("processes", "slow")
        if all(item.get_closest_marker(mark) is None for mark in marks):
            item.add_marker(pytest.mark.quick)


def _deselect(config, items, is_left_out):
    left_out = [item for item in items if is_left_out(item)]
    items[:] = [item for item in items if not is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the files of tests that took longest, so that a slow one shows."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if seconds.total() < SHOWN_FROM_S:
        return
    terminalreporter.section(f"seconds by file, {seconds.total():.0f} in all")
    for name, taken in seconds.most_common(SHOWN_FILES):
        terminalreporter.line(f"{taken:7.1f}  {name}")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tests import others' trainers and models: from one file to the next more is to be left
    out."""
    if nextitem is not None and nextitem.path != item.path:
        _leave_out_of_collections()


def _leave_out_of_collections() -> None:
    gc.collect()
    gc.freeze()


def _refused(start, name):
    """`start`, which starts a process, for tests that may."""

    @functools.wraps(start)
    def checked(*args, **kwargs):
        command = args[1] if len(args) > 1 else kwargs.get("args")  # of a Popen
        lists_fonts = isinstance(command, list | tuple) and command[:1] == [_FONT_LIST]
        if _watched and not lists_fonts:
            raise AssertionError(
                f"{_watched[-1]} starts a process ({name}): mark it pytest.mark.processes"
            )
        return start(*args, **kwargs)

    return checked


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    # Bytes: thousands of tests decode no variable, and set none.
    before = os.environ._data.copy()
    if request.node.get_closest_marker("quick"):
        _watched.append(request.node.nodeid)
    yield
    _watched.clear()
    if os.environ._data != before:
        os.environ.clear()
        os.environ.update({os.fsdecode(name): os.fsdecode(one) for name, one in before.items()})
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
