"""Finds the part of a failing case that makes it fail."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.hf.drawn_settings.case import Case
from tests.hf.drawn_settings.options import ALWAYS
from tests.hf.drawn_settings.run import judge
from tests.hf.drawn_settings.verdicts import Judged

_KEPT = {name for option in ALWAYS for value in option.values for name in value}


def reduced(case: Case, judged: Judged) -> tuple[Case, Judged]:
    """Return a case that has the same verdict, with as little as possible, and that verdict."""
    tried: set[str] = set()
    while True:
        for simpler in _simpler(case):
            if str(simpler) in tried:
                continue
            tried.add(str(simpler))
            with tempfile.TemporaryDirectory() as folder:
                found = judge([simpler], Path(folder))[case.seed]
            if found.verdict is judged.verdict:
                case, judged = simpler, found
                break
        else:
            return case, judged


def _simpler(case: Case) -> Iterator[Case]:
    """Yield cases with less in them, those first that have far less."""
    always = {name: value for name, value in case.settings.items() if name in _KEPT}
    plain = {"lookahead": 0, "max_tokens_per_rank": 64}
    if case.changes:
        yield replace(case, settings=always, ours=plain)
        yield replace(case, changes=(), ours=plain)
        for name in case.changes:
            yield replace(case, changes=(name,), settings=always, ours=plain)
    for index in range(len(case.changes)):
        yield replace(case, changes=case.changes[:index] + case.changes[index + 1 :])
    yield replace(case, settings=always)
    yield replace(case, ours=plain)
    for name in case.settings.keys() - _KEPT:
        left = {other: value for other, value in case.settings.items() if other != name}
        yield replace(case, settings=left)
    yield replace(case, way="mixin")
    if case.model != "its own":
        yield replace(case, model="llama")
    if case.trainer == "trainer":
        yield replace(case, data="list")
        yield replace(case, collator="right")
    evaluates_not = case.settings | {"eval_strategy": "no"}
    evaluates_not.pop("eval_steps", None)
    yield replace(case, settings=evaluates_not)
    yield replace(case, settings=case.settings | {"gradient_accumulation_steps": 1})
