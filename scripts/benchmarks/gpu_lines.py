"""Measured: the lines that only a GPU would run, and which of them no test on a CPU runs.

    pip install "coverage>=7.13"
    pip install --no-deps --target build/packages "fla-core>=0.6" "liger-kernel>=0.8"
    python scripts/benchmarks/gpu_lines.py --packages build/packages
    python scripts/benchmarks/gpu_lines.py --data build/gpu_lines     the page again

The packages are apart, since transformers uses them wherever they are installed.

Only a GPU runs

* all functions of modules that a CUDA device alone reaches (`MODULES`), Triton's kernels included;
* functions that only those call, or that only NCCL needs (`FUNCTIONS`);
* branches that ask for such a device or for such a transport: the conditions in `ASKS` and
  `ASKS_IN`, and what is left of a block after one that returns without (`ASKS_NOT`).

A line is a statement inside a function; what runs when a module is imported is not counted, and
neither is a line that both devices run, such as `a if device.type == "cuda" else b`.

A line counts as executed if a test ran it on any machine without a GPU: on the late device of the
tests, over stand-ins with the rules of the real interfaces, or under Triton's interpreter. The
interpreter compiles a kernel's own source anew, with its file and its line numbers, and calls it,
so that coverage sees the lines of kernels as it sees others. Executed does not mean right on a
GPU: docs/gpus.md says what these devices cannot see.

Coverage has to start in every process that tests start, and to save before `os._exit`, by which
forked ranks end: `patch` in the configuration below does both. Without it nothing is recorded of
the late device, which is always another process.
"""

import argparse
import ast
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common import ROOT, argument_parser, command_line, machine, table, write_record

if TYPE_CHECKING:
    from coverage import CoverageData

PACKAGE = ROOT / "hf_flexseq"
SCRIPTS = ROOT / "scripts"
CHECKS = sorted((SCRIPTS / "gpu_checks").glob("*.py"))
FOLDER = ROOT / "build/gpu_lines"

# Tests that reach them, as arguments of pytest: of every run, of the weekly one, and those of
# packages that are installed apart.
RUNS = (
    ("tests/attention", "tests/cli", "tests/distributed", "tests/kernels", "tests/late_device")
    + ("tests/memory", "tests/scripts/test_gpu_check.py", "tests/steps")
    + ("tests/hf/test_reduction.py", "tests/hf/test_trainer.py", "tests/hf/test_sharding.py")
    + ("tests/hf/test_sharded_checkpoints.py",),
    ("-m", "nightly", "tests/late_device", "tests/scripts/test_gpu_check.py"),
)
OF_PACKAGES = ("-m", "kernels", "tests/kernels/test_chunked_loss.py", "tests/kernels/scans")

CONFIGURATION = """
[run]
source = {source}
data_file = {folder}/.coverage
parallel = true
sigterm = true
concurrency = multiprocessing, thread
patch = _exit, fork, subprocess
disable_warnings = module-not-measured, no-data-collected
"""

MODULES = (
    "distributed/nccl.py",
    "kernels/cuda_flash.py",
    "kernels/cudnn_long.py",
    "kernels/flash_attn.py",
    "kernels/flash_attn3.py",
    "kernels/scans/fla.py",
    "kernels/torch_varlen.py",
    "kernels/triton_fused.py",
    "kernels/triton_kernels.py",
)
# What the CPU runs, too.
SHARED = {"kernels/cuda_flash.py": ("rows_contiguous",)}
FUNCTIONS = {
    "attention/recurrent/layers.py": ("_fla",),
    "attention/uploads.py": ("Uploads._copy",),
    "cli/environment.py": ("_scans",),
    "distributed/process_groups.py": (
        "post_batch",
        "ProcessGroupRanks.all_to_all",
        "PendingCollective.__init__",
        "PendingCollective.wait",
    ),
    "hf/reduction.py": (
        "instead_of_ddp",
        "average_gradients",
        "_reduced_parameters",
        "_used_anywhere",
    ),
    "hf/sync.py": ("_reduces_by_itself",),
    "kernels/capabilities.py": ("KernelCapabilities._generations_text",),
    "kernels/choose.py": ("_fused_for_cuda", "_is_installed", "reason_without_triton"),
    "kernels/chunked_loss.py": ("_liger_function", "liger_sum", "torch_sum"),
    "kernels/scans/choose.py": ("_reason_not_installed", "_reason_of_compiler", "_log_once"),
    "kernels/segments.py": (
        *("Segments.cu_seqlens_q", "Segments.cu_seqlens_k"),
        *("Segments.has_keyless", "Segments.place"),
    ),
    "memory/store.py": ("free_cached_pinned_memory",),
    "memory/device.py": ("_known_gpu",),
    "scripts/gpu_checks/several.py": ("_guarded",),
}

# Conditions, as `ast` writes them, that hold on a GPU alone, or over NCCL alone.
ASKS = "|".join(
    (
        *(r"== 'cuda'", r"!= 'cpu'", r"\bis_cuda\b", r"\bself\._cuda\b", r"\bon_gpu\b"),
        *(r"(?<!not torch\.)cuda\.is_available", r"cuda\.device_count", r"\.is_behind\b"),
        *(r"\.bf16\b", r"== FLA\b", r"\b_multiplies_into\(", r"not self\.softcap"),
        *(r"\bis_ordered\b", r"\.ordered\b", r"\.waits_on_stream\b", r"\.fast_collectives\b"),
        r"not setting\.rehearse\b",
    )
)
ASKS_IN = {
    "distributed/all_to_all.py": r"block is not None",
    "distributed/connect.py": r"\('nccl', 'cuda'\)|\['nccl', 'cuda'\]",
    "hf/finished_steps.py": r"^due is not None",
    "kernels/capabilities.py": r"^self\.oldest",
    "kernels/choose.py": r"_NOT_USED",
    "kernels/chunked_loss.py": r"reason_without_liger is None",
    "kernels/scans/choose.py": r"reason is None",
    "steps/random_numbers.py": r"len\(states\) > 1",
    "steps/nonfinite.py": r"self\._copied is not None",
    "memory/store.py": r"self\._copies is not None|\.copied is not None",
    "steps/early_encoding.py": r"self\.done is not None",
    "steps/stopwatch.py": r"self\._events",
}
# Conditions that hold everywhere else.
ASKS_NOT = "|".join(
    (
        *(r"(== 'cpu'|!= 'cuda')$", r"^not torch\.cuda\.is_available\(\)$", r"^not on_gpu$"),
        *(r"not is_ordered", r"not self\.oldest", r"keyless_lse == -torch\.inf"),
        *(r"(?<!not )\bsetting\.rehearse$", r"^self\._(stream|copies) is None\b"),
    )
)
# Names that only CUDA has, in statements that all devices run: conditions, which ask for one, and
# expressions with an alternative. A test finds every other statement with such a name in the
# definition above.
NAMES = "|".join(
    (
        *(r"torch\.cuda\.", r"\brecord_(stream|event)\b", r"\bwait_(stream|event)\b"),
        *(r"\bpin_memory\b", r"\b_host_emptyCache\b", r"\btorch\.accelerator\b"),
    )
)
ON_ALL = {
    "cli/environment.py": r"for index in range\(torch\.cuda\.device_count",
    "distributed/connect.py": r"if torch\.cuda\.is_available",
    "distributed/hosts.py": r"device_count\(\) or CPU_RANKS",
    "hf/synthetic_run.py": r"on_gpu = torch",
    "hf/prove/command.py": r"Accelerator\(cpu=not torch",
    "memory/pages.py": r"pin_memory=self\._pinned",
    "memory/store.py": r"if is_gpu else None",
    "steps/early_encoding.py": r"if device\.type == \"cuda\" else None",
    "steps/nonfinite.py": r"self\._copied: .* = None",
    "steps/random_numbers.py": r"if torch\.cuda\.is_available",
    "steps/stopwatch.py": r"self\._events: .* = \[\]",
    "scripts/gpu_check.py": r"if .*not torch\.cuda\.is_available",
    "scripts/gpu_checks/report.py": r"return 2 if self\.rehearse else",
    "scripts/gpu_checks/training.py": r"if torch\.cuda\.is_available|if not setting\.rehearse",
}


class Line(NamedTuple):
    """A line that only a GPU runs."""

    number: int
    last: int
    """Last line of the statement, or of its head."""
    text: str


# ---- the definition


def gpu_lines(path: Path) -> list[Line]:
    """Return the lines of a module that only a GPU runs."""
    name = name_of(path)
    source = path.read_text()
    tree = ast.parse(source)
    marked: set[ast.stmt] = set()
    for qualified, function in functions(tree):
        is_whole = name in MODULES and qualified not in SHARED.get(name, ())
        if is_whole or qualified in FUNCTIONS.get(name, ()):
            marked.update(inside(function.body))
        else:
            for branch in branches(function.body, ASKS_IN.get(name)):
                marked.update(inside(branch))
    text = source.splitlines()
    found = (Line(one.lineno, last_line(one), text[one.lineno - 1].strip()) for one in marked)
    return sorted(found)


def files() -> list[Path]:
    """Return all files that are looked through."""
    return [*sorted(PACKAGE.rglob("*.py")), SCRIPTS / "gpu_check.py", *CHECKS]


def name_of(path: Path) -> str:
    """Return how a file is called here: by its path in the package, or in the repository."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions and methods of a module by qualified name, but none in a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.If | ast.Try):
            yield from functions(node, prefix)


def inside(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements that do something in a block, those of inner blocks included."""
    for top in body:
        for node in ast.walk(top):
            if isinstance(node, ast.stmt) and not is_idle(node):
                yield node


def is_idle(node: ast.stmt) -> bool:
    """Return whether a statement leaves no instruction: a docstring, a declaration."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    is_declared = isinstance(node, ast.AnnAssign) and node.value is None
    return is_declared or isinstance(node, ast.Global | ast.Nonlocal)


def branches(body: list[ast.stmt], also: str | None) -> Iterator[list[ast.stmt]]:
    """Yield the blocks that a GPU alone reaches. also: what else asks for one, in this module."""
    for index, node in enumerate(body):
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        if isinstance(node, ast.Match):
            for case in node.cases:
                pattern = ast.unparse(case.pattern)
                if asks(pattern, also):
                    yield case.body
                else:
                    yield from branches(case.body, also)
        elif isinstance(node, ast.If) and re.search(ASKS_NOT, ast.unparse(node.test)):
            yield node.orelse
            yield from branches(node.body, also)
            if isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue):
                yield body[index + 1 :]
                return
        elif isinstance(node, ast.If) and asks(ast.unparse(node.test), also):
            yield node.body
            yield from branches(node.orelse, also)
        elif isinstance(node, ast.For) and asks(ast.unparse(node.iter), also):
            yield node.body
        else:
            for block in blocks:
                yield from branches(block, also)


def asks(condition: str, also: str | None) -> bool:
    """Return whether a condition, as `ast` writes it, holds on a GPU alone."""
    return any(re.search(one, condition) for one in (ASKS, also) if one)


def last_line(node: ast.stmt) -> int:
    """Return the last line of a statement, without the blocks inside it."""
    blocks = [getattr(node, name, []) for name in ("body", "cases")]
    starts = [getattr(first, "lineno", None) for block in blocks for first in block[:1]]
    if isinstance(node, ast.Match):
        starts = [node.cases[0].pattern.lineno]
    if starts and starts[0] is not None:
        return max(node.lineno, starts[0] - 1)
    return node.end_lineno or node.lineno


# ---- what tests run


def collect(folder: Path, packages: Path | None) -> None:
    """Run the tests under coverage, and leave its data in a folder. packages: see the option."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(".coverage*"):
        old.unlink()
    configuration = folder / "coverage.ini"
    sources = f"{PACKAGE}, {SCRIPTS}"
    configuration.write_text(CONFIGURATION.format(source=sources, folder=folder))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={configuration}"]
    command += ["-m", "pytest", "-q"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTEST_TIMEOUT": "900",  # coverage makes Triton's interpreter slow
    }
    for tests in RUNS:
        subprocess.run([*command, *tests], cwd=ROOT, env=environment, check=False)
    if packages is not None:
        environment["PYTHONPATH"] += f"{os.pathsep}{packages.resolve()}"
        subprocess.run([*command, *OF_PACKAGES], cwd=ROOT, env=environment, check=False)


def executed(folder: Path) -> "CoverageData":
    """Return what ran in the processes that have left their data in a folder. A process that was
    killed has left a file without any, which a warning names."""
    import coverage  # no other benchmark needs it

    measured = coverage.Coverage(data_file=str(folder / ".coverage"), config_file=False)
    measured.combine([str(folder)], keep=True)
    return measured.get_data()


def not_executed(lines: Iterable[Line], ran: set[int]) -> list[Line]:
    """Return the lines of which no part is among the numbers that ran."""
    return [one for one in lines if ran.isdisjoint(range(one.number, one.last + 1))]


# ---- the page


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, help="report what is in a folder, and run no test")
    parser.add_argument(
        "--packages", type=Path, help="folder with fla-core and liger-kernel, for their tests"
    )
    asked: argparse.Namespace = parser.parse_args()
    folder = asked.data or FOLDER
    if asked.data is None:
        collect(folder, asked.packages)
    ran = executed(folder)
    rows: list[tuple[str, int, int]] = []
    missing: list[str] = []
    for path in files():
        lines = gpu_lines(path)
        if not lines:
            continue
        name = name_of(path)
        left = not_executed(lines, set(ran.lines(str(path)) or ()))
        rows.append((name, len(lines), len(lines) - len(left)))
        missing += [f"    {name}:{one.number}  {one.text}" for one in left]
    total = sum(count for _, count, _ in rows)
    done = sum(count for _, _, count in rows)
    print(f"# Lines that only a GPU runs, and tests run without one, {datetime.date.today()}\n")
    print(f"    {command_line()}\n\n{machine('torch', 'triton', 'coverage')}\n")
    rows.append(("**all**", total, done))
    print(table(("file", "lines", "executed"), rows, numbers=(1, 2)))
    print(f"\nNot executed: {total - done} of {total} lines, {(total - done) / total:.1%}\n")
    print("\n".join(missing))
    write_record(asked.json, {"files": rows, "not_executed": missing})


if __name__ == "__main__":
    main()
