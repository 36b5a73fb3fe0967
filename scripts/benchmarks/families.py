"""Families of models against one process: gradients of all, and ten Trainer steps of ten.

    python scripts/benchmarks/families.py --json families.json
    python scripts/benchmarks/families.py --families Gemma3 GptOss --ways subclass

gradients    loss and gradients on two nodes of two ranks that are threads, in float64, under a
             random plan without and one with activation checkpointing, of every family of
             `tests/hf/test_reach.py`: the largest relative error (1e-10 is the bound)
ten steps    the weights after ten steps of SGD on two processes against those of the plain Trainer
             in one, with `FlexSeqTrainer` (subclass), with the callback and with TRL's SFTTrainer
             (sft): the difference over the update (2e-6 is the bound, since the loss is float32).
             zero3 is FlexSeqTrainer with checkpointed layers under DeepSpeed's ZeRO-3, where the
             weights of both sides are float32, too (1e-5, since those of the plain Trainer alone
             differ as much from its float64 ones: Gemma 4's by 1.6e-5)

Windows are of 7 tokens and chunks of 9, below the lengths of up to 60. Exits with 1 where a bound
is broken.
"""

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from common import ROOT, argument_parser, machine, table_head, table_row, write_record

sys.path.append(str(ROOT))
import tests.hf.conftest  # noqa: F401  (lets DeepSpeed compile nothing)
from tests.hf import test_reach as reach
from tests.hf.test_families import WAYS, errors_of_family
from tests.hf.tiny import documents, reference_gradients
from tests.ranks import run_threads

# The families of which ten Trainer steps are taken.
TRAINED = (
    "Gemma2",
    "Gemma3",
    "Gemma4",
    "GptOss",
    "Mistral with a window",
    "Olmo3",
    "Cohere2",
    "Exaone4",
    "Llama4",
    "DeepseekV3",
)
GRADIENTS_BOUND = 1e-10
STEPS_BOUND = 2e-6
FLOAT32_STEPS_BOUND = 1e-5  # of weights in float32


@contextlib.contextmanager
def float64_alone() -> Iterator[None]:
    """Keep in float64 what transformers computes in float32."""
    with pytest.MonkeyPatch.context() as patch:
        reach.keep_float64(patch)
        yield


def gradients_error(family: str) -> float:
    """Return the largest relative error of loss and gradients over ranks and plans."""
    with float64_alone():
        examples = documents(reach.LENGTHS)
        wanted = reference_gradients(reach.make_model(family), examples, attention="eager")
        plans = reach.plans_of(family)
        ranks = reach.TWO_NODES.world_size
        errors = run_threads(reach.errors_of, ranks, family, plans, wanted)
    return max(max(of_rank) for of_rank in errors)


def steps_error(family: str, way: str) -> float:
    """Return the largest error of ten steps over ranks."""
    said = io.StringIO()  # what trainers print at each step
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        return max(errors_of_family(Path(folder), way, family))


def main() -> int:
    """Print a row for each family, and return 1 where a bound is broken."""
    parser = argument_parser(__doc__ or "")
    names = [*reach.FAMILIES, *reach.MORE_FAMILIES]
    parser.add_argument("--families", nargs="+", choices=names, default=names, metavar="FAMILY")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    print(f"on {machine('torch', 'transformers', 'accelerate', 'trl')}\n")
    columns = ("family", "gradients", *asked.ways, "seconds")
    print(table_head(columns, range(1, len(columns))))
    figures: dict[str, Any] = {}
    is_broken = False
    for family in asked.families:
        began = time.perf_counter()
        found = {"gradients": gradients_error(family)}
        is_broken |= not found["gradients"] < GRADIENTS_BOUND
        for way in asked.ways if family in TRAINED else ():
            found[way] = steps_error(family, way)
            bound = FLOAT32_STEPS_BOUND if way == "zero3" else STEPS_BOUND
            is_broken |= not found[way] < bound
        cells = [f"{found[name]:.1e}" if name in found else "" for name in columns[1:-1]]
        print(table_row((family, *cells, f"{time.perf_counter() - began:.0f}")), flush=True)
        figures[family] = found
    write_record(asked.json, figures)
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
