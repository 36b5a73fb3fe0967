"""TRL's training scripts on planned steps:

    accelerate launch -m hf_flexseq.integrations.trl sft --config config.yaml

`trl sft` starts the script of that name in new processes, and nothing that was changed in the
first one reaches them. These processes run this module instead:

1. The script's own parser reads the options, and `FlexSeqArguments` adds its own. Unknown options
   are refused; the script itself silently drops unknown options of a configuration file.
2. The script's own `main` runs, and finds a trainer with `FlexSeqMixin` in front in `trl`.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import trl
import yaml
from accelerate.commands.launch import launch_command_parser

from hf_flexseq.base.values import LINE, did_you_mean, one_line, quoted
from hf_flexseq.config import FlexSeqArguments, refuse_removed
from hf_flexseq.hf.trainer.trainer import FlexSeqMixin

# Commands of TRL, and the trainer that the script of each makes.
TRAINERS = {
    "distillation": "DistillationTrainer",
    "dpo": "DPOTrainer",
    "grpo": "GRPOTrainer",
    "kto": "KTOTrainer",
    "reward": "RewardTrainer",
    "rloo": "RLOOTrainer",
    "sft": "SFTTrainer",
}
USAGE = (
    "accelerate launch -m hf_flexseq.integrations.trl "
    f"{{{','.join(TRAINERS)}}} --config config.yaml"
)

# Errors of options and of files that hold them.
MISTAKES = (ValueError, NotImplementedError, OSError, yaml.YAMLError)


class Parser(trl.TrlParser):
    """TRL's parser, whose errors are one line and not its 200 options."""

    def error(self, message: str) -> NoReturn:
        """End the process."""
        end_with(message)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of TRL's training commands. A mistake in its options ends the process with one line.

    argv: the command and its options; None takes this process's arguments.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words else ""
    if command in ("-h", "--help"):
        print(f"usage: {USAGE}")
        return
    if command not in TRAINERS:
        end_with(f"expected a command, one of {', '.join(TRAINERS)}, got {command!r}")
    if find_spec(f"trl.scripts.{command}") is None:
        end_with(f"TRL {trl.__version__} has no command {command!r}; install a newer one")
    try:
        *of_script, options = parse(command, words)
    except MISTAKES as error:
        end_with(str(error))
    with planning(TRAINERS[command], options):
        import_module(f"trl.scripts.{command}").main(*of_script)


def parse(command: str, words: Sequence[str]) -> tuple[Any, ...]:
    """Return the arguments of the script's `main`, and after them the `FlexSeqArguments`.

    words: options of the command line; `--config FILE` names a YAML file with more of them.
    Raises ValueError for unknown options and for a pipeline, and as `FlexSeqArguments` does.
    """
    own = import_module(f"trl.scripts.{command}").make_parser()
    parser = Parser((*own.dataclass_types, FlexSeqArguments), prog=f"trl {command}")
    *parsed, from_file, from_line = parser.parse_args_and_config(
        words, return_remaining_strings=True, separate_remaining_strings=True
    )
    refuse_unknown((*from_file, *from_line), set(parser._option_string_actions))
    stages = parsed[-1].pipeline_parallel_size
    if stages > 1:
        raise ValueError(
            f"pipeline_parallel_size={stages}: TRL's scripts load the whole model on every rank; "
            "leave it out, or write a script with FlexSeqMixin"
        )
    return tuple(parsed)


def refuse_unknown(words: Sequence[str], known: set[str]) -> None:
    """Raise ValueError for the first word that no option has read.

    known: names of options, with their dashes.
    """
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if not options:
        if words:
            raise ValueError(f"{quoted(words[0])} belongs to no option; leave it out")
        return
    option = options[0]
    name = option.removeprefix("--")
    refuse_removed(name)
    message = f"unknown option {quoted(name)}"
    if name == "accelerate_config" or option in launch_command_parser()._option_string_actions:
        of_launcher = "config_file" if name == "accelerate_config" else name
        raise ValueError(f"{message}: write --{of_launcher} between `accelerate launch` and -m")
    raise ValueError(message + did_you_mean(option, known))


@contextmanager
def planning(name: str, options: FlexSeqArguments) -> Iterator[None]:
    """Let a trainer of TRL plan its steps inside a block.

    name: of the trainer's class, which TRL's scripts import when they run.
    """
    stock = getattr(trl, name)

    def construct(self: Any, *given: Any, **named: Any) -> None:
        FlexSeqMixin.__init__(self, *given, flexseq_args=options, **named)

    planned = type(f"FlexSeq{name}", (FlexSeqMixin, stock), {"__init__": construct})
    setattr(trl, name, planned)
    try:
        yield
    finally:
        setattr(trl, name, stock)


def end_with(message: str) -> NoReturn:
    """End the process; the first one of each machine says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {one_line(message, 10 * LINE)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
