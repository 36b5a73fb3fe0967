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
FLEXSP_BANDWIDTHS = ((2, 119.5), (4, 104.1), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87))
FLEXSP_BUDGET_MIB = 28 * 1024


def _flexsp(
    name: str, *, ms: tuple[float, float, float], token_mib: float, shape: tuple[int, int, float]
) -> CostModel:
    """A released FlexSP model. ms: a1, a2, b1 in milliseconds. shape: layers, hidden, billions of
    parameters.

    The release divides MiB by GB/s and reads the result as milliseconds, so its GB/s are 1000
    MiB/s. Its parameters count the learned positions, and so depend on the context: these are the
    384K ones, at 16 bytes a parameter.
    """
    layers, hidden, parameters = shape
    return CostModel(
        name=name,
        attention_s=ms[0] / 1e3,
        linear_s=ms[1] / 1e3,
        micro_batch_s=ms[2] / 1e3,
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
        sharded_state_bytes=parameters * 16 * 1024 * MIB,
        budget_bytes=float(FLEXSP_BUDGET_MIB * MIB),
    )


FLEXSP = (
    _flexsp(
        "flexsp-gpt-7b-a100",
        ms=(5.128e-6, 0.18396, 629.4),
        token_mib=4.480,
        shape=(32, 4096, 7.850),
    ),
    _flexsp(
        "flexsp-gpt-13b-a100",
        ms=(9.2852e-6, 0.30602, 1132.6),
        token_mib=4.220,
        shape=(40, 5120, 14.032),
    ),
    _flexsp(
        "flexsp-gpt-30b-a100",
        ms=(15.4262e-6, 0.80357, 2789.4),
        token_mib=3.417,
        shape=(60, 6656, 32.715),
    ),
)

# 60 % of the dense bf16 peak, NVLink and one NIC per rank, one way: what Zeppelin's clusters A and
# C come to.
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
    """Llama-3.1-8B under FSDP with checkpointing on nodes of eight such devices."""
    cost = analytic_cost_model(LLAMA_8B, device, Topology(nodes=8, ranks_per_node=8), zero_stage=3)
    # Zeppelin's clusters, and its Ulysses hides none
    return replace(cost, name=name, all_to_all_overlap=0.0)


PRESETS = {
    model.name: model
    for model in (*FLEXSP, *(_cluster(name, device) for name, device in CLUSTERS))
}


def load_cost_model(name_or_path: str) -> CostModel:
    """A preset by name, or the cost model in a JSON file. Raises ValueError listing the
    presets."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    if not Path(name_or_path).is_file():
        raise ValueError(
            f"cost_model={name_or_path!r} is neither a file nor one of the presets "
            f"{', '.join(PRESETS)}"
        )
    return CostModel.load(name_or_path)
