"""Families of models: ten Trainer steps against those of the plain Trainer.

    python scripts/benchmarks/families.py --json families.json
    python scripts/benchmarks/families.py --families Gemma3 GptOss --ways subclass
    python scripts/benchmarks/families.py --hybrids         models with recurrent layers

Weights after ten steps of SGD on two processes are compared with those of the plain Trainer in
one, with `FlexSeqTrainer` (subclass), with the callback and with TRL's SFTTrainer (sft): the
difference over the update. 2e-6 is the bound, since the loss is float32. zero3 is FlexSeqTrainer
with checkpointed layers under DeepSpeed's ZeRO-3, where the weights of both sides are float32:
1e-5 is the bound, since those of the plain Trainer alone differ as much from its float64 ones.

With --hybrids these are the families of `tests/hf/hybrids.py`. transformers computes their scans
in float32, whatever the dtype of the model. If its own ten steps with float64 scans are further
from those than the bound, at most three times that distance is allowed: `float32 scans`. Models
with experts, whose calls DeepSpeed would have to see alike on all ranks, leave out zero3.

Gradients of all families are compared by `pytest -m nightly tests/hf`. Exits with 1 if a bound is
broken.
"""

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from common import ROOT, argument_parser, machine, table_head, table_row, write_record

sys.path.append(str(ROOT))
import tests.hf.conftest  # noqa: F401  (lets DeepSpeed compile nothing)
from hf_flexseq.hf.model.recurrent import mixers
from tests import budget
from tests.hf import hybrids
from tests.hf import test_reach as reach
from tests.hf.test_families import WAYS, errors_of_family, model_of, plain_family
from tests.hf.test_trainer import update_error

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
STEPS_BOUND = 2e-6
FLOAT32_STEPS_BOUND = 1e-5  # of weights in float32


def calls_experts_alone(family: str) -> bool:
    """Tell whether a hybrid has experts that are called one by one, each with a module that
    DeepSpeed follows: ranks whose tokens choose others would wait for each other in ZeRO-3."""
    modules = hybrids.make_hybrid(family).modules()
    return any(type(module).__name__.endswith("Experts") for module in modules)


def steps_error(family: str, way: str) -> tuple[float, float]:
    """Return the largest error of ten steps over ranks, and for a hybrid how far float32 in its
    scans alone takes the plain Trainer's, else 0."""
    said = io.StringIO()  # what trainers print at each step
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(said):
        folder = Path(name)
        plain = plain_family(folder, way, family)
        of_scans = 0.0
        if family not in reach.FAMILIES:
            of_scans = error_of_float32_scans(folder, way, family, plain)
        return max(errors_of_family(folder, way, family, plain)), of_scans


def error_of_float32_scans(folder: Path, way: str, family: str, plain: Any) -> float:
    """Return how far ten steps of the plain Trainer are from those with recurrent scans in
    float64: what rounding to float32 in them makes.

    plain: what `plain_family` returned.
    """
    with pytest.MonkeyPatch.context() as patch:
        for mixer in mixers(model_of(way, family)):
            for scope, name in mixer.functions:
                patch.setitem(scope, name, in_float64(scope[name]))
        _, found, _ = plain_family(folder, way, family)
    before, wanted, _ = plain
    return update_error(before, wanted, found)


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` without its casts to float32, on inputs in float64; results have the dtype
    of the first input."""

    def wide(value: Any) -> Any:
        is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_tensor else value

    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        named = {name: wide(value) for name, value in kwargs.items()}
        with pytest.MonkeyPatch.context() as patch:
            reach.keep_float64(patch)
            out = function(wide(first), *map(wide, args), **named)
        if isinstance(out, tuple):
            return out[0].to(first.dtype), *out[1:]
        return out if out is None else out.to(first.dtype)

    return call


def main() -> int:
    """Print a row for each family, and return 1 where a bound is broken."""
    budget.trainer_steps = 10
    parser = argument_parser(__doc__ or "")
    attending = list(reach.FAMILIES)
    recurrent = list(hybrids.HYBRIDS)
    names = [*attending, *recurrent]
    parser.add_argument("--families", nargs="+", choices=names, metavar="FAMILY")
    parser.add_argument("--hybrids", action="store_true", help="those with recurrent layers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    print(f"on {machine('torch', 'transformers', 'accelerate', 'trl')}\n")
    columns = ("family", *asked.ways, "float32 scans", "seconds")
    print(table_head(columns, range(1, len(columns))))
    figures: dict[str, Any] = {}
    is_broken = False
    for family in asked.families or (recurrent if asked.hybrids else TRAINED):
        began = time.perf_counter()
        is_hybrid = family in recurrent
        found: dict[str, float] = {}
        for way in asked.ways:
            if way == "zero3" and is_hybrid and calls_experts_alone(family):
                continue
            found[way], of_scans = steps_error(family, way)
            bound = FLOAT32_STEPS_BOUND if way == "zero3" else STEPS_BOUND
            is_broken |= not found[way] < max(bound, 3 * of_scans)
            if is_hybrid:
                found["float32 scans"] = max(of_scans, found.get("float32 scans", 0.0))
        cells = [f"{found[name]:.1e}" if name in found else "" for name in columns[1:-1]]
        print(table_row((family, *cells, f"{time.perf_counter() - began:.0f}")), flush=True)
        figures[family] = found
    write_record(asked.json, figures)
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
