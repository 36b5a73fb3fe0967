"""How many examples a property is tried on: all of them, or a tenth in the quick set."""

quick = False  # set by conftest.py before any test module is imported


def examples(count: int) -> int:
    """Return `count`, or a tenth of it (at least one) when only the quick set runs."""
    return max(1, count // 10) if quick else count
