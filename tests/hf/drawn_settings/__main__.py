"""Run draws again, or many of them, and print their verdicts."""

import argparse
import logging
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.hf.drawn_settings.case import draw
from tests.hf.drawn_settings.reduce import reduced
from tests.hf.drawn_settings.run import judge
from tests.hf.drawn_settings.verdicts import FAILURES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of one draw")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument("--count", type=int, default=300, help="how many")
    parser.add_argument("--reduce", action="store_true", help="also find what makes a draw fail")
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seeds = range(asked.first, asked.first + asked.count)
    if asked.seed is not None:
        seeds = [asked.seed]
        print(draw(asked.seed))
    counts = Counter()
    failed = []

    def show(case, judged):
        counts[judged.verdict.name] += 1
        print(f"{case.seed:5d} {judged.verdict.name:12s} {judged.detail}", flush=True)
        if judged.verdict in FAILURES:
            print(f"      {case}", flush=True)
            failed.append((case, judged))

    with tempfile.TemporaryDirectory() as folder:
        judge([draw(seed) for seed in seeds], Path(folder), show)
    print(", ".join(f"{name}: {count}" for name, count in counts.most_common()))
    for case, judged in failed if asked.reduce else ():
        case, judged = reduced(case, judged)
        print(f"reduced: {case}\n      {judged.verdict.name}: {judged.detail}", flush=True)


if __name__ == "__main__":
    main()
