"""Write the options of `FlexSeqArguments` into docs/options.md, between the two marks there.

    python scripts/options_page.py

Names, values, defaults and help texts are those of `hf_flexseq/config.py`, and a test compares the
page with them. What follows the second mark is written by hand. No torch is imported.
"""

from dataclasses import Field, fields
from pathlib import Path
from textwrap import wrap
from typing import get_args

from hf_flexseq import config
from hf_flexseq.base import registry
from hf_flexseq.config import FlexSeqArguments

PAGE = Path(__file__).parents[1] / "docs/options.md"
BEGIN = "<!-- written by scripts/options_page.py, down to the next mark -->\n"
END = "<!-- the end of what scripts/options_page.py writes -->\n"
WIDTH = 99  # of a line

GROUPS = {
    "Planning": (
        "planner",
        "strategy",
        "sp_degree",
        "max_tokens_per_rank",
        "cost_model",
        "lookahead",
        "plan_trace",
    ),
    "Running": (
        "sync",
        "shared_prefixes",
        "activation_memory",
        "host_memory_gib",
        "save_attention_output",
        "on_nonfinite",
    ),
    "Pipelines": (
        "pipeline_parallel_size",
        "pipeline_schedule",
    ),
}

VALUES = {
    "planner": registry.PLANNERS,
    "strategy": ("auto", *registry.STRATEGIES),
    "sync": config.SYNCS,
    "on_nonfinite": config.ON_NONFINITE,
    "shared_prefixes": config.SHARED_PREFIXES,
    "activation_memory": config.ACTIVATION_MEMORY,
    "pipeline_schedule": registry.PIPELINE_SCHEDULES,
}

OF_TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "`True` or `False`",
    str: "a name or a path",
    type(None): "`None`",
}

# Links and details for the page only.
MORE = {
    "planner": "[Planners and plans](planners.md) compares them.",
    "strategy": "[What a rank does](layers.md#what-a-rank-does) in layers of other kinds.",
    "max_tokens_per_rank": (
        "Set it if the [estimate](limits.md#estimates) is wrong for you. In a pipeline it "
        "bounds a chunk."
    ),
    "cost_model": "Presets and files: [cost models](cost_models.md).",
    "lookahead": (
        "A step that makes its own samples, as with GRPO, is planned when it runs; later steps "
        "that reuse them are planned ahead."
    ),
    "plan_trace": "[Fields of a line](planners.md#the-plan-trace).",
    "sync": (
        "`free` is refused under FSDP and ZeRO-2/3, and on NCCL under any DeepSpeed and with a "
        "communication hook of DDP ([why](architecture.md#why-no-plan-can-deadlock))."
    ),
    "activation_memory": (
        '`activation_checkpointing_kwargs={"offload": True}` of transformers, for the run, brings '
        "the inputs of checkpointed layers and the results of their attention to the host, on a "
        "CPU, too."
    ),
    "shared_prefixes": "[Shared prefixes](shared_prefixes.md) says when, and what it brings.",
    "on_nonfinite": "The plain Trainer [continues, and saves](differences.md).",
    "pipeline_parallel_size": (
        "[Refused settings](refusals.md#pipelines) lists what a pipeline refuses."
    ),
}


def main() -> None:
    PAGE.write_text(with_options(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_options(page: str) -> str:
    """Return the page with the options as they are between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError(f"the page lacks the line {BEGIN!r}, or {END!r} after it")
    return before + BEGIN + "\n" + options_text() + "\n" + END + after


def options_text() -> str:
    """Return all options as Markdown: a table, and a section for each."""
    options = {option.name: option for option in fields(FlexSeqArguments)}
    named = [name for names in GROUPS.values() for name in names]
    if sorted(named) != sorted(options):
        raise ValueError(f"GROUPS has {named}, and the options are {list(options)}")
    lines = ["| option | values | default |", "|---|---|---|"]
    for name in named:
        row = (f"[`{name}`](#{name})", values_of(options[name]), f"`{options[name].default}`")
        lines.append(f"| {' | '.join(row)} |")
    for group, names in GROUPS.items():
        lines += ["", f"## {group}"]
        for name in names:
            lines += ["", *section(options[name])]
    return "\n".join(lines) + "\n"


def section(option: Field) -> list[str]:
    """Return the lines of an option's section."""
    text = option.metadata["help"]
    more = MORE.get(option.name, "")
    return [
        f"### `{option.name}`",
        "",
        f"{values_of(option)}; default `{option.default}`",
        "",
        *wrap(f"{text} {more}", WIDTH, break_long_words=False, break_on_hyphens=False),
    ]


def values_of(option: Field) -> str:
    """Return the values of an option, as Markdown."""
    if option.name in VALUES:
        return ", ".join(f"`{value}`" for value in VALUES[option.name])
    # Not option.type: HfArgumentParser takes the None out of it when a program parses arguments.
    of_option = FlexSeqArguments.__annotations__[option.name]
    return ", or ".join(OF_TYPES[each] for each in get_args(of_option) or (of_option,))


if __name__ == "__main__":
    main()
