"""The hook of mkdocs (`mkdocs.yml`) that makes tables and redirects when the site is built.

A line `<!-- table: NAME -->` of a page becomes the table of that name (TABLES). Its rows are those
of the package, such as the rules that refuse a setting, or of the data files in this folder:

    options.yaml        the order of our options, and links
    arguments.yaml      options of transformers and TRL
    overrides.yaml      methods of a trainer that a user may override
    places.yaml         where else than in a trainer's methods a user's own code runs
    *families.csv       models, written by tests/hf/model_families.py
    moved.yaml          pages that went, and where their content is; each leaves a redirect

No generated page is committed, so none can differ from the code.
"""

import csv
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args

import yaml

from hf_flexseq import config as options
from hf_flexseq.base import registry
from hf_flexseq.base.refusals import Refusal
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.hf.engine.accelerator_checks import ACCELERATOR
from hf_flexseq.hf.losses.prediction_checks import PREDICTIONS
from hf_flexseq.hf.trainer.checks import MODEL, NEXT_TOKEN, ON_SAMPLES, TRAINER
from hf_flexseq.hf.trainer.overrides import OF_SHARDED_CHECKPOINTS
from hf_flexseq.pipeline.trainer.checks import FSDP_OF_STAGES, PIPELINE, REPLACED

FOLDER = Path(__file__).parent
MARK = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def data(name: str) -> Any:
    """Return the content of a YAML file of this folder."""
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def titled(tables: Mapping[str, str]) -> str:
    """Return several tables, each below its title."""
    return "\n\n".join(f"### {title}\n\n{body}" for title, body in tables.items())


def code(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


# ---- options of hf_flexseq

VALUES = {
    "planner": registry.PLANNERS,
    "strategy": ("auto", *registry.STRATEGIES),
    "sync": options.SYNCS,
    "on_nonfinite": options.ON_NONFINITE,
    "shared_prefixes": options.SHARED_PREFIXES,
    "activation_memory": options.ACTIVATION_MEMORY,
    "pipeline_schedule": registry.PIPELINE_SCHEDULES,
}
OF_TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "`True`, `False`",
    str: "a name or a path",
    type(None): "`None`",
}


def options_table() -> str:
    """Return the options of FlexSeqArguments, a table for each group. Raises ValueError if
    options.yaml has others."""
    known = {option.name: option for option in fields(FlexSeqArguments)}
    groups = data("options.yaml")
    if named := {name for names in groups.values() for name in names} ^ known.keys():
        raise ValueError(f"options.yaml and FlexSeqArguments differ in {sorted(named)}")
    columns = ("option", "values", "meaning")
    return titled(
        {
            group: table(columns, (option_row(known[name], more) for name, more in names.items()))
            for group, names in groups.items()
        }
    )


def option_row(option: Field[Any], more: str) -> tuple[str, str, str]:
    """Return the row of an option, whose name is an anchor."""
    name = option.name
    if name in VALUES:
        values = code(VALUES[name])
    else:  # not option.type, from which HfArgumentParser takes the None
        of_option = FlexSeqArguments.__annotations__[name]
        values = ", or ".join(OF_TYPES[each] for each in get_args(of_option) or (of_option,))
    return (
        f'<a id="{name}"></a>`{name}`',
        f"{values}; default `{option.default}`",
        f"{option.metadata['help']} {more}",
    )


# ---- options of transformers and TRL

SHOWN = {
    "draws": "tests/hf/drawn_settings/options.py",
    "losses": "tests/hf/test_every_objective.py",
}


def refusals_of(row: Mapping[str, Any]) -> list[Refusal[Any]]:
    """Return the refusals that options may meet. Raises KeyError for one that no table has."""
    tables = (*TRAINER, *ON_SAMPLES, *MODEL, *PREDICTIONS, *ACCELERATOR)
    by_setting: dict[str, Refusal[Any]] = {one.setting: one for one in tables}
    return [by_setting[setting] for setting in row.get("refusals", ())]


def arguments_table() -> str:
    """Return what becomes of the options of transformers and TRL."""
    of_training, *of_trl = data("arguments.yaml").items()
    groups = {f"TrainingArguments: {title}": rows for title, rows in of_training[1].items()}
    columns = ("options", "", "compared in", "what is refused or differs")
    return titled(
        {
            title: table(columns, map(argument_row, rows))
            for title, rows in {**groups, **dict(of_trl)}.items()
        }
    )


def argument_row(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the row of options that share all but their names."""
    notes = [f"{one.setting}: {one.why}" for one in refusals_of(row)]
    if "note" in row:
        notes.append(row["note"])
    shown = row.get("shown", "")
    shown = f"`{shown}`" if "/" in shown else shown
    return code(row["names"].split()), row.get("verdict", "works"), shown, "; ".join(notes)


# ---- refusals and overrides

REFUSALS: dict[str, tuple[Refusal[Any], ...]] = {
    "Refused: accelerators": ACCELERATOR,
    "Refused: trainers and training arguments": TRAINER,
    "Refused: causal language models": NEXT_TOKEN,
    "Refused: losses on the trainer's own batches": ON_SAMPLES,
    "Refused: losses of models": MODEL,
    "Refused: metrics and predict() of causal language models": PREDICTIONS,
    "Refused: pipelines": PIPELINE,
    "Refused: FSDP in a pipeline": FSDP_OF_STAGES,
}


def refusals_table() -> str:
    """Return the settings that hf_flexseq refuses, each with its reason and a way out."""
    columns = ("setting", "reason", "instead")
    return titled(
        {
            title: table(columns, ((one.setting, one.why, one.instead) for one in refusals))
            for title, refusals in REFUSALS.items()
        }
    )


def overrides_table() -> str:
    """Return what a user may override on a trainer."""
    columns = ("method", "", "")
    return (
        f"{table(columns, map(rule_row, data('overrides.yaml')))}\n\n"
        f"A [pipeline](pipelines.md) also refuses {code(REPLACED)}. In the saving of "
        f"models sharded by `DistributedConfig`, {code(OF_SHARDED_CHECKPOINTS)} are replaced."
    )


def rule_row(rule: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the row of methods with one rule."""
    instead = f". Instead: {rule['instead']}" if "instead" in rule else ""
    return code(rule["names"]), rule["standing"], f"{rule['why']}{instead}"


def places_table() -> str:
    """Return where else a user's own code runs; places with one treatment share a row."""
    tables = {}
    for title, places in data("places.yaml").items():
        names: dict[tuple[str, str], list[str]] = {}
        for name, (standing, why) in places.items():
            names.setdefault((standing, why), []).append(name)
        tables[title] = table(("", "", ""), ((code(of), *said) for said, of in names.items()))
    return titled(tables)


# ---- models


def csv_table(name: str) -> str:
    """Return a CSV file of this folder."""
    with open(FOLDER / name, encoding="utf-8", newline="") as file:
        columns, *rows = csv.reader(file)
    return table(columns, rows)


TABLES = {
    "options": options_table,
    "arguments": arguments_table,
    "refusals": refusals_table,
    "overrides": overrides_table,
    "places": places_table,
    "families": lambda: csv_table("families.csv"),
    "image_families": lambda: csv_table("image_families.csv"),
}


# ---- what mkdocs calls


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with its tables. Raises KeyError for a table that is not known."""
    return MARK.sub(lambda mark: TABLES[mark[1]](), markdown)


def on_post_build(config: Mapping[str, Any]) -> None:
    """Write a redirect for each page that went. Raises ValueError for an unknown anchor."""
    site = Path(config["site_dir"])
    for old, target in data("moved.yaml").items():
        page, _, anchor = target.partition("#")
        text = (site / page / "index.html").read_text(encoding="utf-8")
        if anchor and f'id="{anchor}"' not in text:
            raise ValueError(f"moved.yaml: {page} has no {anchor}, to which {old} leads")
        url = html.escape("../" * (old.count("/") + 1) + target)
        (site / old).mkdir(parents=True, exist_ok=True)
        (site / old / "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title>\n'
            f'<meta http-equiv="refresh" content="0; url={url}">\n<a href="{url}">Moved</a>\n',
            encoding="utf-8",
        )
