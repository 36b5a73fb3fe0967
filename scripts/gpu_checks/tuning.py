"""Bounds on how long Triton's tuned kernels compile.

A tuned kernel is compiled with each of its configurations before the fastest is known. Those of
flash-linear-attention that a recurrent layer runs have 412 together, 1.0 s of a processor each,
one after the other. Here

    first_configurations    takes the first configuration of each that the GPU has room for: what
                            it computes is judged, and how fast it is is not
    compiled_side_by_side   lets all configurations of a kernel be compiled by several threads
                            before they are timed: the fastest is taken, as always

Without Triton neither does anything.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module, util
from typing import Any
from unittest import mock


@contextmanager
def first_configurations() -> Iterator[None]:
    """Let every tuned kernel take the first of its configurations that the GPU can run."""
    if util.find_spec("triton") is None:
        yield
        return
    errors = import_module("triton.runtime.errors")
    too_much = (errors.OutOfResources, errors.PTXASError)

    def run_first(tuner: Any, *given: Any, **named: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, given, strict=False))
        for config in tuner.prune_configs(named):
            with suppress(*too_much):
                return tuner.fn.run(*given, **named, **config.all_kwargs())
        raise RuntimeError(f"no configuration of {tuner.base_fn.__name__} fits this GPU")

    with mock.patch.object(_tuner_class(), "run", run_first):
        yield


@contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """Let the configurations of a tuned kernel be compiled by as many threads as there are
    processors; what does not compile is left to the tuner."""
    if util.find_spec("triton") is None:
        yield
        return
    compile_in = getattr(import_module("triton"), "AsyncCompileMode", None)
    if compile_in is None:  # before Triton 3.5
        yield
        return
    pruned = _tuner_class().prune_configs

    def compile_all(tuner: Any, named: dict[str, Any]) -> Any:
        configs = list(pruned(tuner, named))
        given = list(tuner.nargs.values())
        with ThreadPoolExecutor(os.cpu_count()) as pool, compile_in(pool, ignore_errors=True):
            for config in configs:
                tuner.fn.run(*given, **named | {"warmup": True}, **config.all_kwargs())
        return configs

    with mock.patch.object(_tuner_class(), "prune_configs", compile_all):
        yield


def _tuner_class() -> Any:
    """Return Triton's class of tuned kernels; that of flash-linear-attention is made of it."""
    return import_module("triton.runtime.autotuner").Autotuner
