"""One line for what is wrong with options, data or a model, instead of a traceback."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dis import opname
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from tqdm import tqdm

from hf_flexseq import PlanInfeasible
from hf_flexseq.distributed import agreement

# Errors by which options, data and models are refused.
MISTAKES = (ValueError, NotImplementedError, OSError)


def end_with(message: str) -> NoReturn:
    """End the program; the first process of each node says why: one may lack a file."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        tqdm.write(f"error: {message}", file=sys.stderr)  # not behind a progress bar
    sys.exit(2)


@contextmanager
def errors_in_a_line() -> Iterator[None]:
    """End the program with one line for what the block, alike on all processes of a node, finds
    wrong with options, data or model. Other errors keep their traceback."""
    try:
        yield
    except MISTAKES as error:
        end_with(in_a_line(error))


@contextmanager
def refusals_in_a_line() -> Iterator[None]:
    """End the program with one line where hf_flexseq refuses what it is given, as a checkpoint or
    a sequence that does not fit, in the middle of a run. One process alone may meet it. Other
    errors keep their traceback."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if not is_refusal(error):
            raise
        line = in_a_line(error)
        if _is_first_to_say(line):
            tqdm.write(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def is_refusal(error: BaseException) -> bool:
    """Tell if hf_flexseq has raised an error on purpose.

    A check ends in a statement `raise` of hf_flexseq's own code. The error of a bug comes out of
    other code, or out of an expression, such as int("x").
    """
    if isinstance(error, PlanInfeasible):
        return True
    where = error.__traceback__
    while where.tb_next is not None:
        where = where.tb_next
    module = where.tb_frame.f_globals.get("__name__", "")
    if module == agreement.__name__ and error.__cause__ is not None:
        return is_refusal(error.__cause__)  # this process's, in the words that all get
    instruction = where.tb_frame.f_code.co_code[where.tb_lasti]
    return module.partition(".")[0] == "hf_flexseq" and opname[instruction] == "RAISE_VARARGS"


def _is_first_to_say(line: str) -> bool:
    """Tell if no other process of the job has ended with this line before."""
    if not dist.is_initialized():
        return True
    try:
        return dist.distributed_c10d._get_default_store().add(f"error: {line}", 1) == 1
    except dist.DistError:  # who keeps the store has ended
        return True


def in_a_line(error: Exception) -> str:
    """Return what an error says, in one line, and what raised it where that is another package's:
    its words may not tell."""
    said = " ".join(str(error).split())
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    is_ours = Path(frame.f_code.co_filename).parent == Path(__file__).parent
    if is_ours or module.partition(".")[0] == "hf_flexseq":
        return said
    return f"{said} (raised in {module}, line {line})"
