"""Mutants of the code that decides what is computed, and the tests that kill each.

    nice -n 19 python scripts/mutants.py --json mutants.json
    nice -n 19 python scripts/mutants.py --again mutants.json --killers 1 --json later.json

A mutant is the package with one small fault: a comparison, a bound or an argument is another one,
or a statement is left out. A test kills it by failing, or by taking far longer than without it. A
mutant that no test kills shows code that is checked by nothing, and one with a single killer shows
a test that nothing replaces. `--again` takes the mutants of a record, finds them in the code as it
stands, tries the recorded killers first, and so shows whether any has lost its last one.

1. The mutants are drawn with a seed, each of another line of the files of `GROUPS`.
2. pytest collects the tests once, in this process. Every test runs once, in a fork, with a probe
   at each mutated statement: a mutant needs only the tests that reach it. Probes write to shared
   memory, so that ranks which are forks count as well.
3. For each mutant a fork exchanges the code of the mutated function, and runs tests, the cheapest
   first, until `--killers` test functions have failed or `--budget` seconds of tests have passed.
   A failure under the clock, or of a test that starts processes, counts only if the same test
   passes right afterwards without the mutant.

The record is written after every mutant, and the same command goes on where it was stopped. Not
seen are faults in code that runs at import, in annotations, in messages of errors, and killers
that start a new interpreter.
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
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_flexseq"

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
UNTOUCHED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.Global)
ALIKE = (ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.Constant)  # are exchanged by pairs
NO_SWAP = {"isinstance", "issubclass", "hasattr", "getattr", "setattr", "cast", "zip", "warn"}
FOR_READERS = {"__repr__", "__str__", "describe"}


class Mutant(NamedTuple):
    """One fault in one file."""

    group: str
    file: str  # relative to the repository
    function: str  # qualified name of the function with the fault
    line: int
    operator: str
    old: str  # the source that is replaced
    new: str
    nth: int  # among equal faults of the function
    start: int  # of the old source in the file, in bytes
    statement: tuple[int, int]  # line and column of the statement with the fault

    @property
    def key(self) -> str:
        return key_of(self._asdict())

    def row(self) -> dict[str, Any]:
        """Return what a record says of it; the rest is found again."""
        names = self._fields[: self._fields.index("start")]
        return {name: getattr(self, name) for name in names}

    def source(self) -> str:
        """Return the text of the file with the fault; every other line stays where it was."""
        text, old, new = (ROOT / self.file).read_bytes(), self.old.encode(), self.new.encode()
        lost = b"\n" * (self.old.count("\n") - self.new.count("\n"))
        new = new[:-1] + lost + new[-1:]  # a line can be empty before the parenthesis that closes
        return (text[: self.start] + new + text[self.start + len(old) :]).decode()


def key_of(row: Any) -> str:
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


def mutants_of(group: str, file: str) -> list[Mutant]:
    """Return all faults that can be planted in the functions of a file."""
    source = (ROOT / file).read_bytes()
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found: list[Mutant] = []
    seen: Counter[str] = Counter()

    def start(node: Any) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def text(node: Any) -> str:
        return source[start(node) : starts[node.end_lineno - 1] + node.end_col_offset].decode()

    def visit(node: Any, names: tuple[str, ...], statement: Any) -> None:
        if isinstance(node, UNTOUCHED) or getattr(node, "arg", "") == "strict":  # of zip
            return
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            is_class = isinstance(node, ast.ClassDef)
            names += ("<locals>",) if statement is not None and not is_class else ()
            for child in () if node.name in FOR_READERS else node.body:
                visit(child, (*names, node.name), None if is_class else child)
            return
        for operator, part, new in faults_of(node, text, names[-1]) if statement else ():
            where = (statement.lineno, statement.col_offset)
            given = (group, file, ".".join(names), part.lineno, operator, text(part), new)
            mutant = Mutant(*given, nth=0, start=start(part), statement=where)
            found.append(mutant._replace(nth=seen[mutant.key]))
            seen[mutant.key] += 1
        children = ast.iter_child_nodes(node)
        if isinstance(node, ast.AnnAssign):
            children = iter([node.target, *filter(None, [node.value])])
        for child in children:
            visit(child, names, child if statement and isinstance(child, ast.stmt) else statement)

    visit(ast.parse(source), (), None)
    return found


def all_mutants() -> list[Mutant]:
    """Return all faults."""
    found = []
    for group, patterns in GROUPS.items():
        files = {path for one in patterns.split() for path in PACKAGE.glob(f"{one}.py")}
        for path in sorted(files):
            found += mutants_of(group, str(path.relative_to(ROOT)))
    return found


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants, each of another line."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in all_mutants():
        by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    dice = random.Random(seed)
    return [dice.choice(by_line[line]) for line in sorted(dice.sample(sorted(by_line), count))]


# ---- code that is exchanged while the process runs


def name_of(file: str) -> str:
    """Return the name of a module of the package."""
    return file.removesuffix(".py").replace("/", ".")


def compiled(file: str, source: ast.Module | str) -> types.CodeType:
    """Return the code of a file with another source."""
    return compile(source, str(ROOT / file), "exec", dont_inherit=True)


def place_of(code: types.CodeType) -> tuple[str, str, int]:
    """Return what the code of a function and that of its changed copy have in common."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def with_probes(file: str, probes: Any) -> ast.Module:
    """Return a file's tree that sets `__reached__[index]` for all indices in `probes` before the
    statement at their (line, column)."""
    tree = ast.parse((ROOT / file).read_text())
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if not isinstance(statements, list):  # the body of a lambda is none
                continue
            longer = []
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

    def __init__(self, files: Any) -> None:
        for file in files:
            importlib.import_module(name_of(file))
        self._by_place: dict[Any, list[types.FunctionType]] = {}
        gc.unfreeze()  # what is frozen is not listed
        for one in gc.get_objects():
            is_cached = type(one) is functools._lru_cache_wrapper
            if is_cached and str(one.__module__).startswith(PACKAGE.name):
                one.cache_clear()  # collecting tests has called some
            elif type(one) is types.FunctionType and "<lambda>" not in one.__qualname__:
                self._by_place.setdefault(place_of(one.__code__), []).append(one)
        gc.freeze()

    def exchange(self, code: types.CodeType) -> int:
        """Give functions their code in that of a changed module; return how many changed."""
        changed = 0
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                for function in self._by_place.get(place_of(inner), ()):
                    changed += function.__code__ != inner
                    function.__code__ = inner
                changed += self.exchange(inner)
        return changed


# ---- tests in forks


class Runner:
    """Tests that pytest has collected, run in forks of its process: a pytest plugin."""

    def __init__(self, options: argparse.Namespace, mutants: list[Mutant], save: Any) -> None:
        """save: is called after every mutant."""
        self.options = options
        self.mutants = mutants
        self.save = save
        self.reached: dict[str, Any] = {}
        """By test: its outcome, its seconds, and the indices of the mutants that it reaches."""
        self._outcome = "p"  # of the test that runs, in a fork

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed and self._outcome != "f":
            self._outcome = "f" if report.failed else "s"

    def pytest_runtestloop(self, session: Any) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.folder = session.config._tmp_path_factory.getbasetemp()  # one for all forks
        self.functions = Functions({mutant.file for mutant in self.mutants})
        self.plant_probes()
        for test in self.items:
            self.reached[test] = self.reach(test)
        for index, mutant in enumerate(self.mutants):
            found = self.find_killers(index)
            print(index, found["state"], mutant.file, mutant.line, file=sys.stderr, flush=True)
            self.save(mutant.row() | found)
        return True

    def in_fork(self, tests: list[str], prepare: Any, limit: float = 0) -> str:
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
        while len(said) < len(tests) and said[-1:] not in ("f", "t"):
            seconds = limit or 5 * self.reached[tests[len(said)]]["seconds"] + 5
            if select.select([read], [], [], seconds)[0]:
                said += os.read(read, 1).decode() or "f"  # the end of the pipe: it has died
            else:
                said += "t"
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # and the ranks that it has started
        os.waitpid(child, 0)
        os.close(read)
        for folder in self.folder.iterdir():
            shutil.rmtree(folder, ignore_errors=True)
        return said

    def _run(self, tests: list[str], prepare: Any, write: int) -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        prepare()
        for test in tests:
            self._outcome = "p"
            item = self.items[test]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            os.write(write, self._outcome.encode())

    # ---- 2. the tests that reach a mutant

    def plant_probes(self) -> None:
        """Make the code of all mutated files with a probe at each mutant."""
        self.shared = mmap.mmap(-1, len(self.mutants))  # by this process and its forks
        probes: dict[str, Any] = {}
        for index, mutant in enumerate(self.mutants):
            probes.setdefault(mutant.file, {}).setdefault(mutant.statement, []).append(index)
        self.with_probes = []
        for file, of_file in probes.items():
            self.with_probes.append(compiled(file, with_probes(file, of_file)))
            vars(sys.modules[name_of(file)])["__reached__"] = self.shared

    def set_probes(self) -> None:
        for code in self.with_probes:
            self.functions.exchange(code)

    def reach(self, test: str) -> dict[str, Any]:
        """Run a test without a mutant, and return what it reaches."""
        self.shared[:] = bytes(len(self.shared))
        started = time.monotonic()
        outcome = self.in_fork([test], self.set_probes, MOST_S)
        if outcome in "ft":
            print(f"fails without a mutant: {test}", file=sys.stderr, flush=True)
        seconds = round(time.monotonic() - started, 2)
        hit = [index for index, byte in enumerate(self.shared[:]) if byte]
        return {"outcome": outcome, "seconds": seconds, "mutants": hit}

    # ---- 3. the tests that kill it

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

    def find_killers(self, index: int) -> dict[str, Any]:
        """Run tests on a mutant, and return its state and killers."""
        mutant = self.mutants[index]
        order = self.order(index)
        module = compiled(mutant.file, mutant.source())

        def prepare() -> None:
            assert self.functions.exchange(module), "no function has changed"

        killers: list[str] = []
        run: list[str] = []
        while len(killers) < self.options.killers:
            tests = self.next_tests(killers, run, order)
            if not tests:
                break
            said = self.in_fork(tests, prepare)
            run += tests[: len(said)]
            if said[-1] in "ft" and self.is_killer(run[-1], said, prepare):
                killers.append(run[-1] + LATE * (said[-1] == "t"))
        state = state_of(killers, len(run), len(order))
        return {"state": state, "killers": killers, "run": len(run), "reaching": len(order)}

    def next_tests(self, killers: list[str], run: list[str], order: list[str]) -> list[str]:
        """Return the tests to be run next, in one fork: all that the budget allows."""
        dead = {function_of(one) for one in killers}
        left_s = self.options.budget - sum(self.reached[test]["seconds"] for test in run)
        tests = []
        for test in order:
            if test not in run and function_of(test) not in dead:
                left_s -= self.reached[test]["seconds"]
                if left_s < 0:
                    break
                tests.append(test)
        return tests

    def is_killer(self, test: str, said: str, prepare: Any) -> bool:
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


def state_of(killers: list[str], run: int, reaching: int) -> str:
    """Return a word for what tests have done to a mutant."""
    if killers:
        return "timed out" if all(one.endswith(LATE) for one in killers) else "killed"
    if not reaching:
        return "not reached"
    return "survived" if run == reaching else "given up"


# ---- the record


def write_record(path: Path, head: dict[str, str], rows: list[dict[str, Any]]) -> None:
    lines = ",\n".join(map(json.dumps, rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")  # a run may be stopped while it writes
    whole.write_text(f'{json.dumps(head)[:-1]}, "mutants": [\n{lines}\n]}}\n')
    whole.replace(path)


def print_page(rows: list[dict[str, Any]]) -> None:
    """Print what became of the mutants of each group, and those with no killer or one."""
    for group in GROUPS:
        counts = Counter(row["state"] for row in rows if row["group"] == group)
        said = "".join(f", {count} {state}" for state, count in counts.most_common())
        print(f"* {group}: {counts.total()} mutants{said}")
    for row in sorted(rows, key=lambda row: len(row["killers"])):
        if len(row["killers"]) < 2 and row["state"] != "gone":
            old, new = (" ".join(row[one].split()) for one in ("old", "new"))
            run = f"{row['run']} tests run of {row['reaching']} that reach it"
            by = ", ".join(row["killers"]) or "none"
            where = f"{row['file']}:{row['line']}"
            print(f"* {where}: `{old}` -> `{new}`: {row['state']}, killer {by}; {run}")


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
    rows: list[dict[str, Any]] = []
    if path.exists():
        before = json.loads(path.read_text())
        if before["command"] != head["command"] or before["tree of hf_flexseq"] != tree.strip():
            parser.error(f"{path} is the record of another command, or of other code")
        rows = before["mutants"]
    options.known = {}
    if options.again is None:
        mutants = drawn(options.count, options.seed)
    else:
        here = {mutant.key: mutant for mutant in all_mutants()}
        recorded = {key_of(row): row for row in json.loads(options.again.read_text())["mutants"]}
        for key, row in recorded.items():
            options.known[key] = [one.removesuffix(LATE) for one in row["killers"]]
        mutants = [here[key] for key in recorded if key in here]
        gone = [row | {"state": "gone"} for key, row in recorded.items() if key not in here]
        rows = rows or gone
    done = set(map(key_of, rows))
    os.chdir(ROOT)

    def save(row: dict[str, Any]) -> None:
        rows.append(row)
        write_record(path, head, rows)

    import pytest
    from hypothesis import Phase, settings

    # Examples are the same in every run, and one that fails is not made smaller.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    settings.load_profile("mutants")
    words = ["-q", "-s", "-p", "no:cacheprovider", "-o", "timeout=0", "-W", "ignore"]
    words += ["--ignore", "tests/scripts/test_mutants.py"]  # which plants faults itself
    words += ["--basetemp", str(path.with_suffix(".tmp")), *options.tests]
    left = [mutant for mutant in mutants if mutant.key not in done]
    if left:
        with contextlib.redirect_stdout(sys.stderr):
            pytest.main(words, [Runner(options, left, save)])
    print_page(rows)


if __name__ == "__main__":
    main()
