"""Run draws again, or many of them, and print their verdicts."""

import argparse
import logging
from collections import Counter
from dataclasses import replace

import torch

from tests.hf.drawn_settings.case import draw
from tests.hf.drawn_settings.options import ALWAYS
from tests.hf.drawn_settings.run import judge
from tests.hf.drawn_settings.verdicts import FAILURES

KEPT = {name for option in ALWAYS for value in option.values for name in value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of one draw")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument("--count", type=int, default=300, help="how many")
    parser.add_argument("--reduce", action="store_true", help="also find what makes a draw fail")
    parser.add_argument("--sharding", default="", choices=("", "fsdp2", "zero3"))
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seeds = range(asked.first, asked.first + asked.count)
    counts = Counter()
    for seed in seeds if asked.seed is None else [asked.seed]:
        case = replace(draw(seed), sharding=asked.sharding)
        judged = judge(case)
        counts[judged.verdict.name] += 1
        print(f"{seed:5d} {judged.verdict.name:12s} {judged.detail}", flush=True)
        if judged.verdict in FAILURES or asked.seed is not None:
            print(f"      {case}", flush=True)
        if judged.verdict in FAILURES and asked.reduce:
            case, judged = reduced(case, judged)
            print(f"reduced: {case}\n      {judged.verdict.name}: {judged.detail}", flush=True)
    print(", ".join(f"{name}: {count}" for name, count in counts.most_common()))


def reduced(case, judged):
    """Return a case that has the same verdict, with as little as possible, and that verdict."""
    tried = set()
    while True:
        for simpler in simpler_cases(case):
            if str(simpler) in tried:
                continue
            tried.add(str(simpler))
            found = judge(simpler)
            if found.verdict is judged.verdict:
                case, judged = simpler, found
                break
        else:
            return case, judged


def simpler_cases(case):
    """Yield cases with less in them, those first that have far less."""
    always = {name: value for name, value in case.settings.items() if name in KEPT}
    yield replace(case, changes=())
    yield replace(case, settings=always)
    yield replace(case, ours={"lookahead": 0, "max_tokens_per_rank": 64})
    for name in case.changes:
        yield replace(case, changes=tuple(other for other in case.changes if other != name))
    for name in sorted(case.settings.keys() - KEPT):
        left = {other: value for other, value in case.settings.items() if other != name}
        yield replace(case, settings=left)
    plain = {"way": "mixin", "model": "llama", "data": "list", "collator": "right"}
    for name, value in plain.items():
        if getattr(case, name) != "its own":
            yield replace(case, **{name: value})
    without = {name: value for name, value in case.settings.items() if name != "eval_steps"}
    yield replace(case, settings=without | {"eval_strategy": "no"})
    yield replace(case, settings=case.settings | {"gradient_accumulation_steps": 1})


if __name__ == "__main__":
    main()
