"""The options of the commands: one parser for each, and what their values may be."""

import argparse
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from typing import NoReturn

from hf_flexseq.cli.calibrate import calibrate
from hf_flexseq.cli.commands import plan, simulate, view
from hf_flexseq.cli.compare import SOLVER_SEQUENCES, compare
from hf_flexseq.cli.environment import env
from hf_flexseq.cli.program import DTYPES, LAYER, layer, program, reach, recurrent_rows
from hf_flexseq.cli.report import STEPS, report
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.layers import FULL
from hf_flexseq.plan_options import SYNCS
from hf_flexseq.reading import DEFAULT_LIMITS, Limits
from hf_flexseq.registry import PLANNERS, STRATEGIES
from hf_flexseq.topology import Topology
from hf_flexseq.values import LINE, MAX_COUNT, one_line, quoted


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        hint = f" (see {self.prog} --help)"
        self.exit(2, one_line(f"{self.prog}: {message}", LINE - len(hint)) + hint + "\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `flexseq` with all its commands."""
    parser = OneLineParser(
        prog="flexseq", description="Plan, simulate and look at flexible sequence parallelism."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _plan_options(
        _command(commands, "plan", plan, "decide which ranks work together on which sequences")
    )
    _simulate_options(_command(commands, "simulate", simulate, "run a plan without running it"))
    _compare_options(
        _command(commands, "compare", compare, "a table of all planners on your lengths")
    )
    _report_options(
        _command(commands, "report", report, "a page about your lengths, or about a run")
    )
    _view_options(_command(commands, "view", view, "draw a plan or a plan trace"))
    _program_options(
        _command(commands, "program", program, "what one rank does in attention, step by step")
    )
    _calibrate_options(
        _command(commands, "calibrate", calibrate, "measure a cost model on this machine")
    )
    _command(
        commands, "env", env, "versions, devices and kernels, and why a kernel is not available"
    )
    return parser


def topology(text: str) -> Topology:
    """Read a topology written as NODESxRANKS: 8x8 is eight nodes of eight ranks."""
    match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is no topology: write NODESxRANKS, such as 8x8"
        )
    try:
        return Topology(nodes=int(match[1]), ranks_per_node=int(match[2]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers that are not below `least`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{quoted(text)} is no whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{quoted(value)} is below {least}")
        if value > MAX_COUNT:
            raise argparse.ArgumentTypeError(f"{quoted(value)} is above {MAX_COUNT}")
        return value

    return number


def limit(text: str) -> tuple[str, int]:
    """Read a limit written as NAME=VALUE."""
    names = [one.name for one in fields(Limits)]
    match = re.fullmatch(r"([a-z]+)=([0-9]{1,18})", text)
    if not match or match[1] not in names:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is no limit: write NAME=VALUE, NAME one of {', '.join(names)}"
        )
    return match[1], int(match[2])


def set_limits(options: Namespace) -> None:
    """Set `options.limits` to the limits that the options ask for. Raises ValueError where the
    topology is beyond them."""
    options.limits = DEFAULT_LIMITS.with_values(getattr(options, "limit", []))
    machine = getattr(options, "topology", None)
    if machine is not None:
        ranks = machine.world_size
        what = f"--topology {machine.nodes}x{machine.ranks_per_node} has {ranks:,} ranks"
        options.limits.refuse_above("ranks", ranks, what)


def _command(
    commands: "argparse._SubParsersAction[OneLineParser]",
    name: str,
    run: Callable[[argparse.Namespace], None],
    help: str,
) -> argparse.ArgumentParser:
    """Add a command that calls `run` with its options, and return its parser."""
    sentence = help[0].upper() + help[1:] + "."
    parser = commands.add_parser(name, help=help, description=sentence)
    parser.set_defaults(run=run)
    return parser


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _lengths_options(parser)
    parser.add_argument("--planner", choices=PLANNERS, default="auto", help="default: auto")
    parser.add_argument(
        "--json", metavar="FILE", help="write the plan, - for stdout; several steps: JSON lines"
    )


def _compare_options(parser: argparse.ArgumentParser) -> None:
    _lengths_options(parser)
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="only the first N steps")
    _planners_option(parser)


def _planners_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--planners",
        nargs="+",
        choices=PLANNERS,
        metavar="NAME",
        help=f"some of {', '.join(PLANNERS)}; default: all, but flexsp only for "
        f"{SOLVER_SEQUENCES:,} sequences or fewer, since it takes minutes",
    )


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan",
        metavar="LENGTHS_OR_TRACE",
        help=f"{LENGTHS_FILE}; or a plan trace; - for stdin",
    )
    parser.add_argument("--html", required=True, metavar="FILE", help="write the page")
    parser.add_argument(
        "--step",
        type=at_least(0),
        metavar="N",
        help="number of the step that is drawn (default: the one with the median seconds)",
    )
    parser.add_argument(
        "--steps",
        type=at_least(1),
        default=STEPS,
        metavar="N",
        help=f"plan only the first N steps (default {STEPS})",
    )
    _planners_option(parser)
    _planning_options(parser, required=False)


LENGTHS_FILE = (
    "a JSON list, one integer per line, JSON lines (each also .gz), Parquet, or a saved dataset"
)


def _lengths_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is planned: lengths, machine, limits, strategy."""
    parser.add_argument("--lengths", required=True, metavar="FILE", help=LENGTHS_FILE)
    _planning_options(parser, required=True)


def _planning_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that say how lengths are planned; required: those that need be given."""
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="column with lengths or with lists (default: length, input_ids)",
    )
    _machine_options(parser, required=required)
    parser.add_argument(
        "--max-tokens-per-rank", type=at_least(1), metavar="N", help="default: by the memory model"
    )
    parser.add_argument("--strategy", choices=("auto", *STRATEGIES), default="auto")
    parser.add_argument(
        "--sp-degree",
        type=at_least(1),
        metavar="N",
        help="ranks per sequence, for --planner static",
    )
    parser.add_argument(
        "--sequences-per-step", type=at_least(1), metavar="N", help="default: one step holds all"
    )


def _machine_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that say what is planned for: ranks, cost model, synchronisation."""
    parser.add_argument("--topology", required=required, type=topology, metavar="NODESxRANKS")
    parser.add_argument(
        "--cost-model",
        required=required,
        metavar="NAME_OR_PATH",
        help=f"a JSON file, or one of {', '.join(PRESETS)}",
    )
    parser.add_argument("--sync", choices=SYNCS, default="lockstep")
    _limit_option(parser)


def _limit_option(parser: argparse.ArgumentParser) -> None:
    defaults = ", ".join(
        f"{one.name}={getattr(DEFAULT_LIMITS, one.name)}" for one in fields(Limits)
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        type=limit,
        metavar="NAME=VALUE",
        help=f"take more than usual; may be given several times (default: {defaults})",
    )


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.json", help="a plan or a plan trace, - for stdin")
    _machine_options(parser, required=True)


def _view_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", metavar="PLAN_OR_TRACE", help="a plan or a plan trace, - for stdin"
    )
    parser.add_argument(
        "--step",
        type=at_least(0),
        default=0,
        metavar="N",
        help="which step of the file (default 0)",
    )
    _machine_options(parser, required=False)
    for name, what in (
        ("png", "a picture"),
        ("svg", "a picture"),
        ("chrome", "a trace that ui.perfetto.dev opens"),
    ):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"write {what}")


def _program_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", metavar="PLAN_OR_TRACE", help="a plan or a plan trace, - for stdin"
    )
    for name, what in (
        ("rank", "whose program"),
        ("micro-batch", "which one of the plan"),
        ("step", "which step of the file"),
    ):
        parser.add_argument(
            f"--{name}", type=at_least(0), default=0, metavar="N", help=f"{what} (default 0)"
        )
    parser.add_argument(
        "--topology", type=topology, metavar="NODESxRANKS", help="default: one node of all ranks"
    )
    parser.add_argument(
        "--layer",
        type=layer,
        default=layer(LAYER),
        metavar="QxKVxD",
        help=f"query heads, KV heads and size of a head (default {LAYER})",
    )
    parser.add_argument(
        "--reach",
        type=reach,
        default=FULL,
        metavar="full|window:N|chunk:N",
        help="which keys a query reads (default full)",
    )
    parser.add_argument(
        "--recurrent",
        type=recurrent_rows,
        metavar="convolution:CxW|scan:HxKxV",
        help="what a recurrent layer exchanges, in place of attention: channels and width of a "
        "convolution, or heads and sizes of key and value of a delta rule",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default bfloat16")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="which decides how small a kernel call may be, and the dtype of partial gradients "
        "(default cuda)",
    )
    _limit_option(parser)


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="name or folder of a model, or a config.json"
    )
    parser.add_argument(
        "--json", required=True, metavar="FILE", help="write the cost model, for --cost-model"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="of the parameters; default: bfloat16 on a GPU, else float32",
    )
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=range(4),
        default=0,
        help="how training is sharded; FSDP: 3",
    )
    parser.add_argument(
        "--no-checkpointing",
        dest="checkpointing",
        action="store_false",
        help="training keeps all activations",
    )
