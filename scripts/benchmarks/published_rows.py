"""Rows that others have published about long sequences, with their settings, and how a row is
shown, for published.py.

Every row names its source. What a source leaves out, and is assumed, is said beside the settings.
"""

from dataclasses import dataclass, replace

from hf_flexseq.base.layers import Reach
from hf_flexseq.cost.presets import MODELS
from hf_flexseq.cost.shapes import ExpertShape, ModelShape
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
        head_norms=True,
    ),
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
        head_norms=True,
    ),
)
QWEN3_8B = Model(name="Qwen3-8B", shape=MODELS["qwen3-8b"])
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
        head_norms=True,
    ),
)
QWEN3_30B_A3B = Model(name="Qwen3-30B-A3B", shape=MODELS["qwen3-30b-a3b"])
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
        experts=ExpertShape(24, 32, 4, 19_116_933_120),
    ),
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
TRL_32B = replace(TRL_LARGE, tiles="split")
TRL_FLASH = replace(TRL_STACK, is_flash=True)
TRL_FLASH_ON_DEVICE = replace(TRL_ON_DEVICE, is_flash=True)

# DeepSpeed's ZeRO-3 with bfloat16 weights on the devices, and optimizer and gradients on the host;
# the recipes for one GPU have the weights there, too, and those for an H200 FlashAttention 3.
ALST_PLAIN = Stack(kernels="fused", exchange="ulysses", is_flash=True, parameter_bytes=2.0)
ALST_TILES = replace(ALST_PLAIN, tiles="again")
ALST_INPUTS = replace(ALST_PLAIN, inputs_on_host=True)
ALST_ALL = replace(ALST_PLAIN, inputs_on_host=True, tiles="again")
ALST_ONE = replace(ALST_ALL, exchange="none", parameter_bytes=0.0)
ONE_H200 = Stack(kernels="fused", is_flash=True, parameter_bytes=0.0)
ONE_H200_INPUTS = replace(ONE_H200, inputs_on_host=True)
ONE_H200_ALL = replace(ONE_H200, inputs_on_host=True, tiles="again")

# Frozen weights in 4 bits with their scales, embedding and head in bfloat16.
QLORA = Stack(kernels="fused", inputs_on_host=True, parameter_bytes=0.64, gathers_weights=False)
QLORA_TILES = replace(QLORA, tiles="again")

# ---- rows

CUDNN, FLASH2 = "cuDNN", "FlashAttention 2"
GIB = 1.073741824  # in GB


@dataclass(frozen=True, slots=True)
class Step:
    """A published step of one sequence: its seconds, its bytes, or both."""

    source: str
    model: Model
    stack: Stack
    gpus: int
    tokens: int
    seconds: float | None
    gigabytes: float | None
    """Peak bytes of a device in 1e9."""
    device: str = "H100"
    states_on_host: bool = False
    """True if the optimizer's states are on the host."""
    fits: str = ""
    """The kernel whose share of FLOP/s is fitted on this row; "" for none."""


@dataclass(frozen=True, slots=True)
class Longest:
    """A published longest sequence on H100."""

    source: str
    model: Model
    stack: Stack
    gpus: int
    tokens: int
    with_: str
    """The levers in words."""
    states_on_host: bool = True
    """True if the optimizer's states are on the host."""
    is_at_least: bool = False
    """True if the source says that more fit."""


STEPS = (
    Step(TRL_DRAFT, QWEN3_8B, TRL_STACK, 8, M, 364, 56.2, fits=CUDNN),
    Step(TRL_DRAFT, QWEN3_06B, TRL_ON_DEVICE, 8, M, 137, 27.9),
    Step(TRL_DRAFT, QWEN3_30B_A3B, TRL_LARGE, 8, M, 483, 46.0, states_on_host=True),
    Step(TRL_DRAFT, QWEN3_32B, TRL_32B, 8, M, 1295, 60.8, states_on_host=True),
    Step(TRL_DRAFT, QWEN3_06B, TRL_STACK, 8, 4 * M, 2135, 73.7),
    Step(TRL_DRAFT, QWEN3_8B, TRL_STACK, 16, 2 * M, 696, None),
    Step(TRL_DRAFT, QWEN3_8B, TRL_STACK, 32, 4 * M, 1346, None),
    Step(TRL, QWEN3_8B, TRL_STACK, 8, M, 380, 56.2),
    Step(ACCELERATE, QWEN3_06B, TRL_STACK, 8, M, None, 20.8),
    Step(FLASH, QWEN3_8B, TRL_FLASH, 8, M, 606, None, fits=FLASH2),
    Step(FLASH_4B, QWEN3_4B, TRL_FLASH_ON_DEVICE, 8, M, 582, None),
    Step(RECIPES, LLAMA_8B, ONE_H200, 1, 300_000, None, 134.96 * GIB, "H200", True),
    Step(RECIPES, LLAMA_8B, ONE_H200_INPUTS, 1, 650_000, None, 126.81 * GIB, "H200", True),
    Step(RECIPES, LLAMA_8B, ONE_H200_ALL, 1, 1_200_000, None, 136.15 * GIB, "H200", True),
)

BOTH = "inputs on the host, tiles"
LONGEST = (
    Longest(ALST, LLAMA_8B, ALST_ONE, 1, 500_000, BOTH),
    Longest(ALST, LLAMA_8B, ALST_ALL, 8, 3_700_000, BOTH),
    Longest(ALST, LLAMA_8B, ALST_ALL, 32, 15_000_000, BOTH),
    Longest(RECIPES, LLAMA_8B, ALST_ALL, 16, 8_000_000, BOTH),
    Longest(RECIPES, LLAMA_8B, ALST_INPUTS, 8, 2_400_000, "inputs on the host"),
    Longest(RECIPES, LLAMA_8B, ALST_TILES, 8, 1_200_000, "tiles"),
    Longest(RECIPES, LLAMA_8B, ALST_PLAIN, 8, 1_100_000, "neither"),
    Longest(RECIPES, QWEN3_32B, ALST_ONE, 1, 230_000, BOTH),
    Longest(RECIPES, QWEN3_32B, ALST_ALL, 8, 1_550_000, BOTH),
    Longest(UNSLOTH, GPT_OSS_20B, QLORA, 1, 290_000, "QLoRA, inputs on the host", False),
    Longest(UNSLOTH, GPT_OSS_20B, QLORA_TILES, 1, 500_000, f"QLoRA, {BOTH}", False, True),
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


# ---- what is shown

# Units that the title of a table names.
UNITS_OF_TITLES = ("s", "GB", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table."""

    what: str
    source: str
    unit: str
    published: float
    modelled: float
    planned: float | None
    note: str = ""
    is_fitted: bool = False
    is_at_least: bool = False

    @property
    def error(self) -> float:
        """Modelled over published, less 1."""
        return self.modelled / self.published - 1

    @property
    def counts(self) -> bool:
        """True if the row says something about the model: nothing is fitted on it, and its figure
        is no bound."""
        return not self.is_fitted and not self.is_at_least

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row."""
        digits = 0 if self.published >= 100 else 1 if self.published >= 10 else 2
        planned = "-" if self.planned is None else f"{self.planned:,.{digits}f}"
        error = "fitted" if self.is_fitted else f"{100 * self.error:+.1f} %"
        published = f"{self.published:,.{digits}f}"
        if self.is_at_least:
            error = "holds" if self.error >= 0 else error
            published += " or more"
        return (
            self.what if self.unit in UNITS_OF_TITLES else f"{self.what} ({self.unit})",
            f"[{name_of(self.source)}]({self.source})",
            published,
            f"{self.modelled:,.{digits}f}",
            error,
            planned,
            self.note,
        )


def name_of(source: str) -> str:
    """Return a short name of a source."""
    if "arxiv" in source:
        return "arXiv " + source.rsplit("/", 1)[1]
    if "github.com" in source:
        words = source.split("github.com/")[1].split("/")
        return f"{words[1]} #{words[3]}" if words[2] in ("pull", "issues") else words[1]
    return source.split("//")[1].split("/")[0]
