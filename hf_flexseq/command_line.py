"""Parser, options and exit status shared by all commands.

A command exits with 0. Bad input and infeasible plans exit with 2 and one line on stderr.
"""

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NoReturn

from hf_flexseq.base.reading import DEFAULT_LIMITS, Limits
from hf_flexseq.base.topology import Topology
from hf_flexseq.base.values import LINE, MAX_BYTES, MAX_COUNT, one_line, quoted
from hf_flexseq.plan import PlanInfeasible

# Errors of the user's input, of files, and of packages that are not installed.
REFUSALS = (ValueError, OSError, NotImplementedError, ModuleNotFoundError)


class OneLineParser(ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        hint = f" (see {self.prog} --help)"
        self.exit(2, one_line(f"{self.prog}: {message}", LINE - len(hint)) + hint + "\n")


def set_run(parser: ArgumentParser, run: Callable[[Namespace], int | None]) -> None:
    """Let `parser` call `run` with its options. run: returns the exit status, None for 0."""
    parser.set_defaults(run=run, prog=parser.prog)


def run_command(parser: ArgumentParser, argv: Sequence[str]) -> int:
    """Run the command that `argv` names and return its exit status."""
    options = parser.parse_args(argv)
    options.argv = list(argv)
    try:
        _set_limits(options)
        status: int | None = options.run(options)
    except BrokenPipeError:
        sys.stderr.close()  # the reader closed the pipe
        return 0
    except REFUSALS as error:
        kind = "infeasible: " if isinstance(error, PlanInfeasible) else ""
        say(options, f"{kind}{error}")
        return 2
    return status or 0


def say(options: Namespace, message: str) -> None:
    """Write one line on stderr that begins with the command's name."""
    sys.stderr.write(one_line(f"{options.prog}: {message}") + "\n")


# ---- types of options


def topology(text: str) -> Topology:
    """Read a topology written as NODESxRANKS: 8x8 is eight nodes of eight ranks."""
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text)
    if not match:
        raise ArgumentTypeError(f"expected NODESxRANKS such as 8x8, got {quoted(text)}")
    try:
        return Topology(nodes=int(match[1]), ranks_per_node=int(match[2]))
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of integers, at least `least`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"expected a whole number, got {quoted(text)}") from None
        if not least <= value <= MAX_COUNT:
            raise ArgumentTypeError(
                f"expected a number from {least} to {MAX_COUNT}, got {quoted(value)}"
            )
        return value

    return number


def gibibytes(text: str) -> float:
    """Read an amount of memory in GiB, and return bytes."""
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"expected GiB as a number, got {quoted(text)}") from None
    if not 0 <= value * 2**30 <= MAX_BYTES:
        raise ArgumentTypeError(
            f"expected GiB from 0 to {MAX_BYTES / 2**30:.0f}, got {quoted(value)}"
        )
    return value * 2**30


def limit(text: str) -> tuple[str, int]:
    """Read a limit written as NAME=VALUE."""
    names = [one.name for one in fields(Limits)]
    match = re.fullmatch(r"([a-z]+)=([0-9]{1,18})", text)
    if not match or match[1] not in names:
        raise ArgumentTypeError(
            f"invalid limit {quoted(text)}: expected NAME=VALUE, NAME one of {', '.join(names)}"
        )
    return match[1], int(match[2])


# ---- options


def plan_option(parser: ArgumentParser) -> None:
    """Add the file of plans that a command reads."""
    parser.add_argument(
        "plan", metavar="PLAN_OR_TRACE", help="a plan or a plan trace, - for stdin"
    )


def number_option(parser: ArgumentParser, name: str, what: str) -> None:
    """Add an option for a count, 0 by default."""
    parser.add_argument(
        f"--{name}", type=at_least(0), default=0, metavar="N", help=f"{what} (default 0)"
    )


def topology_option(parser: ArgumentParser, *, required: bool, help: str | None = None) -> None:
    """Add --topology."""
    parser.add_argument(
        "--topology", required=required, type=topology, metavar="NODESxRANKS", help=help
    )


def limit_option(parser: ArgumentParser) -> None:
    """Add --limit."""
    defaults = ", ".join(
        f"{one.name}={getattr(DEFAULT_LIMITS, one.name)}" for one in fields(Limits)
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        type=limit,
        metavar="NAME=VALUE",
        help=f"raise a limit; may be given several times (default: {defaults})",
    )


def _set_limits(options: Namespace) -> None:
    """Set `options.limits`. Raises ValueError for a topology beyond them."""
    options.limits = replace(DEFAULT_LIMITS, **dict(getattr(options, "limit", [])))
    machine = getattr(options, "topology", None)
    if machine is not None:
        ranks = machine.world_size
        what = f"--topology {machine.nodes}x{machine.ranks_per_node} has {ranks:,} ranks"
        options.limits.refuse_above("ranks", ranks, what)
