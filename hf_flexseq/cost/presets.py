"""Cost models by name.

* Published: the constants FlexSP was released with (arXiv 2412.01523; repository
  PKU-DAIR/Hetu-Galvatron, branch flexsp, galvatron/flexsp_solver/solver.py): GPT-7B, 13B and 30B
  on 64 A100-40GB in 8 nodes, ZeRO-3, Ulysses only.
* Estimated: Llama-3.1-8B on nodes of eight A800 or H200 with a NIC per GPU, kinds of clusters that
  Zeppelin was evaluated on (arXiv 2509.21841, section 5).
"""

from dataclasses import replace
from pathlib import Path

from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic import DeviceSpec, ModelShape, analytic_cost_model
from hf_flexseq.topology import Topology

MIB = 2**20

# (degree, GB/s) as released.
FLEXSP_BANDWIDTHS = ((2, 119.5), (4, 104.1), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87))

# Memory of a rank that the release plans with.
FLEXSP_BUDGET_MIB = 28 * 1024


def _flexsp(
    name: str,
    *,
    attention_ms: float,
    linear_ms: float,
    micro_batch_ms: float,
    token_mib: float,
    layers: int,
    hidden: int,
    billion_parameters: float,
) -> CostModel:
    """Return a released FlexSP model.

    The release divides MiB by GB/s and reads the result as milliseconds, so its GB/s are 1000
    MiB/s. Its parameters count the learned positions, and so depend on the context: these are the
    384K ones, at 16 bytes a parameter.

    attention_ms, linear_ms, micro_batch_ms: a1, a2 and b1. token_mib: activations of a token.
    """
    return CostModel(
        name=name,
        attention_s=attention_ms / 1e3,
        linear_s=linear_ms / 1e3,
        micro_batch_s=micro_batch_ms / 1e3,
        group_s=0.0,  # the release knows no latency
        # 4 tensors, forward and backward, 2 bytes each
        all_to_all_bytes=4 * 2 * layers * hidden * 2.0,
        ring_bytes=None,
        query_bytes=0.0,
        ring_overlap=1.0,
        bandwidths=tuple((degree, speed * 1000 * MIB) for degree, speed in FLEXSP_BANDWIDTHS),
        heads=None,
        token_bytes=token_mib * MIB,
        state_bytes=0.0,
        sharded_state_bytes=billion_parameters * 16 * 1024 * MIB,
        budget_bytes=float(FLEXSP_BUDGET_MIB * MIB),
    )


FLEXSP = (
    _flexsp(
        "flexsp-gpt-7b-a100",
        attention_ms=5.128e-6,
        linear_ms=0.18396,
        micro_batch_ms=629.4,
        token_mib=4.480,
        layers=32,
        hidden=4096,
        billion_parameters=7.850,
    ),
    _flexsp(
        "flexsp-gpt-13b-a100",
        attention_ms=9.2852e-6,
        linear_ms=0.30602,
        micro_batch_ms=1132.6,
        token_mib=4.220,
        layers=40,
        hidden=5120,
        billion_parameters=14.032,
    ),
    _flexsp(
        "flexsp-gpt-30b-a100",
        attention_ms=15.4262e-6,
        linear_ms=0.80357,
        micro_batch_ms=2789.4,
        token_mib=3.417,
        layers=60,
        hidden=6656,
        billion_parameters=32.715,
    ),
)

# (name, device): 60 % of the dense bf16 peak, NVLink and one NIC per rank, one way, as in
# Zeppelin's clusters A and C.
CLUSTERS = (
    (
        "llama-3.1-8b-a800",
        DeviceSpec(
            name="A800",
            flops=1.87e14,
            memory_bytes=79 * 2**30,
            intra_bytes=1.8e11,
            inter_bytes=2.5e10,
            layer_s=5e-4,
        ),
    ),
    (
        "llama-3.1-8b-h200",
        DeviceSpec(
            name="H200",
            flops=5.93e14,
            memory_bytes=139 * 2**30,
            intra_bytes=4e11,
            inter_bytes=4.5e10,
            layer_s=5e-4,
        ),
    ),
)
LLAMA_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    params=8_030_261_248,
)


def _cluster(name: str, device: DeviceSpec) -> CostModel:
    """Return the cost of Llama-3.1-8B under FSDP with checkpointing on nodes of eight such
    devices."""
    topology = Topology(nodes=8, ranks_per_node=8)
    cost = analytic_cost_model(LLAMA_8B, device, topology, zero_stage=3)
    # These are Zeppelin's clusters, and its Ulysses hides none of its transfers.
    return replace(cost, name=name, all_to_all_overlap=0.0)


PRESETS = {model.name: model for model in FLEXSP}
PRESETS |= {name: _cluster(name, device) for name, device in CLUSTERS}


def load_cost_model(name_or_path: str) -> CostModel:
    """Return a preset by its name, or the cost model in a JSON file.

    Raises ValueError, listing the presets, for anything else.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if not Path(name_or_path).is_file():
        raise ValueError(
            f"cost_model={name_or_path!r} is neither a file nor one of the presets "
            f"{', '.join(PRESETS)}"
        )
    return CostModel.load(name_or_path)
