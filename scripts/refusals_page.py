"""Write docs/refusals.md: the settings that hf_flexseq refuses, from the tables that raise.

python scripts/refusals_page.py
"""

from pathlib import Path
from typing import Any

from hf_flexseq.base.refusals import Refusal
from hf_flexseq.hf.refusals.accelerator import ACCELERATOR
from hf_flexseq.hf.refusals.predictions import PREDICTIONS
from hf_flexseq.hf.refusals.trainer import MODEL, NEXT_TOKEN, ON_SAMPLES, TRAINER
from hf_flexseq.pipeline.trainer.refusals import FSDP_OF_STAGES, PIPELINE

PAGE = Path(__file__).parents[1] / "docs/refusals.md"

INTRODUCTION = """\
# Refused settings

hf_flexseq raises an error when a trainer or an engine is made if training would not be exact, or
if a setting would have no effect. The error names the setting, its value, the reason and what to
change. Several settings are named in one error, with a numbered line for each. The tables below
list these errors. Other pages list refused [models](models.md), your own methods, hooks and
callbacks ([what you may override](overrides.md)), and all [options of transformers and
TRL](arguments.md).
"""

TABLES: dict[str, tuple[Refusal[Any], ...]] = {
    "Accelerators": ACCELERATOR,
    "Trainers and training arguments": TRAINER,
    "Trainers of causal language models": NEXT_TOKEN,
    "Trainers that compute their loss on their own batches": ON_SAMPLES,
    "Losses of models": MODEL,
    "Metrics and predict() of causal language models": PREDICTIONS,
    "Pipelines": PIPELINE,
    "FSDP in a pipeline": FSDP_OF_STAGES,
}


def main() -> None:
    PAGE.write_text(page_text(), encoding="utf-8")


def page_text() -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION]
    for title, refusals in TABLES.items():
        lines += [f"## {title}", "", "| setting | reason | instead |", "|---|---|---|"]
        lines += [f"| {one.setting} | {one.why} | {one.instead} |" for one in refusals]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
