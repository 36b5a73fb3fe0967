"""`prove`: show on this machine that a model trains on its ranks as on one process.

Without a launcher the command starts its ranks itself, one for each GPU, or two on a CPU. Under
`accelerate launch` or `torchrun` the ranks that there are prove together.
"""

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

LIMIT_S = 600.0  # after which the ranks are ended
PATHS = ("/", "./", "../", "~")  # how the path of a folder begins
COLUMNS = ("plan", "groups", "loss off by", "worst gradient off by", "of", "")


def prove(options: Namespace) -> int:
    """Compare, print the table and the verdict, and write the record.

    Returns the exit status: 0 if the model is proven, else 1.
    """
    name = options.model
    if (name.startswith(PATHS) or name.endswith(".json")) and not Path(name).exists():
        raise ValueError(
            f"{name} does not exist: give a folder or a config.json that does, a name on the Hub, "
            "or a class of transformers"
        )
    if options.json is not None:
        _check_file(Path(options.json))
    if "RANK" in os.environ:
        record = _of_this_rank(options)
        if int(os.environ["RANK"]) != 0:
            return 0
    else:
        record = _of_own_ranks(options)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    if "refused" in record:
        raise ValueError(record["refused"])
    if options.quiet:
        return 0
    print(page_of(record))
    return 0 if holds(record) else 1


def _check_file(path: Path) -> None:
    """Raise ValueError for a file that cannot be written, before minutes of work for it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--json {path} cannot be written: name a file in a folder that exists")


def _of_this_rank(options: Namespace) -> dict[str, Any]:
    """Return the record, as one of the ranks that a launcher has started."""
    from hf_flexseq.prove import command

    try:
        record = command.prove(options.model, whole=options.whole)
    except (OSError, ValueError, NotImplementedError) as error:
        return {"refused": " ".join(str(error).split())}
    return record


def _of_own_ranks(options: Namespace) -> dict[str, Any]:
    """Start the ranks, and return the record of rank 0."""
    try:
        from hf_flexseq.distributed.hosts import last_error, ranks_of_machine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "proving needs torch and transformers: pip install torch transformers accelerate "
            f"({error})"
        ) from error
    ranks = options.ranks or ranks_of_machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        words = [options.model, "--json", str(path), "--quiet"]
        if options.whole:
            words.append("--whole")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={ranks}", "-m", "hf_flexseq.cli", "prove", *words),
        ]
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
        launcher = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, said = launcher.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # it then ends its ranks, which a kill would leave behind
            launcher.communicate()
            return {"refused": f"the ranks had not ended after {LIMIT_S:.0f} s"}
        if not path.exists():
            reason = last_error(said) or "without a word"
            return {"refused": f"the ranks ended with {launcher.returncode}: {reason}"}
        record: dict[str, Any] = json.loads(path.read_text())
    return record


def holds(record: dict[str, Any]) -> bool:
    """Return True if a record is a proof: nothing differs, and something trained."""
    steps = [step for step in record["steps"].values() if "not_run" not in step]
    return bool(
        all(record["learned"].values())
        and steps
        and all(step["holds"] for step in steps)
        and not record["changes"]
    )


# ---- the page


def page_of(record: dict[str, Any]) -> str:
    """Return the table and the verdict."""
    nodes, ranks_per_node = record["ranks"]
    sets = ", ".join(
        f"{what} ({len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens)"
        for what, lengths in record["documents"].items()
    )
    lines = [
        f"{record['model']} of {record['origin']}, {record['parameters']:,} parameters, "
        f"{record['dtype']}, on {nodes} x {ranks_per_node} ranks ({record['device']})",
        f"one optimizer step of {sets}",
        "allowed: " + _allowed(record["bounds"]),
        "",
        *_table([COLUMNS, *(_row(name, step) for name, step in record["steps"].items())]),
        "",
    ]
    control = record["control"]
    lines.append(
        f"control: {control['what']}: loss {control['loss']:.1e}, gradients "
        f"{control['gradient']:.1e}"
    )
    if record["changes"] is not None:
        lines.append("one token changed: " + _changes(record["changes"]))
    lines += [
        f"NOTHING TRAINED on {what}: all gradients are 0"
        for what, learned in record["learned"].items()
        if not learned
    ]
    lines += [
        f"not proven: {name}, which has not run"
        for name, step in record["steps"].items()
        if "not_run" in step
    ]
    lines += [f"not proven: {what}" for what in record["not_proven"]]
    lines.append("PROVEN" if holds(record) else "NOT PROVEN")
    return "\n".join(lines)


def _allowed(bounds: dict[str, dict[str, float]]) -> str:
    """Return how far steps may be from those on one process: once where all may be as far."""
    allowed: dict[str, list[str]] = {}
    for what, bound in bounds.items():
        words = f"loss {bound['loss']:.1e}, gradients {bound['gradient']:.1e}"
        allowed.setdefault(words, []).append(what)
    if len(allowed) == 1:
        return next(iter(allowed))
    return "; ".join(f"{words} ({', '.join(whats)})" for words, whats in allowed.items())


def _changes(wrong: list[str]) -> str:
    if not wrong:
        return "exactly the outputs that depend on it change"
    return "\n  ".join([f"{len(wrong)} differences", *wrong[:10]])


def _row(name: str, step: dict[str, Any]) -> tuple[str, ...]:
    if "not_run" in step:
        return (name, "not run: " + step["not_run"], "", "", "", "-")
    apart = step["difference"]
    counts: dict[str, int] = {}
    for group in step["groups"]:
        counts[group] = counts.get(group, 0) + 1
    groups = ", ".join(f"{count} x {group}" for group, count in counts.items())
    if step["units"]:
        groups += ", shared prefixes"
    verdict = "ok" if step["holds"] else "DIFFERS"
    if not step["has_trained"]:
        verdict = "NOTHING TRAINED"
    if apart["missing"]:
        verdict += f": {len(apart['missing'])} gradients in one of the two alone"
    figures = (f"{apart['loss']:.1e}", f"{apart['gradient']:.1e}", apart["parameter"])
    return (name, groups, *figures, verdict)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
