"""Rows that others have published about long sequences, with their settings, for published.py.

Every row names its source. What a source leaves out, and is assumed, is said beside the settings.
"""

from dataclasses import dataclass

from hf_flexseq.base.layers import Reach
from hf_flexseq.cost.presets import MODELS
from hf_flexseq.cost.shapes import ModelShape
from peer_bytes import Model, Stack

M = 1 << 20  # tokens


# ---- models, of https://huggingface.co/.../blob/main/config.json
# Parameters are those of transformers' models; a head that is the embedding counts twice.

QWEN3_06B = Model(
    name="Qwen3-0.6B",
    shape=ModelShape(
        layers=28,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab=151936,
        params=596_049_920,
        active_params=751_632_384,
    ),
    has_head_norms=True,
)
QWEN3_4B = Model(
    name="Qwen3-4B",
    shape=ModelShape(
        layers=36,
        hidden=2560,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=9728,
        vocab=151936,
        params=4_022_468_096,
        active_params=4_411_424_256,
    ),
    has_head_norms=True,
)
QWEN3_8B = Model(name="Qwen3-8B", shape=MODELS["qwen3-8b"], has_head_norms=True)
QWEN3_32B = Model(
    name="Qwen3-32B",
    shape=ModelShape(
        layers=64,
        hidden=5120,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=25600,
        vocab=151936,
        params=32_762_123_264,
    ),
    has_head_norms=True,
)
QWEN3_30B_A3B = Model(
    name="Qwen3-30B-A3B", shape=MODELS["qwen3-30b-a3b"], has_head_norms=True, experts=8
)
QWEN25_3B = Model(
    name="Qwen2.5-3B",
    shape=ModelShape(
        layers=36,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=128,
        intermediate=11008,
        vocab=151936,
        params=3_085_938_688,
        active_params=3_397_103_616,
    ),
)
LLAMA_8B = Model(name="Llama-3.1-8B", shape=MODELS["llama-3.1-8b"])
# 4 of 32 experts to a token; every other layer has a window of 128.
GPT_OSS_20B = Model(
    name="gpt-oss-20b",
    shape=ModelShape(
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        intermediate=4 * 2880,
        vocab=201088,
        params=20_914_757_184,
        active_params=4_190_000_000,
        reaches=((12, Reach(window=128)),),
    ),
    experts=4,
)

# ---- sources

TRL_DRAFT = "https://github.com/huggingface/trl/pull/6845"
TRL = "https://github.com/huggingface/trl/pull/6846"
ACCELERATE = "https://github.com/huggingface/accelerate/pull/4175"
FLASH = "https://github.com/huggingface/transformers/pull/48324"
FLASH_4B = "https://github.com/huggingface/accelerate/pull/4184"
ALST = "https://arxiv.org/abs/2506.13996"
RECIPES = "https://github.com/snowflakedb/ArcticTraining/tree/main/projects/sequence-parallelism"
UNSLOTH = "https://docs.unsloth.ai/new/500k-context-length-fine-tuning"
SWIFT = "https://github.com/modelscope/ms-swift/issues/5522"
SWIFT_35 = (
    "https://github.com/modelscope/ms-swift/blob/main/examples/train/sequence_parallel/"
    "sequence_parallel_qwen3_5.sh"
)
FLEXSP = "https://arxiv.org/abs/2412.01523"
ZEPPELIN = "https://arxiv.org/abs/2509.21841"

# ---- settings

# torch's context parallelism under FSDP2 keeps float32 states; keys and values are gathered by
# default. For models from 30B the guide of TRL's draft has states on the host, and "the levers in
# the order you hit them", of which passing keys around is one.
TRL_STACK = Stack(exchange="gather", inputs_on_host=True)
TRL_ON_DEVICE = Stack(exchange="gather")
TRL_LARGE = Stack(exchange="rotate", inputs_on_host=True, parameter_bytes=0.0)
TRL_32B = Stack(exchange="rotate", inputs_on_host=True, parameter_bytes=0.0, tiles="split")
TRL_FLASH = Stack(exchange="gather", inputs_on_host=True, is_flash2=True)
TRL_FLASH_ON_DEVICE = Stack(exchange="gather", is_flash2=True)

# DeepSpeed's ZeRO-3 with bfloat16 weights on the devices, and optimizer and gradients on the host;
# the recipes for one GPU have the weights there, too.
ALST_PLAIN = Stack(kernels="fused", exchange="ulysses", is_flash2=True, parameter_bytes=2.0)
ALST_TILES = Stack(
    kernels="fused", exchange="ulysses", is_flash2=True, parameter_bytes=2.0, tiles="again"
)
ALST_INPUTS = Stack(
    kernels="fused", exchange="ulysses", is_flash2=True, parameter_bytes=2.0, inputs_on_host=True
)
ALST_ALL = Stack(
    kernels="fused",
    exchange="ulysses",
    is_flash2=True,
    parameter_bytes=2.0,
    inputs_on_host=True,
    tiles="again",
)
ALST_ONE = Stack(
    kernels="fused", is_flash2=True, parameter_bytes=0.0, inputs_on_host=True, tiles="again"
)
ALST_H200_PLAIN = Stack(kernels="fused", parameter_bytes=0.0)  # with FlashAttention 3
ALST_H200_INPUTS = Stack(kernels="fused", parameter_bytes=0.0, inputs_on_host=True)
ALST_H200_ALL = Stack(kernels="fused", parameter_bytes=0.0, inputs_on_host=True, tiles="again")

# QLoRA: frozen weights in 4 bits with their scales, embedding and head in bfloat16.
UNSLOTH_STACK = Stack(
    kernels="fused", inputs_on_host=True, parameter_bytes=0.64, gathers_weights=False
)
UNSLOTH_TILES = Stack(
    kernels="fused",
    inputs_on_host=True,
    parameter_bytes=0.64,
    gathers_weights=False,
    tiles="again",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A published step of one sequence: its seconds, its bytes, or both."""

    source: str
    model: Model
    stack: Stack
    gpus: int
    tokens: int
    seconds: float | None = None
    gigabytes: float | None = None
    """Peak bytes of a device in 1e9."""
    device: str = "H100"
    states_on_host: bool = False
    fits: str = ""
    """The kernel whose share of FLOP/s is fitted on this row; "" for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Longest:
    """A published longest sequence."""

    source: str
    model: Model
    stack: Stack
    gpus: int
    tokens: int
    is_at_least: bool = False
    """True if the source says that more fit."""
    states_on_host: bool = True
    """True if the optimizer's states are on the host."""
    with_: str = ""
    """The levers in words."""


CUDNN, FLASH2 = "cuDNN", "FlashAttention 2"

STEPS = (
    Step(
        source=TRL_DRAFT,
        model=QWEN3_8B,
        stack=TRL_STACK,
        gpus=8,
        tokens=M,
        seconds=364,
        gigabytes=56.2,
        fits=CUDNN,
    ),
    Step(
        source=TRL_DRAFT,
        model=QWEN3_06B,
        stack=TRL_ON_DEVICE,
        gpus=8,
        tokens=M,
        seconds=137,
        gigabytes=27.9,
    ),
    Step(
        source=TRL_DRAFT,
        model=QWEN3_30B_A3B,
        stack=TRL_LARGE,
        gpus=8,
        tokens=M,
        seconds=483,
        gigabytes=46.0,
        states_on_host=True,
    ),
    Step(
        source=TRL_DRAFT,
        model=QWEN3_32B,
        stack=TRL_32B,
        gpus=8,
        tokens=M,
        seconds=1295,
        gigabytes=60.8,
        states_on_host=True,
    ),
    Step(
        source=TRL_DRAFT,
        model=QWEN3_06B,
        stack=TRL_STACK,
        gpus=8,
        tokens=4 * M,
        seconds=2135,
        gigabytes=73.7,
    ),
    Step(source=TRL_DRAFT, model=QWEN3_8B, stack=TRL_STACK, gpus=16, tokens=2 * M, seconds=696),
    Step(source=TRL_DRAFT, model=QWEN3_8B, stack=TRL_STACK, gpus=32, tokens=4 * M, seconds=1346),
    Step(
        source=TRL, model=QWEN3_8B, stack=TRL_STACK, gpus=8, tokens=M, seconds=380, gigabytes=56.2
    ),
    Step(source=ACCELERATE, model=QWEN3_06B, stack=TRL_STACK, gpus=8, tokens=M, gigabytes=20.8),
    Step(
        source=FLASH, model=QWEN3_8B, stack=TRL_FLASH, gpus=8, tokens=M, seconds=606, fits=FLASH2
    ),
    Step(
        source=FLASH_4B, model=QWEN3_4B, stack=TRL_FLASH_ON_DEVICE, gpus=8, tokens=M, seconds=582
    ),
    Step(
        source=RECIPES,
        model=LLAMA_8B,
        stack=ALST_H200_PLAIN,
        gpus=1,
        tokens=300_000,
        gigabytes=134.96 * 1.073741824,
        device="H200",
        states_on_host=True,
    ),
    Step(
        source=RECIPES,
        model=LLAMA_8B,
        stack=ALST_H200_INPUTS,
        gpus=1,
        tokens=650_000,
        gigabytes=126.81 * 1.073741824,
        device="H200",
        states_on_host=True,
    ),
    Step(
        source=RECIPES,
        model=LLAMA_8B,
        stack=ALST_H200_ALL,
        gpus=1,
        tokens=1_200_000,
        gigabytes=136.15 * 1.073741824,
        device="H200",
        states_on_host=True,
    ),
)

LONGEST = (
    Longest(
        source=ALST,
        model=LLAMA_8B,
        stack=ALST_ONE,
        gpus=1,
        tokens=500_000,
        with_="inputs on the host, tiles",
    ),
    Longest(
        source=ALST,
        model=LLAMA_8B,
        stack=ALST_ALL,
        gpus=8,
        tokens=3_700_000,
        with_="inputs on the host, tiles",
    ),
    Longest(
        source=ALST,
        model=LLAMA_8B,
        stack=ALST_ALL,
        gpus=32,
        tokens=15_000_000,
        with_="inputs on the host, tiles",
    ),
    Longest(
        source=RECIPES,
        model=LLAMA_8B,
        stack=ALST_ALL,
        gpus=16,
        tokens=8_000_000,
        with_="inputs on the host, tiles",
    ),
    Longest(
        source=RECIPES,
        model=LLAMA_8B,
        stack=ALST_INPUTS,
        gpus=8,
        tokens=2_400_000,
        with_="inputs on the host",
    ),
    Longest(
        source=RECIPES, model=LLAMA_8B, stack=ALST_TILES, gpus=8, tokens=1_200_000, with_="tiles"
    ),
    Longest(source=RECIPES, model=LLAMA_8B, stack=ALST_PLAIN, gpus=8, tokens=1_100_000, with_="-"),
    Longest(
        source=RECIPES,
        model=QWEN3_32B,
        stack=ALST_ONE,
        gpus=1,
        tokens=230_000,
        with_="inputs on the host, tiles",
    ),
    Longest(
        source=RECIPES,
        model=QWEN3_32B,
        stack=ALST_ALL,
        gpus=8,
        tokens=1_550_000,
        with_="inputs on the host, tiles",
    ),
    Longest(
        source=UNSLOTH,
        model=GPT_OSS_20B,
        stack=UNSLOTH_STACK,
        gpus=1,
        tokens=290_000,
        states_on_host=False,
        with_="QLoRA, inputs on the host",
    ),
    Longest(
        source=UNSLOTH,
        model=GPT_OSS_20B,
        stack=UNSLOTH_TILES,
        gpus=1,
        tokens=500_000,
        is_at_least=True,
        states_on_host=False,
        with_="QLoRA, inputs on the host, tiles",
    ),
)

# ms-swift #5522: rows of 9,000 tokens, Qwen2.5-3B with LoRA on 8 GPUs: seconds of the whole run by
# the degree of every row, and GiB of a GPU.
SWIFT_ROW = 9_000
SWIFT_RUNS = {1: (1181, 75.35), 2: (1456, 48.5), 4: (2268, 27.78), 8: (4040, 17.92)}

# Seconds of a step of 512 sequences on 64 A100-40GB, GPT-7B, read off figure 4 of FlexSP, by data
# and context: DeepSpeed's with one degree for all, and FlexSP's.
FLEXSP_STEPS = {"Wikipedia, 192K": (8.0, 4.7), "CommonCrawl, 384K": (26.8, 18.9)}

# Zeppelin's throughput over that of even rings over all ranks, on the mean of its experiments.
ZEPPELIN_GAIN = 2.8
