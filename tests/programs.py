"""Run a program of this repository, as its command would, in a fork of this process.

The fork has torch and transformers already, which a new interpreter takes seconds to import, on
every rank. That a program starts from nothing is for another test of it to show, with a command.
"""

import io
import multiprocessing
import os
import runpy
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

from tests.ranks import leave_out_of_collections, run_ranks

ROOT = Path(__file__).parents[1]


def run_program(path, *words, seconds=150, folder=ROOT):
    """What `python path words` prints, started in `folder`. Raises AssertionError where it
    fails."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(there, path, words, folder))
    process.start()
    there.close()
    try:
        assert here.poll(seconds), f"{path.name} did not finish in time"
        ok, said = here.recv()
    finally:
        process.kill()
        process.join()
    assert ok, said
    return said


def run_program_on_ranks(world_size, path, *words, seconds=150, folder=ROOT):
    """What each rank prints, where a launcher starts `python path words` on all of them."""
    return run_ranks(_on_a_rank, world_size, path, words, folder, seconds=seconds)


def _main(pipe, path, words, folder):
    leave_out_of_collections()
    try:
        pipe.send((True, _printed(path, words, folder)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)  # a fork has nothing of the parent's to end


def _on_a_rank(rank, world_size, path, words, folder):
    return _printed(path, words, folder)


def _printed(path, words, folder):
    os.chdir(folder)
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *map(str, words)]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
