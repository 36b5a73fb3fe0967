"""Figures of devices: FLOP/s, bytes/s, and seconds of their hosts."""

from dataclasses import dataclass, replace

from hf_flexseq.cost.kernels import FLASH_ATTENTION_2, WITH_CUDNN, AttentionKernel

# Seconds of a GPU machine's host. A run fits its own.
#
# * A launch: PyTorch's way from an operation to its kernel, on an H100, 5 to 25 us
#   (https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html). Most of
#   ours are small operations without autograd, which are near its lower end: 8 us.
# * A post: c10d's all-reduce, reduce-scatter and all-gather over NCCL take the host 89, 122 and
#   131 us (https://github.com/pytorch/pytorch/issues/138773); a batch of sends and receives goes
#   the same way: 100 us, which holds the messages of a call, and 30 us until the transfer begins.
# * A layer exchanges heads, or begins and ends a ring, with four posts and eight launches, forward
#   and backward; a step of a ring has two posts and six launches.
EXCHANGE_S = 5.84e-4
RING_STEP_S = 2.48e-4

# Share of a GPU's FLOP/s in training that a chunked scan achieves: 32,768 tokens
# of 64 Gated DeltaNet heads of 128 take an H800 15.56 ms forward and backward
# (https://github.com/fla-org/flash-linear-attention/pull/691). `_scan_flops` of analytic_model.py
# counts 1.16 TFLOP for these. By the same page a quarter of them on each of four ranks takes 5.73
# ms with transfers, 47 % more than the quarter alone; the arithmetic of the second pass is 36 %
# more.
SCAN_EFFICIENCY = 0.17


# Bytes/s between a GPU and pinned memory of its host over PCIe 5.0 with 16 lanes, 64e9 in theory,
# and half of that over PCIe 4.0. A host of eight GPUs has 1 to 2 TiB, of which so many may be
# pinned by each rank.
HOST_RATE = 5e10
HOST_BYTES = 100 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """Achieved figures of one rank's device, below its peak."""

    name: str
    """The device's name."""
    flops: float
    """FLOP/s in training, without attention."""
    attention_flops: float
    """FLOP/s of attention on endless sequences, forward and backward."""
    kernel: AttentionKernel | None = None
    """How attention's time depends on lengths; None where it follows the FLOPs."""
    memory_bytes: float
    """Bytes of memory that one rank can use."""
    memory_rate: float = 2.3e12
    """Bytes/s that kernels move between the device and its memory."""
    scan_efficiency: float = SCAN_EFFICIENCY
    """Share of `flops` in the scans of recurrent layers."""
    intra_bytes: float
    """Bytes/s a rank moves to ranks of its own node."""
    inter_bytes: float
    """Bytes/s a rank moves to ranks of other nodes."""
    layer_s: float
    """Seconds a layer's forward and backward cost besides their arithmetic (launches)."""
    exchange_s: float = EXCHANGE_S
    """Seconds of a layer's exchanges in a group besides their bytes, forward and backward."""
    ring_step_s: float = RING_STEP_S
    """Seconds of each rank of a ring besides, in one layer."""
    overlap: float = 1.0
    """Share of transfers and of the host's work that runs beside arithmetic; 0 for a CPU core."""
    host_rate: float = HOST_RATE
    """Bytes/s between a rank and the memory of its host, each way."""
    host_bytes: float = HOST_BYTES
    """Bytes of that memory which one rank may use."""


# Achieved rates: about 45 % of the dense bf16 peak, 70 % of NVLink one way and of the memory's
# (3.35 TB/s of an H100, 4.8 of an H200, 2.0 and 1.6 of the A100s), one 400 (A100: 200) Gb/s NIC
# per rank.
_H100 = DeviceSpec(
    name="H100",
    flops=4.7e14,
    attention_flops=3.32e14,
    kernel=WITH_CUDNN,
    memory_bytes=79 * 2**30,
    intra_bytes=3e11,
    inter_bytes=4e10,
    layer_s=5e-4,
)
_A100 = replace(
    _H100,
    name="A100-80GB",
    flops=1.4e14,
    attention_flops=1.7e14,
    kernel=FLASH_ATTENTION_2,
    memory_rate=1.4e12,
    intra_bytes=2e11,
    inter_bytes=2e10,
    host_rate=2.5e10,
)
_CPU = DeviceSpec(
    name="CPU",
    flops=3e10,
    attention_flops=3e10,
    memory_bytes=4 * 2**30,
    memory_rate=5e9,
    scan_efficiency=1.0,
    intra_bytes=1e9,
    inter_bytes=1e8,
    layer_s=1e-3,
    exchange_s=1.28e-3,
    ring_step_s=6.6e-4,
    overlap=0.0,
    host_rate=5e9,
    host_bytes=4 * 2**30,
)
DEVICES = {
    "H200": replace(_H100, name="H200", memory_bytes=139 * 2**30, memory_rate=3.4e12),
    "H100": _H100,
    "A100-80GB": _A100,
    "A100-40GB": replace(_A100, name="A100-40GB", memory_bytes=39 * 2**30, memory_rate=1.1e12),
    "CPU": _CPU,
}
