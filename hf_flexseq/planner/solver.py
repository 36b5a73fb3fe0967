"""HiGHS, which solves the planners' integer programs: an optional dependency."""

from typing import Any

import highspy


def new_solver(**options: Any) -> Any:
    """Return an empty solver that prints nothing and has one thread; its variables and sums have
    no types. options: of HiGHS, by name."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    for option, value in {"threads": 1, **options}.items():
        solver.setOptionValue(option, value)
    return solver
