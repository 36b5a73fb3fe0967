"""GRPO that samples with vLLM's stand-in: the stock trainer's weights and figures on two ranks."""

import json

import datasets
import pytest

from hf_flexseq import FlexSeqArguments
from tests.budget import others_nightly
from tests.hf.objectives import (
    BOUNDS,
    METRICS_BOUND,
    OPTIONS,
    Case,
    difference,
    run_case,
    save_inputs,
)
from tests.hf.test_trainer import logged
from tests.hf.vllm_stand_in import in_place_of_vllm
from tests.ranks import run_ranks

# Two generation batches, the first one of two steps. Some samples are too long for one rank, and
# some ratios of whole samples are above the bound, which leaves these samples out.
SETTINGS = {
    "use_vllm": True,
    "num_iterations": 2,
    "max_completion_length": 16,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 1.0001,
}
CAP = {"max_tokens_per_rank": 20}
CASES = {
    "server": ({"vllm_mode": "server"}, None),
    "server, adapter": ({"vllm_mode": "server", "beta": 0.0}, "retrained"),
    "colocate": ({"vllm_mode": "colocate"}, None),
    "by token": (
        {"vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate"},
        None,
    ),
}


def compare(rank, world_size, folder, name):
    """How far ours is from stock, what each asked of vLLM on this rank, and our log."""
    datasets.disable_progress_bars()
    settings, adapter = CASES[name]
    case = Case(kind="grpo", steps=3, settings=SETTINGS | settings, adapter=adapter)
    options = OPTIONS | CAP | {"plan_trace": str(folder / "trace.jsonl")}
    with in_place_of_vllm(folder / "model", rank) as samplers:
        stock = run_case(case, False, folder)
        ours = run_case(case, True, folder, flexseq_args=FlexSeqArguments(**options))
    calls = [dict(sampler.calls) for sampler in samplers]
    return difference(stock, ours), calls, ours.log


@pytest.mark.processes
@pytest.mark.parametrize("name", others_nightly(list(CASES), tried=["server"]))
def test_two_ranks_train_on_what_vllm_samples_as_the_stock_trainer_does(name, tmp_path):
    save_inputs(tmp_path)
    by_rank = run_ranks(compare, 2, tmp_path, name, seconds=120)
    for rank, (apart, calls, log) in enumerate(by_rank):
        print(f"{name}, rank {rank}: {apart.weights:.1e} of the update, {apart.metrics:.1e}")
        assert apart.weights < BOUNDS["grpo"]
        assert apart.metrics < METRICS_BOUND, apart.metric
        assert not apart.missing
        talks = rank == 0 or "server" not in name  # a server hears the main process alone
        assert [call["loads"] for call in calls] == ([2, 2] if talks else [])
        assert [call["generations"] for call in calls] == ([2, 2] if talks else [])
        lowest = min(logged(log, "sampling/importance_sampling_ratio/min"))
        assert (lowest == 0.0) == (name != "by token")
    plans = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    micro_batches = [one for plan in plans for one in plan["micro_batches"]]
    assert any(len(group["ranks"]) == 2 for one in micro_batches for group in one["groups"])
