"""Figures in words for people."""


def seconds(value: float) -> str:
    """Return seconds with three digits, in the unit that suits them."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"
    if value >= 1e-3:
        return f"{1e3 * value:.3g} ms"
    return f"{1e6 * value:.3g} us"


def share(value: float) -> str:
    """Return a share as percent, with a digit behind the point."""
    return f"{100 * value:.1f} %"


def tokens(count: int) -> str:
    """Return a number of tokens that is short on an axis: 512, 1K, 128K, 2M."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"


def counted(count: int, name: str) -> str:
    """Return a number of things: 1 step, 2 steps."""
    return f"{count:,} {name}{'s' * (count != 1)}"
