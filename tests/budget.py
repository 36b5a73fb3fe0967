"""How much is tried: fewer examples in the quick set, and one case per code path in every run."""

import functools
import inspect

import pytest

quick = False  # set by conftest.py before any test module is imported
trainer_steps = 3  # that are compared with the plain Trainer's; nightly tests set ten


def examples(count):
    """Return `count`, or a tenth of it (at least one) when only the quick set runs."""
    return max(1, count // 10) if quick else count


def for_seeds(count):
    """Run a test with every `seed` below `count`, as one item.

    A failure names its seed. The seeds share the fixtures of the test.
    """

    def decorated(test):
        @functools.wraps(test)
        def of_all_seeds(**fixtures):
            for seed in range(count):
                try:
                    test(seed=seed, **fixtures)
                except BaseException as error:
                    error.add_note(f"seed {seed}")
                    raise

        signature = inspect.signature(test)
        others = [one for name, one in signature.parameters.items() if name != "seed"]
        of_all_seeds.__signature__ = signature.replace(parameters=others)
        return of_all_seeds

    return decorated


def others_nightly(cases, tried):
    """Return parameters for all `cases`; those that are not in `tried` run with `-m nightly`."""
    return _others_marked(cases, tried, pytest.mark.nightly)


def others_slow(cases, tried):
    """Return parameters for all `cases`; those that are not in `tried` are not quick."""
    return _others_marked(cases, tried, pytest.mark.slow)


def _others_marked(cases, tried, mark):
    return [case if case in tried else pytest.param(case, marks=mark) for case in cases]
