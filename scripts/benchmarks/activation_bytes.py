"""Counted: bytes of activations, against those that the memory model says for each choice.

    python scripts/benchmarks/activation_bytes.py
    python scripts/benchmarks/activation_bytes.py --only true

tiny    Six small models take optimizer steps on this CPU, each with one choice for activations.
        torch's profiler notes what is allocated and freed between the start of a forward and the
        end of its backward. The peak with three times the tokens, less the peak, is what those
        tokens take; gradients of weights and buffers of one size drop out. Pages of the host store
        are there from the step before, and do not count as bytes of the device. Of two steps the
        larger peak counts, for the profiler may miss an event.
true    Models of true sizes run forward and backward whole, all layers, on tensors without
        memory. Storages that grow with the tokens are counted while they live.

The model has counted one layer of each kind, without any choice (`hf/calibration/layer_trial.py`).
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from common import argument_parser, machine, table, write_record
from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqEngine
from hf_flexseq.attention import SequenceContext
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.devices import HOST_BYTES, HOST_RATE
from hf_flexseq.hf.attachments import on_micro_batches
from hf_flexseq.hf.calibration import layer_trial
from hf_flexseq.hf.model.layer_memory import LayerMemory
from hf_flexseq.hf.model.loss import attach_chunked_loss
from hf_flexseq.hf.model.rehearsal import Rehearsal, fake_copy
from hf_flexseq.hf.tiles import MlpTiles
from hf_flexseq.memory.live_bytes import LiveBytes, stand_in_sum
from hf_flexseq.memory.store import HostStore
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.memory import MemoryChoice

TILES = 8
FEW_TOKENS = 1024
MEASURED = 2  # steps
MORE = 3  # times as many tokens in the larger micro-batch
VOCAB = 64

Model = tuple[str, str, dict[str, Any]]  # class, configuration's class, its values


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one token took, and what the model says."""

    model: str
    choice: str
    counted: float
    modelled: float

    @property
    def error(self) -> float:
        """Modelled over counted, less 1."""
        return self.modelled / self.counted - 1


def choices_of(layers: int, *, tiled: bool, host: bool = True) -> dict[str, MemoryChoice]:
    """Return the kinds of choices for a model, by name."""
    every = {"recomputed_layers": layers}
    found = {
        "nothing recomputed": MemoryChoice(),
        "half recomputed": MemoryChoice(recomputed_layers=layers // 2),
        "all recomputed": MemoryChoice(**every),
        "attention recomputed, too": MemoryChoice(**every, outputs_recomputed=layers),
    }
    if host:
        found["inputs on the host"] = MemoryChoice(**every, inputs_on_host=layers)
        found["all on the host"] = MemoryChoice(
            **every, inputs_on_host=layers, outputs_on_host=layers
        )
    if tiled:
        found["all recomputed, tiles"] = MemoryChoice(**every, mlp_tiles=TILES)
        found["nothing recomputed, tiles"] = MemoryChoice(mlp_tiles=TILES)
    return found


def made(model: Model) -> transformers.PreTrainedModel:
    """Return a model of a class and a configuration."""
    kind, config, values = model
    torch.manual_seed(0)
    built = getattr(transformers, kind)(getattr(transformers, config)(**values))
    return built.train()


def activations_of(model: transformers.PreTrainedModel, dtype: torch.dtype) -> Activations:
    """Return what the trial has counted of a model."""
    counted = layer_trial.count_bytes(model, dtype=dtype)
    assert counted is not None, "its layers can be tried"
    return Activations(
        kinds=counted.kinds,
        order=counted.order,
        base_bytes=counted.base_bytes,
        head_bytes=counted.head_bytes,
        mlp_share=float(counted.mlp_params > 0),
        linear_passes=3.0,
        out_rate=HOST_RATE,
        back_rate=HOST_RATE,
        host_bytes=HOST_BYTES,
        as_set=MemoryChoice(),
    )


# ---- small models, in real steps

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "head_dim": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TINY: dict[str, Model] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "Gemma 3 (windows, four norms)": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**SIZES, "sliding_window": 64},
    ),
    "gpt-oss (sinks, experts)": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
    ),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**SIZES, **EXPERTS, "num_experts": 4},
    ),
    "Qwen3.5 (Gated DeltaNet)": (
        "Qwen3_5ForCausalLM",
        "Qwen3_5TextConfig",
        {**SIZES, **GATED_DELTA},
    ),
    "Bamba (Mamba 2)": (
        "BambaForCausalLM",
        "BambaConfig",
        {
            **{name: value for name, value in SIZES.items() if name != "head_dim"},
            "attn_layer_indices": [2, 5],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
        },
    ),
}


@contextmanager
def always(choice: MemoryChoice) -> Iterator[None]:
    """Let all sequences of a step make one micro-batch with this choice inside the block."""
    original = FlexSeqEngine.dispatch

    def dispatch(self: Any, planned: Any) -> Any:
        everything = tuple(range(len(planned.plan.lengths)))
        group = Group(ranks=(0,), sequences=everything, strategy="local")
        batch = MicroBatch(groups=(group,), memory=choice)
        plan = replace(planned.plan, micro_batches=(batch,))
        return original(self, replace(planned, plan=plan))

    FlexSeqEngine.dispatch = dispatch  # type: ignore[method-assign]
    try:
        yield
    finally:
        FlexSeqEngine.dispatch = original  # type: ignore[method-assign]


def peak_of(run: Callable[[], Any]) -> int:
    """Return the most bytes that lived at once of those that a run has allocated."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    live, most = 0, 0
    for _, nbytes in sorted(events, key=lambda one: one[0]):
        live += nbytes
        most = max(most, live)
    return most


def rows_of(tokens: int) -> list[dict[str, Any]]:
    """Return a batch of two sequences, which do not begin alike."""
    rows = []
    for first, length in enumerate((tokens - tokens // 3, tokens // 3)):
        ids = [(first + token) % VOCAB for token in range(length)]
        rows.append({"input_ids": ids, "labels": ids})
    return rows


def peaks_of_steps(model: Model, choice: MemoryChoice) -> list[int]:
    """Return the peaks of a step on few tokens, and on more."""
    peaks = []
    for tokens in (FEW_TOKENS, MORE * FEW_TOKENS):
        accelerator = Accelerator(cpu=True)
        arguments = FlexSeqArguments(
            cost_model="estimate", lookahead=0, max_tokens_per_rank=tokens, host_memory_gib=8.0
        )
        engine = FlexSeqEngine(accelerator, arguments)
        network = made(model)
        batch = DataCollatorForFlexSeq()(rows_of(tokens))
        with always(choice), engine.attached(network):
            steps = engine.steps([batch] * (1 + MEASURED))
            next(steps).backward(network)  # makes the pages of the host, and more
            of_steps = []
            for step in steps:
                network.zero_grad()
                of_steps.append(peak_of(partial(step.backward, network)))
            peaks.append(max(of_steps))
    return peaks


def tiny_rows() -> Iterator[Row]:
    """Yield a row for each small model and choice."""
    for name, model in TINY.items():
        activations = activations_of(made(model), torch.float32)
        tiled = activations.mlp_share > 0
        for words, choice in choices_of(activations.layers, tiled=tiled).items():
            few, many = peaks_of_steps(model, choice)
            counted = (many - few) / ((MORE - 1) * FEW_TOKENS)
            yield Row(
                model=name,
                choice=words,
                counted=counted,
                modelled=activations.token_bytes(choice),
            )


# ---- models of true sizes, on tensors without memory

DENSE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
TRUE: dict[str, Model] = {
    "Llama-3.1-8B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**DENSE, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    ),
    "Qwen3-8B": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            **DENSE,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
    "Qwen3.5-35B-A3B": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 248320,
        },
    ),
}


def peak_of_whole(model: transformers.PreTrainedModel, choice: MemoryChoice) -> float:
    """Return the most bytes of a token in forward and backward of a model, all layers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    rehearsal = Rehearsal(fake_copy(model, torch.bfloat16, mode), mode)
    trial = layer_trial.LayerTrial(rehearsal, None, skips=False)
    network = trial.model
    attach_chunked_loss(network, stand_in_sum)
    layers = LayerMemory(
        network, save_attention_output=True, make_store=lambda: HostStore(torch.device("cpu"), 1)
    )
    for layer in layers.layers:
        layer._gradient_checkpointing_func = partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False
        )
    tiles = MlpTiles(network)
    if choice.mlp_tiles > 1:
        tiles.attach()
    with on_micro_batches(network), layers.attached(), mode:
        inputs = trial.inputs()
        context: SequenceContext = inputs["seq_ctx"]
        context.memory = choice
        context.kept = layer_trial.KeptInTrials()
        tracker = LiveBytes(trial.factor)
        tokens = context.tokens
        with tracker:
            outputs = network(**inputs, use_cache=False, num_items_in_batch=tokens)
            outputs.loss.backward()
    tiles.detach()
    return tracker.take_peak() / tokens


def true_rows() -> Iterator[Row]:
    """Yield a row for each model of true size and choice."""
    for name, (kind, config, values) in TRUE.items():
        with torch.device("meta"):
            model = made((kind, config, values)).to(torch.bfloat16)
        activations = activations_of(model, torch.bfloat16)
        tiled = activations.mlp_share > 0
        for words, choice in choices_of(activations.layers, tiled=tiled, host=False).items():
            yield Row(
                model=name,
                choice=words,
                counted=peak_of_whole(model, choice),
                modelled=activations.token_bytes(choice),
            )


# ---- the page


def page(rows: list[Row]) -> str:
    """Return the table of some rows."""
    columns = ("model", "choice", "counted KiB", "modelled KiB", "error")
    cells = []
    for row in rows:
        kib = (row.counted / 1024, row.modelled / 1024)
        cells.append((row.model, row.choice, *map("{:.1f}".format, kib), f"{row.error:+.1%}"))
    return table(columns, cells, numbers=(2, 3, 4))


def main() -> None:
    """Print the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", choices=("tiny", "true"), help="one half of the page")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("# Bytes of activations of one token\n")
    print(machine("torch", "transformers"))
    found = {}
    for part, make in (("tiny", tiny_rows), ("true", true_rows)):
        if options.only in (None, part):
            began = time.perf_counter()
            rows = list(make())
            worst = max(rows, key=lambda row: abs(row.error))
            print(f"\n## {part.capitalize()} models\n")
            print(page(rows))
            print(f"\nAt most {abs(worst.error):.1%} apart: {worst.model}, {worst.choice}.")
            print(f"{time.perf_counter() - began:.0f} s.")
            found[part] = [asdict(row) for row in rows]
    write_record(options.json, found)


if __name__ == "__main__":
    main()
