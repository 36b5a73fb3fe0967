"""Experts that transformers spreads over ranks, under plans of groups of any degree: loss and
gradients are those of one process. The wide matrix is `scripts/benchmarks/experts.py`."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_flexseq.hf.model.experts import ExpertRanks, expert_ranks
from tests.hf.test_reach import make_model
from tests.ranks import run_cases

# (ep_size, efsdp_size, replicas) by what `DistributedConfig` is given, on four ranks.
LAYOUTS = {
    (4, 1, 1): {"fsdp_size": 4, "ep_size": 4},
    (2, 2, 1): {"fsdp_size": 4, "ep_size": 2},
    (2, 1, 2): {"fsdp_size": 2, "ep_size": 2, "dp_replicate_size": 2},
}


def spread(folder, **config):
    """A model that was saved in `folder`, sharded at load."""
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        experts_implementation="eager",
        distributed_config=DistributedConfig(**config),
    ).train()


def ranks_of(rank, world_size, folder, config):
    return expert_ranks(spread(folder, **config))


@pytest.mark.processes
def test_a_model_tells_how_its_experts_lie_over_the_ranks(tmp_path):
    make_model("Qwen3Moe").save_pretrained(tmp_path)
    cases = [(tmp_path, config) for config in (*LAYOUTS.values(), {"fsdp_size": 4})]
    *by_layout, without = run_cases(ranks_of, 4, cases)
    for (ep_size, efsdp_size, replicas), by_rank in zip(LAYOUTS, by_layout, strict=True):
        sizes = {"ep_size": ep_size, "efsdp_size": efsdp_size, "replicas": replicas}
        assert by_rank == [ExpertRanks(experts=4, top_k=2, **sizes)] * 4
    assert without == [None] * 4
    assert expert_ranks(make_model("Qwen3Moe")) is None
