"""A cost model of a small Llama on H100 GPUs, which prices every strategy on any topology."""

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import DEVICES, ModelShape, analytic_cost_model

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
    return analytic_cost_model(SMALL, DEVICES["H100"], topology)
