"""Small cost models for tests."""

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.shapes import ModelShape

SMALL = ModelShape(
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=2,
    head_dim=32,
    intermediate=1024,
    vocab=4096,
    params=6_000_000,
)


def rings(topology: Topology) -> CostModel:
    """A small Llama on H100 GPUs, which has a price for every strategy on any topology."""
    return analytic_cost_model(SMALL, DEVICES["H100"], topology)


def simple_cost(**changes: object) -> CostModel:
    """Links move a byte per second, linear layers take a nanosecond per token, a token takes a
    byte, and nothing else costs anything."""
    constants = {
        "name": "simple",
        "attention_s": 0.0,
        "linear_s": 1e-9,
        "micro_batch_s": 0.0,
        "group_s": 0.0,
        "all_to_all_bytes": 0.0,
        "ring_bytes": 0.0,
        "overlap": 0.0,
        "bandwidths": ((2, 1.0),),
        "heads": None,
        "token_bytes": 1.0,
        "state_bytes": 0.0,
        "sharded_state_bytes": 0.0,
        "budget_bytes": 1e9,
    }
    return CostModel(**constants | changes)
