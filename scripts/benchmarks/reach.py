"""The census: which causal language models of the installed transformers hf_flexseq takes.

    python scripts/benchmarks/reach.py                   ask all of them
    python scripts/benchmarks/reach.py --probe           and run those that are taken, tiny
    python scripts/benchmarks/reach.py --only gemma2     some families
    python scripts/benchmarks/reach.py --write           and write the table of docs/models.md

A family is asked with the configuration that transformers makes by default, and with the kinds of
layers of its published checkpoints (`data/checkpoints.json`). To ask is to call what every trainer
calls before it starts, `check_model`, with the whole model on the meta device.

With --probe a tiny model of the same kinds of layers runs on four ranks that are threads, and is
compared with one process (`hf_flexseq.hf.probe`): its outputs, its gradients, and which
outputs change when one token does. What is taken and fails that would train wrongly in silence.

Every question is answered by a process of its own, within a time limit.
"""

import csv
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers

from common import ROOT, argument_parser, table, write_record
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.small import has_near_layers, small_model
from hf_flexseq.hf.probe import SHARED, probe_model
from reach_models import (
    HUB,
    NEEDED,
    Checkpoint,
    Family,
    checkpoint_config,
    checkpoints,
    default_config,
    expert_rules,
    families,
    unrolled,
)

ASK_S = 60.0  # to answer one question
PROBE_S = 240.0
CHANGES = ((0, 19), (2, 1))  # (sequence, token) that the probe changes
TABLES = ROOT / "scripts/pages"  # of docs/models.md

# Rules of a plan for experts: that tokens travel to them, and that each rank holds some of them.
DISPATCHED, HELD = "ep_dispatch_experts", "grouped_gemm"

TAKEN, SETTING, REFUSED, NOT_BUILT = "taken", "after a setting", "refused", "not built"

# Options of training that a refusal names, and the value with which a model is asked again.
SETTINGS = {
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "output_router_logits": False,
    "z_loss_coefficient": 0.0,
}

RECURRENT = "recurrent or convolutional layers of other kinds"
OWN_LOSS = "a loss of its own"

# Parts of the reasons for a refusal, in the order in which they are looked for, and their groups.
GROUPS = {
    "configuration has no num_attention_heads": RECURRENT,
    "indexed_attention": "layers that choose their keys (DSA and the like)",
    "sparse_attention": "layers that choose their keys (DSA and the like)",
    "linear_attention": RECURRENT,
    "of layer 0 is not given the keyword arguments": RECURRENT,
    "kinds conv": RECURRENT,
    "hybrid": RECURRENT,
    "sliding_attention": "windows",
    "sliding_window": "windows",
    "chunked": "chunks",
    "sinks": "sinks",
    "softcap": "softcapped scores",
    "dimensions per head": "values of another size than queries",
    "longrope": "longrope",
    "dynamic": "dynamic rope",
    "configuration has no num_hidden_layers": "layers that are not known",
    "counts positions itself": "modules that count positions themselves, alibi among them",
    "its mask shows": "a call, a configuration and a mask that contradict each other",
    "could not be tried to the end": "a trial that ends early, without a probe that speaks for it",
    "does not call transformers' attention interface": "attention of its own",
    "a mask of its own": "masks of its own",
    "not given the keyword arguments": "keyword arguments that do not reach attention",
    "num_items_in_batch": OWN_LOSS,
    "loss": OWN_LOSS,
    "both directions": "attention in both directions",
    "encoder-decoder": "encoder-decoders",
}


class Answer(NamedTuple):
    """What became of one configuration."""

    family: str
    model: str
    """Name of the class."""
    checkpoint: str | None
    """The published checkpoint; None for the default configuration."""
    source: str | None
    """Where the checkpoint's configuration can be read."""
    verdict: str
    """One of the verdicts above."""
    why: str
    """The reason, or the settings; nothing if it is taken as it comes."""
    probe: tuple[str, ...] | None = None
    """What the probe found, () if nothing; None where it has not run."""


def main() -> None:
    """Ask, print the page, and write what was asked for."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="ask these families alone")
    parser.add_argument("--probe", action="store_true", help="run what is taken, tiny")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=SHARED,
        default=SHARED,
        help="of the sequences that the ranks of a probe share",
    )
    parser.add_argument("--write", action="store_true", help="write families.csv")
    args = parser.parse_args()
    if args.write and args.only:
        parser.error("--write needs all families; leave out --only")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # forks of a process with more hang in their first parallel region

    asked = families()
    unknown = set(args.only or ()) - {family.name for family in asked}
    if unknown:
        parser.error(f"no such families: {', '.join(sorted(unknown))}")
    answers = []
    for family in asked:
        if args.only and family.name not in args.only:
            continue
        for answer in ask_family(family, args.strategies if args.probe else ()):
            answers.append(answer)
            print_answer(answer)
    print()
    print(page(answers))
    write_record(args.json, [answer._asdict() for answer in answers])
    if args.write:
        write_table("families.csv", *family_rows(answers))
    if any(answer.probe for answer in answers):
        sys.exit("a model that is taken fails its probe")


# ---- questions


def ask_family(family: Family, probes: Sequence[str]) -> list[Answer]:
    """Ask a family with its default configuration and with those of its checkpoints.

    probes: strategies under which it is run, if it is taken; () does not run it.
    """
    answers = [ask(family, None, probes)]
    for checkpoint in checkpoints().get(family.name, ()):
        answers.append(ask(family, checkpoint, probes))
    return answers


def ask(family: Family, checkpoint: Checkpoint | None, probes: Sequence[str]) -> Answer:
    """Ask a family with one configuration."""
    verdict, why = in_process(lambda: verdict_on(family, checkpoint), ASK_S)
    found = None
    if probes and verdict in (TAKEN, SETTING):
        options = unrolled(checkpoint.options) if checkpoint else {}
        found = tuple(in_process(lambda: probed(family, options, probes), PROBE_S))
        if found and found[0] == NOT_BUILT:
            found = (f"it did not run: {found[1]}",)
    name, source = (checkpoint.checkpoint, checkpoint.source) if checkpoint else (None, None)
    return Answer(family.name, family.kind.__name__, name, source, verdict, why, found)


def verdict_on(family: Family, checkpoint: Checkpoint | None) -> tuple[str, str]:
    """Return one of the verdicts, and the reason."""
    try:
        if checkpoint is None:
            config = default_config(family)
        else:
            config = checkpoint_config(family, checkpoint)
        with torch.device("meta"):
            model = family.kind(config)
    except BUILDING_FAILS as error:
        return NOT_BUILT, f"{type(error).__name__}: {one_line(error)}"
    changed: list[str] = []
    while reasons := refusals_of(model):
        options = [reason.split("=")[0] for reason in reasons]
        known = [option for option in options if option in SETTINGS and option not in changed]
        if not known:
            return REFUSED, "; ".join(reasons)
        for option in known:
            setattr(config.get_text_config(), option, SETTINGS[option])
        changed += known
        with torch.device("meta"):
            model = family.kind(config)
    if changed:
        return SETTING, ", ".join(f"{option}={SETTINGS[option]}" for option in changed)
    return TAKEN, ""


def refusals_of(model: transformers.PreTrainedModel) -> list[str]:
    """Return the reasons why a model is not taken; [] if it is."""
    name = f"{type(model).__name__}: "
    try:
        check_model(model)
    except (NotImplementedError, ValueError) as error:
        return [line.partition(name)[2] for line in str(error).splitlines() if name in line]
    return []


# What transformers raises for default configurations that no model can be built from.
BUILDING_FAILS = (ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError)


def probed(family: Family, options: dict[str, Any], strategies: Sequence[str]) -> list[str]:
    """Return what the probe of tiny models finds: one of all kinds of layers, and one without
    full attention, whose changes end where windows and chunks do."""
    options = NEEDED.get(family.name, {}) | options
    model = small_model(family.kind, options)
    found = probe_model(model, strategies=strategies, changes=CHANGES)
    if has_near_layers(model.config.get_text_config()):
        near = small_model(family.kind, options, near=True)
        found += probe_model(near, strategies=strategies, changes=CHANGES, gradients=False)
    return found


def one_line(error: BaseException) -> str:
    """Return the message of an exception without line breaks."""
    return " ".join(str(error).split())


def in_process(answer: Callable[[], Sequence[str]], seconds: float) -> Sequence[str]:
    """Return what `answer` returns in a fork; NOT_BUILT and the reason if it raises, dies or takes
    longer."""
    here, there = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            said: Sequence[str] = answer()
        except BaseException as error:  # a fork has nobody else to tell
            said = (NOT_BUILT, f"{type(error).__name__}: {one_line(error)}")
        os.write(there, json.dumps(said).encode()[: select.PIPE_BUF * 8])
        os._exit(0)
    os.close(there)
    data = b""
    try:
        ready = bool(select.select([here], [], [], seconds)[0])
        if ready:
            with os.fdopen(here, "rb", closefd=False) as pipe:
                data = pipe.read()
        else:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(here)
        os.waitpid(pid, 0)
    if not data:
        return (NOT_BUILT, f"no answer within {seconds:g} s" if not ready else "the process died")
    found: list[str] = json.loads(data)
    return found


# ---- answers


def print_answer(answer: Answer) -> None:
    """Print one line."""
    name = f"{answer.family} ({answer.checkpoint or 'default'})"
    probe = ""
    if answer.probe is not None:
        probe = "; probe: " + ("passes" if not answer.probe else " | ".join(answer.probe[:4]))
    print(f"{name:60s} {answer.verdict:9s} {answer.why}{probe}", flush=True)


def group_of(answer: Answer) -> str:
    """Return the group of the reason why a model is not taken."""
    for part, group in GROUPS.items():
        if part in answer.why:
            return group
    return "others"


def best_by_family(answers: Sequence[Answer]) -> dict[str, Answer]:
    """Return, for each family, the answer that counts: its first checkpoint's, or the default's
    where it has none in the data."""
    counting: dict[str, Answer] = {}
    for answer in answers:
        before = counting.get(answer.family)
        if before is None or before.checkpoint is None:
            counting[answer.family] = answer
    return counting


def shares(answers: Sequence[Answer]) -> list[tuple[str, int, int, int]]:
    """Return rows (what was asked, taken, taken after a setting, asked), without what cannot be
    built."""
    default = [a for a in answers if a.checkpoint is None]
    published = [a for a in answers if a.checkpoint is not None]
    counting = list(best_by_family(answers).values())
    rows = []
    for name, asked in (
        ("families, default configuration", default),
        ("published checkpoints", published),
        ("families, first checkpoint in place of the default", counting),
        (
            f"of these, families without {RECURRENT}",
            [a for a in counting if group_of(a) != RECURRENT],
        ),
    ):
        built = [a for a in asked if a.verdict != NOT_BUILT]
        taken = sum(a.verdict == TAKEN for a in built)
        settings = sum(a.verdict == SETTING for a in built)
        rows.append((name, taken, settings, len(built)))
    return rows


def page(answers: Sequence[Answer]) -> str:
    """Return the result as Markdown."""
    lines = [share_table(answers), "", "## Not taken, by reason", ""]
    lines += refused_lines(answers)
    return "\n".join(lines)


def share_table(answers: Sequence[Answer]) -> str:
    """Return the table of shares."""
    rows = []
    for name, taken, settings, asked in shares(answers):
        both = taken + settings
        share = f"{taken / asked:.0%}, {both / asked:.0%}" if asked else "-"
        rows.append((name, taken, settings, asked, share))
    columns = ("asked", "taken", "after a setting", "of", "share without, with it")
    return table(columns, rows, numbers=(1, 2, 3, 4))


def refused_lines(answers: Sequence[Answer]) -> list[str]:
    """Return one line for each group of reasons, the largest first, and those of the models."""
    groups: dict[str, list[Answer]] = {}
    for answer in best_by_family(answers).values():
        if answer.verdict not in (TAKEN, SETTING):
            group = group_of(answer) if answer.verdict == REFUSED else NOT_BUILT
            groups.setdefault(group, []).append(answer)
    lines = []
    for group, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append(f"* **{group}** ({len(members)}): {', '.join(a.family for a in members)}")
    return lines


def write_table(name: str, *rows: Sequence[str]) -> None:
    """Write a table of docs/models.md; its first row has the names of the columns."""
    with open(TABLES / name, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    print(f"wrote {TABLES / name}")


def family_rows(answers: Sequence[Answer]) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of families."""
    yield "family", "default configuration", "published checkpoints", "experts over ranks"
    by_family: dict[str, list[Answer]] = {}
    for answer in answers:
        by_family.setdefault(answer.family, []).append(answer)
    for family in families():
        default, *published = by_family[family.name]
        given = ", ".join(NEEDED.get(family.name, ()))
        word = said(default) + (f" (given {given})" if given else "")
        cells = [said(answer, link=True) for answer in published]
        if not cells:
            cells = ["default only" + near(family)]
        yield f"`{family.name}`", word, "<br>".join(cells), spread(family)


def near(family: Family) -> str:
    """Return a link to the checkpoint that transformers names beside its defaults."""
    if family.named is None:
        return ""
    return f"; transformers names [{family.named}]({HUB}{family.named})"


def spread(family: Family) -> str:
    """Return whether a family's experts can be spread over ranks; nothing for one without any."""
    rules = expert_rules(family)
    if rules is None:
        return ""
    if DISPATCHED not in rules:
        return "no"
    return "no: its plan cuts dense layers, too" if set(rules) - {DISPATCHED, HELD} else "yes"


def said(answer: Answer, *, link: bool = False) -> str:
    """Return one cell of the table."""
    words = answer.verdict if answer.verdict == TAKEN else f"{answer.verdict}: {answer.why}"
    words = words.replace("|", "\\|")
    if link:
        words = f"[{answer.checkpoint}]({answer.source}): {words}"
    return words


if __name__ == "__main__":
    main()
