"""TRL's and transformers' own tests with the Trainer exchanged for its FlexSeq variant.

    python scripts/benchmarks/dropin.py --trl FOLDER --transformers FOLDER

FOLDER holds the sources of the library at a version near the installed one: the wheels do not have
the tests, and nothing is downloaded here. Without a folder its tests are left out.

    git clone --depth 1 --branch vX.Y.Z https://github.com/huggingface/trl FOLDER

Each set of tests runs with the stock classes first. What does not pass then (because it needs the
Hub, an accelerator, another package or another version) does not count. The rest runs again with
`Trainer` and TRL's trainers exchanged (see exchange/plugin.py): a test passes, is refused by
hf_flexseq in one line, or fails. Tests that make no trainer of those classes are left out.

Names of models and datasets are folders that exchange/hub.py makes; models with
images are none of them: `tests/hf/test_vision_trl.py` trains those.
With two processes every test runs on two ranks over gloo.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from common import HERE, ROOT, argument_parser, machine, table, write_record

# The files of each library's tests that train with the class that is exchanged.
SUITES = {
    "trl": (
        "tests/test_sft_trainer.py",
        "tests/test_dpo_trainer.py",
        "tests/test_kto_trainer.py",
        "tests/test_reward_trainer.py",
        "tests/test_grpo_trainer.py",
        "tests/test_rloo_trainer.py",
    ),
    "transformers": (
        "tests/trainer/test_trainer.py",
        "tests/trainer/test_trainer_data.py",
        "tests/trainer/test_trainer_checkpointing.py",
        "tests/trainer/test_trainer_evaluation.py",
        "tests/trainer/test_trainer_callback.py",
        "tests/trainer/test_trainer_optimizers.py",
    ),
}
Outcomes = list[dict[str, Any]]  # test, outcome, why and seconds of each

MAKE_HUB = "import pathlib, sys; from exchange.hub import make_hub; make_hub(pathlib.Path())"


def environment(scratch: Path) -> dict[str, str]:
    """Return the variables of all processes: one thread each, no Hub, caches that go away."""
    return os.environ | {
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def make_hub(scratch: Path) -> Path:
    """Return the folder that stands for the Hub."""
    hub = scratch / "hub"
    hub.mkdir()
    command = [sys.executable, "-c", MAKE_HUB]
    subprocess.run(command, cwd=hub, env=environment(scratch), check=True)
    return hub


def run_tests(
    sources: Path,
    files: tuple[str, ...],
    asked: argparse.Namespace,
    ranks: int,
    scratch: Path,
    *,
    exchange: bool,
    tests: list[str] | None,
) -> Outcomes:
    """Run tests, with the class exchanged or not, and return what became of each.

    tests: their names; None runs all.
    """
    outcomes = scratch / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-p", "exchange.plugin", "-p", "no:cacheprovider"),
        *("--rootdir", str(sources), "-q", "--ranks", str(ranks), "--outcomes", str(outcomes)),
    ]
    if asked.only:
        command += ["-k", asked.only]
    if exchange:
        command.append("--exchange")
    if tests is not None:
        names = scratch / "tests.txt"
        names.write_text("\n".join(tests))
        command += ["--tests", str(names)]
    found = [str(sources / file) for file in files if (sources / file).is_file()]
    with (scratch / "log.txt").open("a") as log:
        subprocess.run(
            [*command, *found],
            cwd=scratch / "hub",
            env=environment(scratch),
            stdout=log,
            stderr=log,
            check=False,
        )
    if not outcomes.is_file():
        raise SystemExit(f"no test of {sources} ran:\n{(scratch / 'log.txt').read_text()[-3000:]}")
    return [json.loads(line) for line in outcomes.read_text().splitlines()]


def drop_in(
    name: str, sources: Path, asked: argparse.Namespace, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Yield what became of a library's tests with the exchanged class, by number of processes.

    Only what passes with the stock class on as many processes runs with the exchanged one.
    """
    passing: list[str] | None = None  # with the stock class; None: not known yet
    for ranks in sorted(asked.ranks):
        run = partial(run_tests, sources, SUITES[name], asked, ranks, scratch)
        stock = run(exchange=False, tests=passing)
        passing = [found["test"] for found in stock if found["outcome"] == "passed"]
        ours = run(exchange=True, tests=passing) if passing else []
        kinds = Counter(found["outcome"] for found in stock)
        left_out = [found for found in stock if found["outcome"] != "passed"]
        yield {
            "library": name,
            "ranks": ranks,
            "stock": kinds,
            "left_out": left_out,
            "ours": ours,
        }


# ---- the page


def reason(why: str) -> str:
    """Return a refusal without the names and numbers of one test."""
    said = why.partition(": ")[2]  # without the kind of the error
    said = re.sub(r"^\w+(ForCausalLM|Model|For\w+): ", "", said)
    said = re.sub(r"example \d+", "an example", said)
    return re.split(r"[:;]", said)[0][:100]


def page(results: list[dict[str, Any]]) -> str:
    """Return the tables: counts by file, refusals by reason, failures by name, and why tests do
    not pass with stock."""
    counts: list[tuple[Any, ...]] = []
    refusals: Counter[tuple[Any, ...]] = Counter()
    failures: list[tuple[Any, ...]] = []
    left_out: Counter[tuple[Any, ...]] = Counter()
    for result in results:
        where = (result["library"], result["ranks"])
        used = [found for found in result["ours"] if found["outcome"] != "unused"]
        by_file: dict[str, Counter[str]] = {}
        for found in used:
            of_file = by_file.setdefault(file_of(found["test"]), Counter())
            is_known = found["outcome"] in ("passed", "refused")
            of_file[found["outcome"] if is_known else "failed"] += 1
            if found["outcome"] == "refused":
                refusals[(*where, reason(found["why"]))] += 1
            elif not is_known:
                failures.append((*where, found["test"], found["why"].replace("|", "/")))
        for file, kinds in by_file.items():
            numbers = (kinds["passed"], kinds["refused"], kinds["failed"])
            counts.append((*where, file, kinds.total(), *numbers))
        for found in result["left_out"]:
            why = reason(found["why"]).replace("|", "/")
            left_out[(*where, found["outcome"], why)] += 1
    columns = ("library", "processes")
    parts = [
        table(
            (*columns, "file", "pass with stock", "pass", "refused", "failed"),
            counts,
            (1, *range(3, 7)),
        ),
        table((*columns, "refused because", "tests"), counted(refusals), (1, 3)),
        table((*columns, "failed", "why"), failures, (1,)),
        table((*columns, "with stock", "why", "tests"), counted(left_out), (1, 4)),
    ]
    return "\n\n".join(parts)


def file_of(test: str) -> str:
    """Return the name of the file that a test is in."""
    return Path(test.partition("::")[0]).name


def counted(found: Counter[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return rows of a table, the most frequent first, with their numbers."""
    return [(*key, number) for key, number in found.most_common()]


def main() -> None:
    """Run both libraries' tests with one and with two processes."""
    parser = argument_parser(__doc__)
    for name in SUITES:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"sources of {name}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes per test")
    parser.add_argument("--only", metavar="EXPRESSION", help="tests to run, as for pytest -k")
    asked = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name in SUITES:
            sources = getattr(asked, name)
            if sources is None:
                print(f"{name}: left out; --{name} FOLDER names its sources")
                continue
            if not (scratch / "hub").exists():
                make_hub(scratch)
            print(f"{name} {metadata.version(name)} is installed, tests from {sources.name}")
            results += drop_in(name, sources.resolve(), asked, scratch)
    if results:
        print(f"{machine('torch', 'transformers', 'trl')}\n\n{page(results)}")
    write_record(asked.json, results)


if __name__ == "__main__":
    main()
