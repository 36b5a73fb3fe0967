"""Mutated input of the commands, and whether a command keeps its promise on it.

Files that hf_flexseq reads (plans, traces, plans of pipelines, cost models, lengths) are mutated:
bits flip, keys go, types change, numbers become huge, negative or NaN, values nest deep, files are
cut, joined, or replaced by pickles that would leave a mark. Every mutation follows from a seed and
its index.

The promise: a command ends with 0, or with 2 and one line of at most 300 characters; on 0 nothing
that it prints or writes holds a number that is not finite, and a plan that it writes passes the
check. Nobody's pickle runs, and nothing takes 10 seconds.
"""

import contextlib
import copy
import io
import json
import math
import pickle
import random
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_flexseq.base.topology import Topology
from hf_flexseq.cli import main as flexseq
from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.pipeline.planning import PipelineOptions, make_pipeline_plan
from hf_flexseq.pipeline.planning.stage_cost import PipelineCost
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.options import PlanOptions
from hf_flexseq.planner import make_plan

LINE = 300  # characters of a message
MOST_S = 10.0

TOPOLOGY = Topology(nodes=2, ranks_per_node=4)
MACHINE = ("--topology", "2x4", "--cost-model", "llama-3.1-8b-h200")
CAP = ("--max-tokens-per-rank", "6000")
LENGTHS = (900, 12_000, 40, 2500, 7, 300, 5000, 64, 128, 1)

# What a number, a string or anything else becomes.
STRANGE: tuple[Any, ...] = (
    *(0, -1, 1, 2, 7, -(2**63), 2**31, 2**63, 10**9, 10**18, 10**30, 10**400),
    *(0.0, -0.5, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *(None, True, False, "", "x", "7", "\x1b[31mred\x1b[0m", "\u202eleft", "a\nb", "\ud800"),
    *("y" * 5000, [], {}, [[]], [1], [True], {"a": 1}, ["\x1b]0;title\x07"]),
)
NAN_IN_TEXT = re.compile(r"(?<![\w/.-])-?(nan|inf|infinity)(?![\w/.-])", re.IGNORECASE)


# ---- the files to begin with


def planted(mark: Path) -> bytes:
    """Return a pickle that makes the file `mark` when it is loaded."""

    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(mark), "w")

    return pickle.dumps(Planted())


def plan_text() -> str:
    """Return a plan of groups."""
    cost = PRESETS["llama-3.1-8b-h200"]
    return make_plan(LENGTHS, TOPOLOGY, cost, PlanOptions(max_tokens_per_rank=6000)).to_json()


def trace_text() -> str:
    """Return a plan trace of three steps."""
    record = json.loads(plan_text())
    lines = []
    for step in range(3):
        measured = [0.25] * len(record["micro_batches"])
        line = {"step": step, "cost_model": "0123456789abcdef", "measured_s": measured, **record}
        lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"


def pipeline_text() -> str:
    """Return a line of a pipeline's trace."""
    cost = PipelineCost.of_model(PRESETS["llama-3.1-8b-h200"], 4)
    plan = make_pipeline_plan((900, 5000, 40), cost, PipelineOptions(schedule="seq1f1b", chunks=4))
    line = {"step": 3, "measured_s": [0.5], "pipeline_cost": cost.to_record(), "replica": 0}
    return json.dumps({**line, "sequences": [0, 1, 2], **plan.to_record()})


def cost_text() -> str:
    """Return a cost model."""
    return json.dumps(PRESETS["llama-3.1-8b-h200"].to_record())


def lengths_text(kind: str) -> str:
    """Return lengths as text: `list`, `lines` or `rows`."""
    if kind == "list":
        return json.dumps(LENGTHS)
    if kind == "lines":
        return "".join(f"{length}\n" for length in LENGTHS)
    rows = [{"length": length, "input_ids": [1] * (length % 50)} for length in LENGTHS]
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---- mutations of values


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*path, index))


def mutated_value(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with something in it changed, gone, added or there twice."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        inside = list(places(value))[1:]
        if not inside:
            return strange(rng)
        path = rng.choice(inside)
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        act = rng.randrange(6)
        old = holder[path[-1]]
        if act == 0:
            del holder[path[-1]]
        elif act == 1 and isinstance(holder, list):
            holder.insert(path[-1], old)
        elif act == 1:
            holder["extra"] = old
        elif act == 2 and isinstance(old, int | float) and not isinstance(old, bool):
            half = old / 2 if abs(old) < 2**63 else 0.5
            holder[path[-1]] = rng.choice((old + 1, old - 1, -old, old * 10**9, half))
        elif act == 3:
            holder[path[-1]] = nested(rng.choice((2, 50, 150)))
        else:
            holder[path[-1]] = strange(rng)
    return value


def strange(rng: random.Random) -> Any:
    """Return a value that nobody expects, of its own: the next mutation may change it."""
    return copy.deepcopy(rng.choice(STRANGE))


def nested(depth: int) -> Any:
    """Return a list in a list in a list."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def json_text(value: Any) -> bytes:
    """Return a value as JSON, lone surrogates and NaN included."""
    return json.dumps(value).encode()


# ---- mutations of bytes


def mutated_bytes(data: bytes, rng: random.Random, mark: Path) -> bytes:
    """Return the bytes of a file after an accident or an attack."""
    act = rng.randrange(10)
    at = rng.randrange(len(data) + 1)
    if act <= 2:
        flipped = bytearray(data)
        for _ in range(rng.choice((1, 1, 3, 20))):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if act == 3:
        return data[:at]
    if act == 4:
        return data + data[at:]
    if act == 5:
        return (
            data[:at] + rng.choice((b"\x00", b"\xff\xfe", b"\x1b[2J", b"[" * 100_000)) + data[at:]
        )
    if act == 6:
        return planted(mark)
    if act == 7:
        return rng.choice((b"", b"\n", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 6000))
    if act == 8:
        return re.sub(rb"\d+", lambda found: found[0] * rng.choice((1, 1, 1, 2, 900)), data)
    return data.replace(b"{", rng.choice((b'{"version": 2, ', b'{"lengths": [1], ', b"{{")), 1)


# ---- cases


@dataclass
class Case:
    """One mutated input."""

    kind: str
    """What is mutated."""
    argv: list[str]
    """Arguments of `flexseq`."""
    written: Path | None = None
    """File that the command may write: a plan, or a trace of events."""


@dataclass
class Maker:
    """Makes cases in a folder, from the same files every time."""

    folder: Path
    originals: dict[str, bytes] = field(init=False)
    mark: Path = field(init=False)
    """File that no pickle may make."""

    def __post_init__(self) -> None:
        self.mark = self.folder / "planted"
        self.originals = {
            "plan": plan_text().encode(),
            "trace": trace_text().encode(),
            "pipeline plan": pipeline_text().encode(),
            "cost model": cost_text().encode(),
            "lengths list": lengths_text("list").encode(),
            "lengths lines": lengths_text("lines").encode(),
            "lengths rows": lengths_text("rows").encode(),
        }

    def case(self, index: int, seed: int) -> Case:
        """Return case `index`, with its file written."""
        rng = random.Random(f"{seed} {index}")
        kind = KINDS[index % len(KINDS)]
        path = self.folder / "input.json"
        path.write_bytes(self._mutated(self.originals[kind], kind, rng))
        return self._command(kind, str(path), rng)

    def _mutated(self, original: bytes, kind: str, rng: random.Random) -> bytes:
        """Return a mutated file: its values where it is JSON, or its bytes."""
        if kind == "lengths lines" or rng.random() < 0.4:
            return mutated_bytes(original, rng, self.mark)
        lines = original.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json_text(mutated_value(json.loads(lines[at]), rng))
        return b"\n".join(lines)

    def _command(self, kind: str, path: str, rng: random.Random) -> Case:
        """Return a command that reads the file at `path`."""
        written = self.folder / "written.json"
        written.unlink(missing_ok=True)
        if kind.startswith("lengths"):
            write = ["--json", str(written)] if rng.random() < 0.5 else []
            planner = rng.choice(("auto", "auto", "zeppelin", "megatron"))
            argv = ["plan", "--lengths", path, *MACHINE, *CAP, *write, "--planner", planner]
            return Case(kind, argv, written=written if write else None)
        if kind == "cost model":
            lengths = self.folder / "good.json"
            lengths.write_text(json.dumps(LENGTHS))
            chosen = ["--topology", "2x4", "--cost-model", path]
            argv = ["plan", "--lengths", str(lengths), *chosen, "--json", str(written)]
            if rng.random() < 0.5:
                argv += CAP
            return Case(kind, argv, written=written)
        act = rng.randrange(3)
        if act == 0:
            return Case(kind, ["view", path])
        if act == 1:
            return Case(kind, ["view", path, *MACHINE, "--step", str(rng.randrange(3))])
        return Case(kind, ["view", path, "--chrome", str(written)], written=written)


KINDS = (
    *("plan", "pipeline plan", "cost model") * 2,
    *("trace", "lengths list", "lengths lines", "lengths rows"),
)

# ---- the promise


@dataclass
class Outcome:
    """How a case ended."""

    status: int | None
    """Exit status; None where it raised."""
    problem: str
    """How it breaks the promise, "" where it keeps it."""
    seconds: float = 0.0


def run_case(case: Case) -> Outcome:
    """Run one case in this process."""
    began = time.perf_counter()
    out, err = io.StringIO(), io.StringIO()
    status: int | None = None
    problem = ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = flexseq(case.argv)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception as error:  # whatever comes out is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__} from {Path(where.filename).name}:{where.lineno}"
    seconds = time.perf_counter() - began
    if not problem:
        problem = broken_promise(case, status, out.getvalue(), err.getvalue())
    if not problem and seconds > MOST_S:
        problem = f"took more than {MOST_S:.0f} s"
    return Outcome(status, problem, seconds)


def broken_promise(case: Case, status: int | None, out: str, err: str) -> str:
    """Return how the end of a command breaks the promise, "" where it does not."""
    lines = err.splitlines()
    if status not in (0, 2):
        return f"exit status {status}"
    reasons = re.fullmatch(r"(\d+) reasons to refuse this:", lines[0]) if lines else None
    is_list = reasons is not None and int(reasons[1]) == len(lines) - 1
    if status == 2 and (not (is_list or len(lines) == 1) or not err.endswith("\n")):
        return f"{len(lines)} lines of error"
    if len(lines) > 1 and not is_list:
        return f"{len(lines)} lines of warnings"
    if any(len(line) > LINE for line in lines):
        return "a message of more than 300 characters"
    if not all(line.isprintable() for line in lines):
        return "a message with control characters"
    if status == 2:
        return ""
    if not all(line.isprintable() for line in out.split("\n")):
        return "control characters in the output"
    if NAN_IN_TEXT.search(out):
        return "a number that is not finite in the output"
    if "predicted -" in out or "measured -" in out:
        return "negative seconds in the output"
    if case.kind == "plan" and not is_plan(json.loads(Path(case.argv[1]).read_text())):
        return "what is no plan was taken for one"
    return broken_file(case)


def is_plan(record: Any) -> bool:
    """Return whether a JSON value is a plan, without a word of the code that is tried."""
    placed = []
    numbers = [record["objective_s"], record["lower_bound_s"], record["planning_s"]]
    for micro_batch in record["micro_batches"]:
        for group in micro_batch["groups"]:
            placed += group["sequences"]
            numbers += group["ranks"]
    numbers += placed + record["lengths"]
    return (
        all(type(one) in (int, float) and 0 <= one < 2**63 for one in numbers)
        and all(type(one) is int for one in placed + record["lengths"])
        and sorted(placed) == list(range(len(record["lengths"])))
        and min(record["lengths"], default=1) > 0
    )


def broken_file(case: Case) -> str:
    """Return what is wrong with the file that a command wrote, "" where nothing is."""
    if case.written is None or not case.written.exists():
        return ""
    for line in case.written.read_text().splitlines():
        if NAN_IN_TEXT.search(line):
            return "a number that is not finite in a file"
        if case.argv[0] == "plan":
            try:
                check(Plan.from_json(line), TOPOLOGY)
            except ValueError:
                return "a plan that the check refuses"
    return ""
