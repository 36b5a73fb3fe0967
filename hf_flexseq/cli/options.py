"""The parser of `flexseq`: its commands, their options, and the successors of removed commands."""

from argparse import ArgumentParser

from hf_flexseq.base.registry import PLANNERS, STRATEGIES
from hf_flexseq.cli.calibrate import calibrate
from hf_flexseq.cli.compare import SOLVER_SEQUENCES, compare
from hf_flexseq.cli.environment import env
from hf_flexseq.cli.fit import DTYPES, fit
from hf_flexseq.cli.plan import plan
from hf_flexseq.cli.prove import prove
from hf_flexseq.cli.report import STEPS, report
from hf_flexseq.cli.view import view
from hf_flexseq.command_line import (
    OneLineParser,
    at_least,
    gibibytes,
    limit_option,
    number_option,
    plan_option,
    set_run,
    topology_option,
)
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import MODELS, PRESETS
from hf_flexseq.plan.options import SYNCS

# Removed commands, and what to write instead. An entry stays for one release.
REMOVED = {
    "simulate": "flexseq view PLAN --topology ... --cost-model ... shows a plan's times",
    "program": "python -m hf_flexseq.program takes the same options",
}

LENGTHS_FILE = (
    "a JSON list, one integer per line, JSON lines (each also .gz), Parquet, or a saved dataset"
)


def make_parser() -> ArgumentParser:
    """Return the parser of `flexseq` with all its commands."""
    parser = OneLineParser(
        prog="flexseq", description="Plan and look at flexible sequence parallelism."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, add_options, help in (
        ("plan", plan, _plan_options, "decide which ranks work together on which sequences"),
        ("compare", compare, _compare_options, "a table of all planners on your lengths"),
        ("fit", fit, _fit_options, "the longest sequence that fits, and what choices cost"),
        ("view", view, _view_options, "draw a plan or a plan trace"),
        ("report", report, _report_options, "an HTML page about your lengths, or about a run"),
        (
            "calibrate",
            calibrate,
            _calibrate_options,
            "correct a cost model by the seconds of a run",
        ),
        ("prove", prove, _prove_options, "show that a model trains on ranks as on one process"),
        ("env", env, None, "versions, devices and kernels, and why a kernel is not available"),
    ):
        command = commands.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + "."
        )
        set_run(command, run)
        if add_options is not None:
            add_options(command)
    return parser


# ---- commands


def _plan_options(parser: ArgumentParser) -> None:
    parser.add_argument("--lengths", required=True, metavar="FILE", help=LENGTHS_FILE)
    _planning_options(parser, required=True)
    parser.add_argument("--planner", choices=PLANNERS, default="auto")
    parser.add_argument("--json", metavar="FILE", help="write the plans, - for stdout")


def _compare_options(parser: ArgumentParser) -> None:
    parser.add_argument("--lengths", required=True, metavar="FILE", help=LENGTHS_FILE)
    _planning_options(parser, required=True)
    parser.add_argument("--steps", type=at_least(1), metavar="N", help="only the first N steps")
    _planners_option(parser)
    parser.add_argument(
        "--tight",
        action="store_true",
        help="also the gap to a closer bound, by an integer program of seconds per step",
    )


def _fit_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"name or folder of a model, a config.json, or one of {', '.join(MODELS)}",
    )
    topology_option(parser, required=True)
    parser.add_argument(
        "--device", choices=DEVICES, metavar="NAME", help=f"one of {', '.join(DEVICES)} (H100)"
    )
    parser.add_argument(
        "--cost-model",
        metavar="PATH",
        help="a JSON file of `flexseq calibrate`, instead of a model and a device",
    )
    parser.add_argument(
        "--length",
        type=at_least(1),
        metavar="N",
        help="a sequence of so many tokens, instead of the longest",
    )
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=range(4),
        help="how training is sharded (default 3, which FSDP is, too)",
    )
    parser.add_argument(
        "--expert-ranks",
        type=at_least(1),
        metavar="N",
        help="neighbouring ranks that hold all experts together (default 1: each rank has all)",
    )
    parser.add_argument(
        "--checkpointing",
        action="store_true",
        default=None,
        help="training recomputes all layers anyhow",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="NAME", help="of activations (default bfloat16)"
    )
    parser.add_argument(
        "--lora-rank",
        type=at_least(1),
        metavar="N",
        help="training of LoRA adapters at all matrices, instead of all parameters",
    )
    parser.add_argument(
        "--host-memory-gib",
        dest="host_bytes",
        type=gibibytes,
        metavar="GIB",
        help="memory of the host that each rank may use (default: by the device)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures, - for stdout")
    limit_option(parser)


def _view_options(parser: ArgumentParser) -> None:
    plan_option(parser)
    number_option(parser, "step", "index of the step in the file")
    _machine_options(parser, required=False)
    for name, what in (
        ("png", "a picture"),
        ("svg", "a picture"),
        ("chrome", "a trace that ui.perfetto.dev opens"),
    ):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"write {what}")


def _report_options(parser: ArgumentParser) -> None:
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
        help="number of the step to draw (default: the one with the median seconds)",
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


def _calibrate_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="TRACE_OR_MODEL",
        help="the plan trace of a run; or a model to train for some steps on synthetic sequences: "
        "its name, its folder, or a config.json",
    )
    parser.add_argument(
        "--json", required=True, metavar="FILE", help="write the cost model, for --cost-model"
    )
    topology_option(parser, required=False, help="of a trace: the ranks that ran it")
    parser.add_argument(
        "--cost-model", metavar="NAME_OR_PATH", help="of a trace: the cost model to correct"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="of a model: dtype of the parameters (default: bfloat16 on a GPU, else float32)",
    )
    parser.add_argument("--fsdp", action="store_true", help="of a model: train with FSDP2")
    parser.add_argument(
        "--no-checkpointing",
        dest="checkpointing",
        action="store_false",
        help="of a model: training keeps all activations",
    )
    limit_option(parser)


def _prove_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="name or folder of a model, a config.json, or a class of transformers",
    )
    parser.add_argument(
        "--whole", action="store_true", help="the model itself, instead of a small one like it"
    )
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        metavar="N",
        help="ranks to start (default: one for each GPU, else two)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the record")
    parser.add_argument("--quiet", action="store_true", help="print nothing")


# ---- options of several commands


def _planning_options(parser: ArgumentParser, *, required: bool) -> None:
    """Add the options of planning. required: True if the machine must be given."""
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


def _machine_options(parser: ArgumentParser, *, required: bool) -> None:
    """Add the options of the machine: ranks, cost model, synchronisation, limits."""
    topology_option(parser, required=required)
    parser.add_argument(
        "--cost-model",
        required=required,
        metavar="NAME_OR_PATH",
        help=f"a JSON file, or one of {', '.join(PRESETS)}; with -epN before its device a model's "
        "experts lie over N ranks",
    )
    parser.add_argument("--sync", choices=SYNCS, default="lockstep")
    limit_option(parser)


def _planners_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--planners",
        nargs="+",
        choices=PLANNERS,
        metavar="NAME",
        help=f"some of {', '.join(PLANNERS)}; default: all, but flexsp only for "
        f"{SOLVER_SEQUENCES:,} sequences or fewer, since it takes minutes",
    )
