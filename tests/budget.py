"""How much is tried: fewer examples in the quick set, and one case per code path in every run."""

from collections.abc import Container, Iterable

import pytest

quick = False  # set by conftest.py before any test module is imported


def examples(count: int) -> int:
    """Return `count`, or a tenth of it (at least one) when only the quick set runs."""
    return max(1, count // 10) if quick else count


def others_nightly(cases: Iterable[object], tried: Container[object]) -> list[object]:
    """Return parameters for all `cases`; those that are not in `tried` run with `-m nightly`."""
    found: list[object] = []
    for case in cases:
        found.append(case if case in tried else pytest.param(case, marks=pytest.mark.nightly))
    return found
