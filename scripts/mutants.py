"""Mutants of the code that decides what is computed, and the tests that kill each.

    nice -n 19 python scripts/mutants.py --json mutants.json > mutants.md
    nice -n 19 python scripts/mutants.py --again mutants.json --killers 1 --json later.json

A mutant is the package with one small fault: a comparison, a bound or an argument is another one,
or a statement is left out. A test kills it by failing, or by taking far longer than without it. A
mutant that no test kills shows code that is checked by nothing, and one with a single killer shows
a test that nothing replaces. `--again` takes the mutants of a record, finds them in the code as it
stands, tries the recorded killers first, and so shows whether any has lost its last one.

1. The mutants are drawn with a seed, in the files of `GROUPS`, spread over groups by lines.
2. pytest collects the tests once, in this process. Every test runs once, in a fork, with a probe
   at each mutated statement: a mutant needs only the tests that reach it. Probes write to shared
   memory, so that ranks which are forks count as well.
3. For each mutant a fork exchanges the code of the mutated function, and runs tests, the cheapest
   first, until `--killers` test functions have failed or `--budget` seconds of tests have passed.
   A failure under the clock, or of a test that starts processes, counts only if the same test
   passes right afterwards without the mutant.

All that is found is kept in the folder `--state`: the same command goes on where it was stopped,
and a larger `--budget` continues mutants that were given up. While a file named `pause` is there,
it waits between tests. Not seen are faults in code that runs at import, in annotations, in
messages of errors, and killers that start a new interpreter, which has the code as it stands.

`scripts/benchmarks/mutations.py` is something else: it mutates input files.
"""

import argparse
import ast
import contextlib
import copy
import functools
import gc
import importlib
import json
import mmap
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_flexseq"

# What is mutated: files of the package by group, as patterns.
GROUPS = {
    "plan": ("plan/*.py",),
    "program": ("program/[a-z]*.py",),
    "replay": (
        *("attention/replay.py", "attention/bound_programs.py", "attention/programs.py"),
        *("attention/function.py", "attention/uploads.py"),
    ),
    "exchange": ("steps/exchange.py", "steps/token_words.py", "distributed/all_to_all.py"),
    "merges": ("kernels/merge.py", "kernels/fused_operations.py"),
    "reduction": (
        *("hf/reduction.py", "hf/gradients.py"),
        *("distributed/reduction.py", "pipeline/reduction.py"),
    ),
    "loss": (
        *("kernels/chunked_loss.py", "kernels/token_outputs.py", "hf/model/loss.py"),
        *("hf/losses.py", "hf/step_loss.py", "hf/next_token.py", "hf/token_means.py"),
        *("steps/loss_masks.py", "steps/logged_loss.py", "steps/row_outputs.py"),
        "steps/figure_passes.py",
    ),
}

SLOW_S = 20.0  # tests that take longer run only where fewer than two killers are known
MOST_S = 600.0  # of a test without a mutant
MOST_BYTES = 8 * 2**30  # data of a process, as a mutant may ask for anything
STATES = ("killed", "timed out", "survived", "given up", "not reached", "not run", "gone")
LATE = " (time out)"  # behind a killer


# ---- the faults

EXCHANGED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
OTHER_NAMES = {
    **{"min": "max", "max": "min", "any": "all", "all": "any"},
    **{"minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"},
}
TEXT = (ast.JoinedStr, ast.Tuple, ast.List)  # + joins these, and is not exchanged
UNTOUCHED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Global)
ALIKE = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.Constant)  # are exchanged by pairs
NO_SWAP = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "cast", "zip", "warn"}
FOR_READERS = {"__repr__", "__str__", "describe"}


@dataclass(frozen=True)
class Mutant:
    """One fault in one file."""

    group: str
    file: str
    """Relative to the repository."""
    function: str
    """Qualified name of the function with the fault."""
    line: int
    operator: str
    old: str
    """The source that is replaced."""
    new: str
    start: int
    """Of the old source in the file, in bytes."""
    statement: tuple[int, int]
    """Line and column of the statement with the fault."""
    nth: int = 0
    """Among equal faults of the function."""

    @property
    def key(self) -> str:
        return key_of(vars(self))

    def source(self) -> str:
        """Return the text of the file with the fault; every other line stays where it was."""
        text = (ROOT / self.file).read_bytes()
        old = self.old.encode()
        assert text[self.start : self.start + len(old)] == old, f"{self.file} has changed"
        lost = b"\n" * (self.old.count("\n") - self.new.count("\n"))
        new = self.new.encode()
        new = new[:-1] + lost + new[-1:]  # a line can be empty before the parenthesis that closes
        return (text[: self.start] + new + text[self.start + len(old) :]).decode()


def key_of(row: Mapping[str, Any]) -> str:
    """Name a fault by what stays the same when lines move."""
    names = ("file", "function", "operator", "old", "new", "nth")
    return " | ".join(str(row[name]) for name in names)


class Source:
    """The text of a file, and where its nodes are in it."""

    def __init__(self, file: str) -> None:
        self.text = (ROOT / file).read_bytes()
        self._line_starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        """Return where a node begins, in bytes."""
        return self._line_starts[node.lineno - 1] + node.col_offset

    def of(self, node: ast.AST) -> str:
        """Return the source of a node."""
        stop = self._line_starts[node.end_lineno - 1] + node.end_col_offset
        return self.text[self.start(node) : stop].decode()


def faults_of(node: ast.AST, source: Source, function: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (operator, the node that is replaced, its new source) for each fault of one node of a
    function."""
    text = source.of

    def changed(**fields: object) -> str:
        one = copy.copy(node)
        for name, value in fields.items():
            setattr(one, name, value)
        return f"({ast.unparse(one)})"

    match node:
        case ast.Compare(ops=[one]) if type(one) in EXCHANGED:
            yield "comparison", node, changed(ops=[EXCHANGED[type(one)]()])
        case ast.BoolOp(op=one):
            yield "and/or", node, changed(op=EXCHANGED[type(one)]())
        case ast.BinOp(left=left, op=one, right=right) if type(one) in EXCHANGED:
            if not any(isinstance(side, TEXT) or is_text(side) for side in (left, right)):
                yield "arithmetic", node, changed(op=EXCHANGED[type(one)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "dropped sign", node, f"({text(operand)})"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "negated condition", test, f"(not ({text(test)}))"
        case ast.Constant(value=bool(value)):
            yield "constant", node, f"({not value})"
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, f"({value + 1!r})"
        case ast.Slice(lower=lower, upper=upper):
            for bound in (lower, upper):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield "slice bound", bound, f"({text(bound)} + 1)"
        case ast.Call(func=called, args=arguments):
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in OTHER_NAMES:
                other = copy.copy(called)
                setattr(other, "attr" if hasattr(called, "attr") else "id", OTHER_NAMES[name])
                yield "other function", called, f"({ast.unparse(other)})"
            first, second, *others = *arguments, None, None
            alike = type(first) is type(second) in ALIKE and "b" not in map(text, arguments[:2])
            if alike and name not in {*NO_SWAP, *OTHER_NAMES}:
                yield "swapped arguments", node, changed(args=[second, first, *others[:-2]])
        case ast.AugAssign(op=one) if type(one) in EXCHANGED:
            target, value = text(node.target), text(node.value)
            sign = ast.unparse(ast.BinOp(ast.Name("a"), EXCHANGED[type(one)](), ast.Name("b")))
            yield "arithmetic", node, f"{target} {sign[2:-2]}= ({value})"
            yield "left out", node, f"if False: {text(node)}"
        case ast.Expr(value=ast.Call()) | ast.Continue():
            yield "left out", node, f"if False: {text(node)}"
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]) if function != "__init__":
            yield "left out", node, f"if False: {text(node)}"


def is_text(node: ast.AST) -> bool:
    """True for a string."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutants_of(group: str, file: str) -> list[Mutant]:
    """Return all faults that can be planted in the functions of a file."""
    source = Source(file)
    found: list[Mutant] = []
    seen: Counter[str] = Counter()

    def visit(node: ast.AST, names: tuple[str, ...], statement: ast.stmt | None) -> None:
        if isinstance(node, UNTOUCHED) or getattr(node, "arg", "") == "strict":  # of zip
            return
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                visit(child, (*names, node.name), None)
            return
        if isinstance(node, ast.FunctionDef):
            inside = (*names, "<locals>") if statement is not None else names
            if node.name not in FOR_READERS:
                for child in node.body:
                    visit(child, (*inside, node.name), child)
            return
        if statement is not None:
            for operator, part, new in faults_of(node, source, names[-1]):
                mutant = Mutant(
                    *(group, file, ".".join(names), part.lineno, operator),
                    *(source.of(part), new, source.start(part)),
                    statement=(statement.lineno, statement.col_offset),
                )
                found.append(replace(mutant, nth=seen[mutant.key]))
                seen[mutant.key] += 1
        if isinstance(node, ast.AnnAssign):
            children: list[ast.AST] = [node.target, node.value] if node.value else []
        else:
            children = list(ast.iter_child_nodes(node))
        for child in children:
            inner = child if isinstance(child, ast.stmt) and statement is not None else statement
            visit(child, names, inner)

    visit(ast.parse(source.text), (), None)
    return found


def all_mutants() -> dict[str, list[Mutant]]:
    """Return all faults, by group."""
    found: dict[str, list[Mutant]] = {}
    for group, patterns in GROUPS.items():
        files = sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)})
        found[group] = []
        for path in files:
            found[group] += mutants_of(group, str(path.relative_to(ROOT)))
    return found


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, each of another line: of every group by its share of the lines, and
    at least half of what it had if groups were equal."""
    by_line: dict[str, dict[tuple[str, int], list[Mutant]]] = {}
    for group, mutants in all_mutants().items():
        lines = by_line[group] = {}
        for mutant in mutants:
            lines.setdefault((mutant.file, mutant.line), []).append(mutant)
    total = sum(len(lines) for lines in by_line.values())
    counts = {}
    for group, lines in by_line.items():
        share = max(count * len(lines) // total, count // (2 * len(GROUPS)))
        counts[group] = min(share, len(lines))
    counts["program"] += count - sum(counts.values())  # the largest group takes the difference
    chosen = []
    for group, lines in by_line.items():
        dice = random.Random(f"{seed} {group}")
        for line in sorted(dice.sample(sorted(lines), counts[group])):
            chosen.append(dice.choice(lines[line]))
    return chosen


# ---- code that is exchanged while the process runs


def name_of(file: str) -> str:
    """Return the name of a module of the package."""
    return file.removesuffix(".py").replace("/", ".")


def compiled(file: str, source: ast.Module | str) -> types.CodeType:
    """Return the code of a file with another source."""
    return compile(source, str(ROOT / file), "exec", dont_inherit=True)


def with_probes(file: str, probes: Mapping[tuple[int, int], Sequence[int]]) -> ast.Module:
    """Return a file's tree that sets `__reached__[index]` before each statement in `probes`."""
    tree = ast.parse((ROOT / file).read_text())
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if not isinstance(statements, list):  # the body of a lambda is none
                continue
            longer: list[ast.stmt] = []
            for statement in statements:
                for index in probes.get((statement.lineno, statement.col_offset), ()):
                    (probe,) = ast.parse(f"__reached__[{index}] = 1").body
                    for part in ast.walk(probe):
                        ast.copy_location(part, statement)
                    longer.append(probe)
                longer.append(statement)
            setattr(node, name, longer)
    return tree


class Functions:
    """All functions of some files that this process has, whatever decorates them."""

    def __init__(self, files: Iterable[str]) -> None:
        for file in files:
            importlib.import_module(name_of(file))
        self._by_place: dict[tuple[str, str, int], list[types.FunctionType]] = {}
        self.caches: list[Any] = []
        """All cached functions."""
        gc.unfreeze()  # what is frozen is not listed
        for one in gc.get_objects():
            if type(one) is functools._lru_cache_wrapper:
                self.caches.append(one)
            elif type(one) is types.FunctionType and "<lambda>" not in one.__qualname__:
                self._by_place.setdefault(self._place(one.__code__), []).append(one)
        gc.freeze()

    @staticmethod
    def _place(code: types.CodeType) -> tuple[str, str, int]:
        return code.co_filename, code.co_qualname, code.co_firstlineno

    def exchange(self, code: types.CodeType) -> int:
        """Give functions their code in that of a changed module; return how many changed."""
        changed = 0
        for inner in code.co_consts:
            if not isinstance(inner, types.CodeType):
                continue
            for function in self._by_place.get(self._place(inner), ()):
                if function.__code__ != inner:
                    function.__code__ = inner
                    changed += 1
            changed += self.exchange(inner)
        return changed


# ---- tests in forks


class Runner:
    """Tests that pytest has collected, run in forks of its process: a pytest plugin."""

    def __init__(self, options: argparse.Namespace, mutants: Sequence[Mutant]) -> None:
        self.options = options
        self.mutants = mutants
        self.reached: dict[str, dict[str, Any]] = {}
        """By test: its outcome, its seconds, and the indices of the mutants that it reaches."""
        self.results: dict[str, dict[str, Any]] = {}
        """By key of a mutant."""
        self._outcome = "p"  # of the test that runs, in a fork

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed and self._outcome != "f":
            self._outcome = "f" if report.failed else "s"

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.folder = session.config._tmp_path_factory.getbasetemp()  # one for all forks
        self.functions = Functions({mutant.file for mutant in self.mutants})
        self.plant_probes()
        for cached in self.functions.caches:
            if cached.__module__.startswith(PACKAGE.name):
                cached.cache_clear()  # collecting tests has called some
        for one in self.saved("reached.jsonl"):
            self.reached[one.pop("test")] = one
        for one in self.saved("results.jsonl"):
            self.results[one["key"]] = one
        for tests in self.stages():
            for test in tests:
                self.reach(test)
            # Where the program is stopped, those with the fewest killers are the furthest.
            for index in sorted(range(len(self.mutants)), key=self.count_killers):
                self.find_killers(index)
        return True

    def stages(self) -> list[list[str]]:
        """Return all tests in four parts, as most mutants are killed by the first: one variant of
        every quick test function, and of every other one; then their other variants."""
        parts: list[list[str]] = [[], [], [], []]
        seen = set()
        for test, item in self.items.items():
            is_slow = item.get_closest_marker("quick") is None
            parts[2 * (function_of(test) in seen) + is_slow].append(test)
            seen.add(function_of(test))
        return parts

    @property
    def paused(self) -> bool:
        return (self.options.state / "pause").exists()

    def saved(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield what a run before this one has found."""
        path = self.options.state / name
        if path.exists():
            yield from map(json.loads, path.read_text().splitlines())

    def save(self, name: str, found: Mapping[str, Any]) -> None:
        with (self.options.state / name).open("a") as log:
            log.write(json.dumps(found) + "\n")

    def in_fork(self, tests: Sequence[str], prepare: Callable[[], Any], limit: float = 0) -> str:
        """Run tests after `prepare()` in a fork, up to the first that fails. Return a letter for
        each that ran: p(assed), s(kipped), f(ailed), t(ook too long). limit: seconds for each; 0
        for what the test took without a mutant, and more."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.setpgid(0, 0)
                os.close(read)
                self._run(tests, prepare, write)
            os._exit(0)
        os.close(write)
        said = ""
        waited_s = 0.0
        while len(said) < len(tests) and said[-1:] not in ("f", "t"):
            if select.select([read], [], [], 1)[0]:
                said += os.read(read, 1).decode() or "f"  # the end of the pipe: it has died
                waited_s = 0.0
            elif not self.paused:
                waited_s += 1
                if waited_s > (limit or 5 * self.reached[tests[len(said)]]["seconds"] + 5):
                    said += "t"
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # and the ranks that it has started
        os.waitpid(child, 0)
        os.close(read)
        for folder in self.folder.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        return said

    def _run(self, tests: Sequence[str], prepare: Callable[[], Any], write: int) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        prepare()
        for test in tests:
            while self.paused:
                time.sleep(1)
            self._outcome = "p"
            item = self.items[test]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            os.write(write, self._outcome.encode())

    # ---- 2. the tests that reach a mutant

    def plant_probes(self) -> None:
        """Make the code of all mutated files with a probe at each mutant."""
        self.shared = mmap.mmap(-1, len(self.mutants))  # by this process and its forks
        probes: dict[str, dict[tuple[int, int], list[int]]] = {}
        for index, mutant in enumerate(self.mutants):
            probes.setdefault(mutant.file, {}).setdefault(mutant.statement, []).append(index)
        self.with_probes = []
        for file, of_file in probes.items():
            self.with_probes.append(compiled(file, with_probes(file, of_file)))
            sys.modules[name_of(file)].__reached__ = self.shared  # type: ignore[attr-defined]

    def reach(self, test: str) -> None:
        """Run a test without a mutant, unless it has been run."""
        if test in self.reached:
            return
        self.shared[:] = bytes(len(self.shared))
        started = time.monotonic()
        outcome = self.in_fork(
            [test], lambda: [*map(self.functions.exchange, self.with_probes)], MOST_S
        )
        seconds = round(time.monotonic() - started, 2)
        hit = [index for index, byte in enumerate(self.shared[:]) if byte]
        self.reached[test] = {"outcome": outcome, "seconds": seconds, "mutants": hit}
        self.save("reached.jsonl", {"test": test, **self.reached[test]})
        if outcome in "ft":
            print(f"fails without a mutant: {test}", file=sys.stderr, flush=True)

    # ---- 3. the tests that kill it

    def count_killers(self, index: int) -> int:
        """Return how many killers of a mutant are known."""
        return len(self.results.get(self.mutants[index].key, {"killers": ()})["killers"])

    def order(self, index: int) -> list[str]:
        """Return the tests that reach a mutant: known killers, tests in files that are named after
        its module, then others; of each the cheapest variant of every test function, then the next
        one of every function, and so on."""
        known = self.options.known.get(self.mutants[index].key, ())
        module = Path(self.mutants[index].file).stem
        reaching = []
        for test, one in self.reached.items():
            if one["outcome"] == "p" and index in one["mutants"] and test in self.items:
                reaching.append((one["seconds"], test))
        variants: Counter[str] = Counter()
        ranked = []
        for seconds, test in sorted(reaching):
            place = (test not in known, module not in test.partition("::")[0])
            ranked.append((*place, variants[function_of(test)], seconds, test))
            variants[function_of(test)] += 1
        return [test for *_, test in sorted(ranked)]

    def find_killers(self, index: int) -> None:
        """Run tests on a mutant that have not been run on it, and save what was found."""
        mutant = self.mutants[index]
        order = self.order(index)
        found: dict[str, Any] = {"key": mutant.key, "killers": [], "run": [], "seconds": 0.0}
        found |= copy.deepcopy(self.results.get(mutant.key, {}))
        module = compiled(mutant.file, mutant.source())

        def prepare() -> None:
            assert self.functions.exchange(module), "no function has changed"

        while len(found["killers"]) < self.options.killers:
            tests = self.next_tests(found, order)
            if not tests:
                break
            said = self.in_fork(tests, prepare)
            last = tests[len(said) - 1]
            found["seconds"] += sum(self.reached[test]["seconds"] for test in tests[: len(said)])
            found["run"] += tests[: len(said)]
            if said[-1] in "ft" and self.is_killer(last, said, prepare):
                found["killers"].append(last + LATE * (said[-1] == "t"))
        found["reaching"] = len(order)
        found["state"] = state_of(found["killers"], len(found["run"]), len(order))
        if found != self.results.get(mutant.key):
            self.results[mutant.key] = found
            self.save("results.jsonl", found)
            print(index, found["state"], mutant.file, mutant.line, file=sys.stderr, flush=True)

    def next_tests(self, found: Mapping[str, Any], order: Sequence[str]) -> list[str]:
        """Return the tests to be run next, in one fork: all that the budget allows."""
        dead = {function_of(one) for one in found["killers"]}
        left_s = self.options.budget - found["seconds"]
        tests = []
        for test in order:
            seconds = self.reached[test]["seconds"]
            if test in found["run"] or function_of(test) in dead:
                continue
            if seconds > SLOW_S and len(dead) > 1:
                continue
            left_s -= seconds
            if left_s < 0:
                break
            tests.append(test)
        return tests

    def is_killer(self, test: str, said: str, prepare: Callable[[], Any]) -> bool:
        """Whether a test that failed with a mutant, after others in one fork, does so alone; and
        passes without the mutant, if something else may have stopped it."""
        if len(said) > 1 and self.in_fork([test], prepare) not in ("f", "t"):
            return False
        if said[-1] == "f" and self.items[test].get_closest_marker("quick"):
            return True
        return self.in_fork([test], lambda: None) == "p"


def function_of(test: str) -> str:
    """Return the function of a test, without its parameters."""
    return test.partition("[")[0].removesuffix(LATE)


def state_of(killers: Sequence[str], run: int, reaching: int) -> str:
    """Return a word for what tests have done to a mutant."""
    if killers:
        return "timed out" if all(one.endswith(LATE) for one in killers) else "killed"
    if not reaching:
        return "not reached"
    return "survived" if run == reaching else "given up"


# ---- the record


def write_record(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one line per mutant, under what is needed to run them again."""
    command = ["git", "rev-parse", "--short=12", "HEAD:hf_flexseq"]
    tree = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    head = {"command": " ".join(["python", "scripts/mutants.py", *sys.argv[1:]])}
    head |= {"date": time.strftime("%Y-%m-%d"), "tree of hf_flexseq": tree.strip()}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{json.dumps(head)[:-1]}, "mutants": [\n{lines}\n]}}\n')


def print_page(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print how many mutants of each group were killed, and those with no killer or one."""
    print(f"| group | mutants | {' | '.join(STATES)} | one killer |")
    print("|---|" + "---:|" * (len(STATES) + 2))
    for group in (*GROUPS, "all"):
        own = [row for row in rows if group in (row["group"], "all")]
        counted = Counter(row["state"] for row in own)
        alone = sum(len(row["killers"]) == 1 for row in own)
        cells = [group, len(own), *(counted[state] for state in STATES), alone]
        print(f"| {' | '.join(map(str, cells))} |")
    for title, state, killers in (
        ("Not killed", ("survived", "given up", "not reached"), 0),
        ("Killed by one test function alone", ("killed", "timed out"), 1),
    ):
        print(f"\n## {title}\n\n| where | change | state | tests run, of those that reach it |")
        print("|---|---|---|---:|")
        for row in rows:
            if row["state"] in state and len(row["killers"]) == killers:
                old, new = (" ".join(row[one].split()) for one in ("old", "new"))
                change = f"`{old}` -> `{new}`".replace("|", "\\|")
                counts = f"{row['run']} of {row['reaching']}"
                where = f"{row['file'].removeprefix('hf_flexseq/')}:{row['line']}"
                print(f"| {where} | {change} | {row['state']} | {counts} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=400, help="mutants (400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, metavar="JSON", help="the mutants of a record")
    parser.add_argument("--killers", type=int, default=3, help="test functions to find (3)")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests a mutant (60)")
    parser.add_argument("--state", type=Path, default=ROOT / "build/mutants", help="folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to FILE")
    parser.add_argument("tests", nargs="*", help="arguments for pytest; all tests if none")
    options = parser.parse_args()
    options.known = {}  # by key of a mutant: its killers on a record
    gone: list[dict[str, Any]] = []
    if options.again is None:
        mutants = drawn(options.count, options.seed)
    else:
        recorded = json.loads(options.again.read_text())["mutants"]
        here = {mutant.key: mutant for group in all_mutants().values() for mutant in group}
        mutants = []
        for row in recorded:
            key = key_of(row)
            options.known[key] = [one.removesuffix(LATE) for one in row["killers"]]
            if key in here:
                mutants.append(here[key])
            else:
                gone.append(row | {"state": "gone"})
    options.state.mkdir(parents=True, exist_ok=True)
    drawn_file = options.state / "mutants.json"
    keys = [mutant.key for mutant in mutants]
    if drawn_file.exists() and json.loads(drawn_file.read_text()) != keys:
        parser.error(f"{options.state} holds results of other mutants: give another --state")
    drawn_file.write_text(json.dumps(keys))
    os.chdir(ROOT)

    import pytest
    from hypothesis import Phase, settings

    # Examples are the same in every run, and one that fails is not made smaller.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    settings.load_profile("mutants")
    runner = Runner(options, mutants)
    words = ["-q", "-s", "-p", "no:cacheprovider", "-o", "timeout=0", "-W", "ignore"]
    words += ["--ignore", "tests/scripts/test_mutants.py"]  # which plants faults itself
    words += ["--basetemp", str(options.state / "tmp"), *options.tests]
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main(words, [runner])
    rows = []
    for mutant in mutants:
        found = {"state": "not run", "killers": [], "run": [], "reaching": 0}
        found |= runner.results.get(mutant.key, {})
        rows.append(asdict(mutant) | found | {"run": len(found["run"])})
        for name in ("key", "start", "statement", "seconds"):
            rows[-1].pop(name, None)
    if options.json:
        write_record(options.json, rows + gone)
    print_page(rows + gone)


if __name__ == "__main__":
    main()
