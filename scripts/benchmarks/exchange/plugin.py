"""A pytest plugin: exchange a Trainer for its FlexSeq variant, and run each test on several ranks.

    pytest -p exchange.plugin --ranks 2 --outcomes FILE --exchange

1. Before any test is imported, `transformers.Trainer` and TRL's trainers become subclasses with
   `FlexSeqMixin` in front, with a cost model that measures nothing (`cost_model="estimate"`).
2. Every test runs in forked processes of its own, one per rank, which a launcher's variables tell
   that they belong together. Tests do not see each other, and a hang ends.
3. Names that the sources import and the installed library no longer has become placeholders, so
   that the other tests of a file run.
4. A test passes when it does on all ranks. It is *refused* when the error on all ranks is a
   ValueError or NotImplementedError that hf_flexseq raises; else it fails. One that passes and
   never makes a trainer of the exchanged class is *unused*. One line of JSON per test says so.
"""

import ast
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Generator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from _pytest.runner import runtestprotocol
from _pytest.skipping import evaluate_skip_marks

import hf_flexseq
from hf_flexseq import FlexSeqArguments, FlexSeqMixin

PACKAGE = Path(hf_flexseq.__file__).parent
LIBRARIES = ("transformers", "trl")
TRAINERS = (  # of TRL
    *("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"),
)
MOST_SECONDS = 300  # that a test may take
MOST_CHARACTERS = 500  # of an error that are kept
Outcome = tuple[str, str]  # passed, unused, skipped, refused or failed, and why

made: list[str] = []  # the exchanged classes that the running test has made trainers of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exchange", action="store_true", help="exchange the Trainers")
    parser.addoption("--ranks", type=int, default=1, help="processes per test")
    parser.addoption("--outcomes", type=Path, required=True, help="file of JSON lines")
    parser.addoption("--tests", type=Path, help="file that names the tests to run, one a line")


def pytest_configure(config: pytest.Config) -> None:
    # a forked child of a multi-threaded parent hangs in its first parallel region
    torch.set_num_threads(1)
    stay_on_the_cpu()
    if config.getoption("exchange"):
        for name in TRAINERS:
            setattr(trl, name, exchanged(getattr(trl, name)))
        # To import TRL's trainers makes another module object of `transformers`.
        library: Any = sys.modules["transformers"]
        library.Trainer = exchanged(library.Trainer)


def stay_on_the_cpu() -> None:
    """Make all training arguments ask for the CPU: several ranks find each other there only when
    they do."""
    former = transformers.TrainingArguments.__post_init__

    def on_the_cpu(self: Any) -> None:
        self.use_cpu = True
        former(self)

    transformers.TrainingArguments.__post_init__ = on_the_cpu


def exchanged(trainer: type) -> type:
    """Return a trainer's FlexSeq variant, under its name."""

    def create(self: Any, *given: Any, **named: Any) -> None:
        made.append(trainer.__name__)
        named.setdefault("flexseq_args", FlexSeqArguments(cost_model="estimate"))
        super(variant, self).__init__(*given, **named)

    variant: type = type(trainer.__name__, (FlexSeqMixin, trainer), {"__init__": create})
    return variant


def pytest_collect_file(file_path: Path) -> None:
    """Stand in for names that a file of tests imports from a library that lacks them."""
    if file_path.suffix != ".py":
        return
    for statement in ast.walk(ast.parse(file_path.read_text(encoding="utf-8"))):
        if not isinstance(statement, ast.ImportFrom) or statement.level:
            continue
        library = str(statement.module).partition(".")[0]
        if library in LIBRARIES:
            fill_in(str(statement.module), [alias.name for alias in statement.names])


def fill_in(module_name: str, names: list[str]) -> None:
    """Give a module a placeholder for each of the names that it lacks."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return  # the test that imports it will say so
    for name in names:
        full_name = f"{module_name}.{name}"
        is_module = hasattr(module, "__path__") and find_spec(full_name) is not None
        if not hasattr(module, name) and not is_module:
            setattr(module, name, placeholder(full_name))


def placeholder(name: str) -> Any:
    """Return a function that says that it is not there."""

    def missing(*given: Any, **named: Any) -> None:
        raise AttributeError(f"{name} is not in the installed version")

    return missing


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = config.getoption("tests")
    if file is not None:
        wanted = set(file.read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in wanted]


# ---- one test on all ranks


def pytest_runtest_protocol(item: pytest.Item) -> bool:
    began = time.monotonic()
    skipped = evaluate_skip_marks(item)
    if skipped:
        outcome, why = "skipped", f"skipped: {skipped.reason}"
    else:
        outcome, why = combined(run_on_ranks(item, item.config.getoption("ranks")))
    seconds = round(time.monotonic() - began, 1)
    line = {"test": item.nodeid, "outcome": outcome, "why": why, "seconds": seconds}
    with item.config.getoption("outcomes").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return True


def run_on_ranks(item: pytest.Item, ranks: int) -> list[Outcome]:
    """Return what became of a test on each rank."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=run_rank, args=(item, rank, ranks, port, Path(folder), there)
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        deadline = time.monotonic() + MOST_SECONDS
        outcomes = [received(pipe, deadline) for pipe in pipes]
        # All have finished: none is ended before, for the others may still need it.
        for process in processes:
            kill_group(process.pid)
            process.join()
    return outcomes


def received(pipe: Connection, deadline: float) -> Outcome:
    """Return what a rank reports."""
    if not pipe.poll(max(deadline - time.monotonic(), 0)):
        return "failed", f"no end after {MOST_SECONDS} s"
    try:
        outcome: Outcome = pipe.recv()
    except EOFError:
        outcome = "failed", "the process died"
    return outcome


def kill_group(leader: int | None) -> None:
    """End a rank's process and those that it has started."""
    assert leader is not None, "the process was started"
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_port() -> int:
    """Return a port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def combined(outcomes: list[Outcome]) -> Outcome:
    """Return one outcome for all ranks: they must agree."""
    kinds = {kind for kind, _ in outcomes}
    if len(kinds) == 1:
        return outcomes[0]
    reasons = [f"rank {rank} {kind}: {why}" for rank, (kind, why) in enumerate(outcomes)]
    return "failed", " | ".join(reasons)


def run_rank(
    item: pytest.Item, rank: int, ranks: int, port: int, folder: Path, pipe: Connection
) -> None:
    """Run a test as one of several ranks, in a process of its own, and report."""
    os.setpgid(0, 0)
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
        os.environ["MASTER_PORT"] = str(port)

    def shared_folder(name: str, numbered: bool = True) -> Path:
        place = folder / name
        place.mkdir(exist_ok=True)
        return place

    # The ranks of a job write to one folder.
    item.config._tmp_path_factory.mktemp = shared_folder  # type: ignore[attr-defined]
    reports = runtestprotocol(item, log=False, nextitem=None)
    found = [getattr(report, "outcome_here", ("passed", "")) for report in reports[:2]]
    kind, why = next((pair for pair in found if pair[0] != "passed"), ("passed", ""))
    if kind == "passed" and item.config.getoption("exchange") and not made:
        kind = "unused"
    pipe.send((kind, why))
    signal.pause()  # until the parent ends all ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.outcome_here = outcome_of(report, call)
    return report


def outcome_of(report: pytest.TestReport, call: pytest.CallInfo[None]) -> Outcome:
    """Tell passed, skipped, refused and failed apart."""
    if report.passed:
        return "passed", ""
    if report.skipped:
        return "skipped", f"skipped: {report.longrepr[2]}" if report.longrepr else ""
    assert call.excinfo is not None, "a test that failed without an exception"
    error = call.excinfo.value
    message = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_CHARACTERS]
    trace = call.excinfo.tb
    while trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = Path(trace.tb_frame.f_code.co_filename)
    is_refusal = isinstance(error, (ValueError, NotImplementedError))
    if is_refusal and raised_in.is_relative_to(PACKAGE):
        return "refused", message
    return "failed", message
