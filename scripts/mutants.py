"""Mutants of the code that decides what is computed, and the tests that kill each.

    nice -n 19 python scripts/mutants.py --json mutants.json
    nice -n 19 python scripts/mutants.py --again mutants.json --killers 1 --json later.json

A mutant is the package with one small fault: a comparison, a bound or an argument is another one,
or a statement is left out. A test kills it by failing, or by taking far longer than without it. A
mutant that no test kills shows code that is checked by nothing, and one with a single killer shows
a test that nothing replaces. `--again` takes the mutants of a record, finds them in the code as it
stands, tries the recorded killers first, and so shows whether any has lost its last one.

1. The mutants are drawn with a seed, each of another line of the files of `GROUPS`.
2. The files are imported with all faults in them, each behind a switch: `__is_on__(3)` notes that
   the code of mutant 3 is reached, and is true if mutant 3 is the one that runs. Notes are in
   memory that all forks share, ranks among them.
3. pytest collects the tests once, in this process. Every test runs once, in a fork, with all
   switches off: a mutant needs only the tests that reach it.
4. For each mutant tests run in forks with its switch on, the cheapest first, until `--killers`
   test functions have failed or `--budget` seconds of tests have passed. A failure counts if the
   same test passes right afterwards without the mutant.

The record is written after every mutant, and the same command goes on where it was stopped. Not
seen are faults in code that runs at import, in annotations, in messages of errors, and killers
that start a new interpreter.
"""

import argparse
import ast
import builtins
import contextlib
import copy
import json
import mmap
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_flexseq"
FORK = multiprocessing.get_context("fork")

# What is mutated: files of the package by group, as patterns.
GROUPS = {
    "plan": "plan/*",
    "program": "program/[a-z]*",
    "replay": "attention/replay attention/bound_programs attention/programs attention/function "
    "attention/uploads",
    "exchange": "steps/exchange steps/token_words distributed/all_to_all",
    "merges": "kernels/merge kernels/fused_operations",
    "reduction": "hf/engine/reduction hf/engine/finished_steps distributed/reduction "
    "pipeline/reduction",
    "loss": "kernels/chunked_loss kernels/token_outputs hf/model/loss hf/losses/step_loss "
    "hf/losses/next_token hf/losses/known_weights hf/losses/micro_batch_losses steps/loss_masks "
    "steps/logged_loss steps/row_outputs steps/figure_passes",
}
MOST_S = 600.0  # of a test without a mutant
MOST_BYTES = 8 * 2**30  # data of a process, as a mutant may ask for anything
LATE = " (time out)"  # behind a killer
OFF = -1  # the mutant that runs, if none does

# ---- the faults

EXCHANGED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
OTHER_NAMES = {"min": "max", "any": "all", "minimum": "maximum", "amin": "amax"}
OTHER_NAMES |= {other: name for name, other in OTHER_NAMES.items()}
UNTOUCHED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.pattern)
ALIKE = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.Constant)  # are exchanged by pairs
NO_SWAP = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "cast", "zip", "warn"}
FOR_READERS = {"__repr__", "__str__", "describe"}


Row = dict[str, Any]
"""A mutant as a record has it: `group`; `file`, relative to the repository; `function`, its
qualified name; `line`; `operator`; `old`, the source that is replaced; `new`; `nth`, among equal
faults of the function. `known` are the killers of the record before, if any."""


def key_of(row: Row) -> str:
    """Name a fault by what stays the same when lines move."""
    names = ("file", "function", "operator", "old", "new", "nth")
    return " | ".join(str(row[name]) for name in names)


def faults_of(node: Any, text: Any, function: str) -> Any:
    """Yield (operator, the node that is replaced, its new source) for each fault of one node of a
    function. text: returns the source of a node."""

    def changed(**fields: object) -> str:
        one = copy.copy(node)
        vars(one).update(fields)
        return f"({ast.unparse(one)})"

    left_out = f"if False: {text(node)}" if isinstance(node, ast.stmt) else ""
    match node:
        case ast.Compare(ops=[one]) if type(one) in EXCHANGED:
            yield "comparison", node, changed(ops=[EXCHANGED[type(one)]()])
        case ast.BoolOp(op=one):
            yield "and/or", node, changed(op=EXCHANGED[type(one)]())
        case ast.BinOp(op=one) if type(one) in EXCHANGED:
            if not any(map(is_joined, (node.left, node.right))):
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
            elif len(arguments) > 1 and name not in NO_SWAP:
                first, second, *others = arguments
                is_alike = type(first) is type(second) in ALIKE
                if is_alike and "b" not in (text(first), text(second)):
                    yield "swapped arguments", node, changed(args=[second, first, *others])
        case ast.AugAssign(op=one) if type(one) in EXCHANGED:
            sign = ast.unparse(ast.BinOp(ast.Name("a"), EXCHANGED[type(one)](), ast.Name("b")))
            value = f"{text(node.target)} {sign[2:-2]}= ({text(node.value)})"
            yield "arithmetic", node, value
            yield "left out", node, left_out
        case ast.Expr(value=ast.Call()) | ast.Continue():
            yield "left out", node, left_out
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]) if function != "__init__":
            yield "left out", node, left_out


def is_joined(node: ast.AST) -> bool:
    """True for a string, a tuple or a list: + joins these, and is not exchanged."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr | ast.Tuple | ast.List)


def parsed(group: str, file: str) -> tuple[ast.Module, list[tuple[Row, ast.AST]]]:
    """Return the tree of a file, and all faults of its functions with the nodes they replace."""
    source = (ROOT / file).read_bytes()
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found: list[tuple[Row, ast.AST]] = []
    seen: Counter[str] = Counter()

    def text(node: Any) -> str:
        first = starts[node.lineno - 1] + node.col_offset
        return source[first : starts[node.end_lineno - 1] + node.end_col_offset].decode()

    def visit(node: Any, names: tuple[str, ...], is_inside: bool) -> None:
        """is_inside: True for a node of a function's body."""
        if isinstance(node, UNTOUCHED) or getattr(node, "arg", "") == "strict":  # of zip
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            is_function = isinstance(node, ast.FunctionDef)
            names += ("<locals>",) if is_inside and is_function else ()
            for child in () if node.name in FOR_READERS else node.body:
                visit(child, (*names, node.name), is_function)
            return
        for operator, part, new in faults_of(node, text, names[-1]) if is_inside else ():
            row = {"group": group, "file": file, "function": ".".join(names), "line": part.lineno}
            row |= {"operator": operator, "old": text(part), "new": new, "nth": 0}
            seen[key_of(row)] += 1
            found.append((row | {"nth": seen[key_of(row)] - 1}, part))
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
                visit(child, names, is_inside)

    tree = ast.parse(source)
    visit(tree, (), False)
    return tree, found


def all_mutants() -> list[Row]:
    """Return all faults that can be planted. Raises ValueError for a pattern without files."""
    found = []
    for group, patterns in GROUPS.items():
        by_pattern = {one: set(PACKAGE.glob(f"{one}.py")) for one in patterns.split()}
        if empty := [one for one, files in by_pattern.items() if not files]:
            raise ValueError(f"GROUPS: the package has no files {empty}, of {group}")
        for path in sorted(set().union(*by_pattern.values())):
            found += [row for row, _ in parsed(group, str(path.relative_to(ROOT)))[1]]
    return found


def drawn(count: int, seed: int) -> list[Row]:
    """Return `count` mutants, each of another line."""
    by_line: dict[tuple[str, int], list[Row]] = {}
    for row in all_mutants():
        by_line.setdefault((row["file"], row["line"]), []).append(row)
    dice = random.Random(seed)
    return [dice.choice(by_line[line]) for line in sorted(dice.sample(sorted(by_line), count))]


class Planter(ast.NodeTransformer):
    """Puts faults beside the nodes that they replace, each behind its switch."""

    def __init__(self, faults: dict[ast.AST, list[tuple[int, str]]]) -> None:
        """faults: by node, the numbers of mutants and the new sources."""
        self.faults = faults

    def visit(self, node: ast.AST) -> Any:
        made: Any = self.generic_visit(node)
        for index, new in self.faults.get(node, ()):
            if isinstance(node, ast.stmt):
                (switch,) = ast.parse(f"if __is_on__({index}):\n {new}").body
                switch.orelse = [made]
            else:
                switch = ast.parse(f"{new} if __is_on__({index}) else 0", mode="eval").body
                switch.orelse = made
            made = ast.copy_location(switch, node)
        return made


def planted(file: str, indices: dict[str, int]) -> types.CodeType:
    """Return the code of a file with switches for mutants. indices: their numbers, by key."""
    tree, found = parsed("", file)
    faults: dict[ast.AST, list[tuple[int, str]]] = {}
    for row, node in found:
        if key_of(row) in indices:
            faults.setdefault(node, []).append((indices[key_of(row)], row["new"]))
    return compile(Planter(faults).visit(tree), str(ROOT / file), "exec", dont_inherit=True)


# ---- tests in forks


class Runner:
    """Tests that pytest has collected, run in forks of its process: a pytest plugin."""

    def __init__(self, mutants: list[Row], killers: int, budget_s: float, save: Any) -> None:
        """save: is called with the row of each mutant, and what was found."""
        self.mutants, self.killers, self.budget_s, self.save = mutants, killers, budget_s, save
        self.running = OFF
        self.notes = mmap.mmap(-1, len(mutants))  # of this process and all its forks
        self.seconds: dict[str, float] = {}  # of each test that passes without a mutant
        self.reached: dict[str, set[int]] = {}  # by these tests, the numbers of mutants

    def is_on(self, index: int) -> bool:
        """Note that the code of a mutant is reached; return whether it is the one that runs."""
        self.notes[index] = 1
        return index == self.running

    def plant(self) -> None:
        """Have the package imported with the switches."""
        vars(builtins)["__is_on__"] = self.is_on
        indices = {key_of(row): index for index, row in enumerate(self.mutants)}
        files = {row["file"] for row in self.mutants}
        codes = {str(ROOT / file): planted(file, indices) for file in files}
        plain = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, name: str) -> types.CodeType | None:
            return codes.get(str(loader.path)) or plain(loader, name)

        SourceFileLoader.get_code = get_code

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed and self.outcome != "failed":
            self.outcome = report.outcome

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for name, module in list(sys.modules.items()):
            for one in vars(module).values() if name.startswith(PACKAGE.name) else ():
                if hasattr(one, "cache_clear"):
                    one.cache_clear()  # collecting tests has called some
        for test in self.items:
            self.reach(test)
        for index, row in enumerate(self.mutants):
            found = self.find_killers(index)
            print(index, found["state"], row["file"], row["line"], file=sys.stderr, flush=True)
            self.save(row | found)
        return True

    def in_fork(self, test: str, index: int = OFF, seconds: float = MOST_S) -> str:
        """Run a test with a mutant in a fork. Return passed, skipped or failed, or late if it
        takes more than `seconds`."""
        mine, its = FORK.Pipe(duplex=False)
        child = FORK.Process(target=self.run, args=(test, index, its))
        child.start()
        its.close()
        try:
            outcome = mine.recv() if mine.poll(seconds) else "late"
        except EOFError:  # it has died
            outcome = "failed"
        with contextlib.suppress(OSError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # and the ranks that it has started
        child.join()
        mine.close()
        return outcome

    def run(self, test: str, index: int, its: Any) -> None:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        self.running, self.outcome = index, "passed"
        item = self.items[test]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        its.send(self.outcome)

    def reach(self, test: str) -> None:
        """Run a test without a mutant, and note what it reaches."""
        self.notes[:] = bytes(len(self.notes))
        started = time.monotonic()
        outcome = self.in_fork(test)
        if outcome == "passed":
            self.seconds[test] = time.monotonic() - started
            self.reached[test] = {index for index, byte in enumerate(self.notes[:]) if byte}
        elif outcome != "skipped":
            print(f"{outcome} without a mutant: {test}", file=sys.stderr, flush=True)

    def order(self, index: int) -> list[str]:
        """Return the tests that reach a mutant: known killers, tests in files that are named after
        its module, then others; of each the cheapest variant of every test function, then the next
        one of every function, and so on."""
        known = self.mutants[index].get("known", ())
        module = Path(self.mutants[index]["file"]).stem
        variants: Counter[str] = Counter()
        ranked = []
        for test in sorted(self.seconds, key=lambda test: (self.seconds[test], test)):
            if index in self.reached[test]:
                place = (test not in known, module not in test.partition("::")[0])
                ranked.append((*place, variants[function_of(test)], self.seconds[test], test))
                variants[function_of(test)] += 1
        return [test for *_, test in sorted(ranked)]

    def find_killers(self, index: int) -> dict[str, Any]:
        """Run tests on a mutant, and return its state and killers."""
        order = self.order(index)
        killers: list[str] = []
        run, left_s = 0, self.budget_s
        for test in order:
            if function_of(test) in map(function_of, killers):
                continue
            left_s -= self.seconds[test]
            if len(killers) == self.killers or left_s < 0:
                break
            run += 1
            outcome = self.in_fork(test, index, 5 * self.seconds[test] + 5)
            if outcome in ("failed", "late") and self.in_fork(test) == "passed":
                killers.append(test + LATE * (outcome == "late"))
        state = state_of(killers, run, len(order))
        return {"state": state, "killers": killers, "run": run, "reaching": len(order)}


def function_of(test: str) -> str:
    """Return the function of a test, without its parameters."""
    return test.partition("[")[0].removesuffix(LATE)


def state_of(killers: list[str], run: int, reaching: int) -> str:
    """Return a word for what tests have done to a mutant."""
    if killers:
        return "timed out" if all(one.endswith(LATE) for one in killers) else "killed"
    if not reaching:
        return "not reached"
    return "survived" if run == reaching else "given up"


# ---- the record


def write_record(path: Path, head: dict[str, str], rows: list[Row]) -> None:
    """Write a line for each mutant."""
    lines = ",\n".join(map(json.dumps, rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")  # a run may be stopped while it writes
    whole.write_text(f'{json.dumps(head)[:-1]}, "mutants": [\n{lines}\n]}}\n')
    whole.replace(path)


def print_page(rows: list[Row]) -> None:
    """Print what became of the mutants of each group, and those with no killer or one."""
    for group in GROUPS:
        counts = Counter(row["state"] for row in rows if row["group"] == group)
        said = "".join(f", {count} {state}" for state, count in counts.most_common())
        print(f"* {group}: {counts.total()} mutants{said}")
    for row in sorted(rows, key=lambda row: len(row["killers"])):
        if len(row["killers"]) < 2 and row["state"] != "gone":
            old, new = (" ".join(row[one].split()) for one in ("old", "new"))
            nothing = "has lost its last killer" if row.get("known") else "has no killer"
            killers = ", ".join(row["killers"]) or nothing
            tried = f"{row['run']} tests run of {row['reaching']} that reach it"
            place = f"{row['file']}:{row['line']}"
            print(f"* {place}: `{old}` -> `{new}`: {row['state']}, {killers}; {tried}")


def again(record: Path) -> tuple[list[Row], list[Row]]:
    """Return the mutants of a record that are still in the code, and the others."""
    here = {key_of(row): row for row in all_mutants()}
    mutants, gone = [], []
    for row in json.loads(record.read_text())["mutants"]:
        if key_of(row) in here:
            known = [killer.removesuffix(LATE) for killer in row["killers"]]
            mutants.append(here[key_of(row)] | {"known": known})
        else:
            gone.append(row | {"state": "gone"})
    return mutants, gone


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=400, help="mutants (400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, metavar="JSON", help="the mutants of a record")
    parser.add_argument("--killers", type=int, default=3, help="test functions to find (3)")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests a mutant (60)")
    parser.add_argument("--json", type=Path, default=ROOT / "build/mutants.json", help="record")
    parser.add_argument("tests", nargs="*", help="arguments for pytest; all tests if none")
    options = parser.parse_args()
    path = options.json.absolute()
    tree = subprocess.check_output(["git", "rev-parse", "HEAD:hf_flexseq"], text=True, cwd=ROOT)
    head = {"command": " ".join(["python", "scripts/mutants.py", *sys.argv[1:]])}
    head |= {"date": time.strftime("%Y-%m-%d"), "tree of hf_flexseq": tree.strip()}
    if options.again is None:
        mutants, rows = drawn(options.count, options.seed), []
    else:
        mutants, rows = again(options.again)
    if path.exists():
        before = json.loads(path.read_text())
        if (before | {"mutants": [], "date": ""}) != (head | {"mutants": [], "date": ""}):
            parser.error(f"{path} is the record of another command, or of other code")
        rows = before["mutants"]
    done = set(map(key_of, rows))
    left = [row for row in mutants if key_of(row) not in done]

    def save(row: Row) -> None:
        rows.append(row)
        write_record(path, head, rows)

    if left:
        runner = Runner(left, options.killers, options.budget, save)
        runner.plant()
        os.chdir(ROOT)
        sys.path.insert(0, str(ROOT))  # the package is that of this repository
        import pytest
        from hypothesis import Phase, settings

        # Examples are the same in every run, and one that fails is not made smaller.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")
        words = ["-q", "-s", "-p", "no:cacheprovider", "-o", "timeout=0", "-W", "ignore"]
        words += ["-o", "tmp_path_retention_policy=none", "--basetemp", f"{path}.tmp"]
        with contextlib.redirect_stdout(sys.stderr):
            pytest.main([*words, *options.tests], [runner])
    print_page(rows)


if __name__ == "__main__":
    main()
