"""Measured: recurrent layers on one process, beside the same functions of transformers in torch.

    python scripts/benchmarks/scans.py
    python scripts/benchmarks/scans.py --tokens 4096 --rounds 9 --only kda

One CPU process with one thread, one document, float32, forward and backward of what stands between
a layer's projections: the convolution, and the scans of Gated DeltaNet, KDA and Mamba 2. Ours are
the calls that a model makes, with the context of one rank. Runs alternate, and a first round warms
up. Seconds are the processor's. Ratios are those of neighbouring runs, their median, by the wall
clock and by the processor's, in which other work on the machine shows less.

    every ratio at most 0.8

is what the second must show.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import (
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from common import (
    argument_parser,
    load_average,
    machine,
    ratios,
    spread,
    table_head,
    table_row,
    write_record,
)
from hf_flexseq.attention import SequenceContext
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.recurrent import (
    causal_convolution,
    gated_delta_rule,
    kimi_delta_rule,
    mamba2_scan,
)

MOST = 0.8
# theirs writes 64 x 128 numbers for every token and head, several times
MOST_TOKENS = {"kda": 1_024}
CPU = torch.device("cpu")


class Call(NamedTuple):
    """A function of both, and what it is given."""

    shape: str
    inputs: tuple[torch.Tensor, ...]
    ours: Callable[..., torch.Tensor]
    """Of the inputs and a context."""
    theirs: Callable[..., torch.Tensor]
    """Of the inputs alone."""


class Times(NamedTuple):
    """Seconds of one run."""

    wall_s: float
    processor_s: float


# ---- what is called


def delta_call(tokens: int, heads: int, key_heads: int, *, channels: bool) -> Call:
    """Return a gated delta rule, or Kimi's, with heads of 128."""
    q, k = torch.randn(2, tokens, key_heads, 128)
    v = torch.randn(tokens, heads, 128)
    g = -torch.rand(tokens, heads, 128) if channels else -torch.rand(tokens, heads)
    beta = torch.rand(tokens, heads)
    rule = kimi_delta_rule if channels else gated_delta_rule
    function = chunk_kimi_delta_attention if channels else torch_chunk_gated_delta_rule

    def ours(*inputs: torch.Tensor, seq_ctx: SequenceContext) -> torch.Tensor:
        return rule(*inputs, seq_ctx, l2norm=True)

    def theirs(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, g, beta = (x[None] for x in inputs)
        out: torch.Tensor = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        return out[0]

    shape = f"{heads} heads of 128"
    if key_heads < heads:
        shape += f" on {key_heads}"
    return Call(shape, (q, k, v, g, beta), ours, theirs)


def mamba_call(tokens: int) -> Call:
    """Return a scan of 16 heads of 64 with a state of 128."""
    heads = 16
    x, dt = torch.randn(tokens, heads, 64), torch.randn(tokens, heads)
    A, D, dt_bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    B, C = torch.randn(2, tokens, 1, 128)

    def ours(*inputs: torch.Tensor, seq_ctx: SequenceContext) -> torch.Tensor:
        *of_scan, D, dt_bias = inputs
        return mamba2_scan(*of_scan, seq_ctx, D=D, dt_bias=dt_bias, dt_softplus=True)

    def theirs(*inputs: torch.Tensor) -> torch.Tensor:
        x, dt, A, B, C, D, dt_bias = inputs
        of_batch = (x[None], dt[None], A, B[None], C[None])
        out: torch.Tensor = mamba2_chunk_scan(
            *of_batch, chunk_size=64, D=D, dt_bias=dt_bias, dt_softplus=True
        )
        return out[0]

    return Call("16 heads of 64, state of 128", (x, dt, A, B, C, D, dt_bias), ours, theirs)


def convolution_call(tokens: int) -> Call:
    """Return a convolution of width 4 of 3,072 channels."""
    channels = 3_072
    x, weight, bias = (
        torch.randn(tokens, channels),
        torch.randn(channels, 4),
        torch.randn(channels),
    )

    def ours(*inputs: torch.Tensor, seq_ctx: SequenceContext) -> torch.Tensor:
        return causal_convolution(*inputs, seq_ctx)

    def theirs(*inputs: torch.Tensor) -> torch.Tensor:
        x, weight, bias = inputs
        # as layers call it: rows -> channels first -> rows
        out: torch.Tensor = causal_conv1d_fn(
            x[None].transpose(1, 2), weight, bias, activation=None
        )
        return out.transpose(1, 2)[0]

    return Call(f"{channels:,} channels, width 4", (x, weight, bias), ours, theirs)


CALLS: Mapping[str, Callable[[int], Call]] = {
    "convolution": convolution_call,
    "gated delta": lambda tokens: delta_call(tokens, 8, 8, channels=False),
    "gated delta, grouped": lambda tokens: delta_call(tokens, 8, 4, channels=False),
    "kda": lambda tokens: delta_call(tokens, 8, 8, channels=True),
    "mamba2": mamba_call,
}


# ---- measuring


def step(function: Callable[..., torch.Tensor], call: Call, dout: torch.Tensor) -> Times:
    """Return the seconds of one forward and backward."""
    inputs = tuple(x.requires_grad_() for x in call.inputs)
    began_wall = time.perf_counter()
    began_processor = time.process_time()
    out = function(*inputs)
    torch.autograd.grad(out, inputs, dout)
    return Times(time.perf_counter() - began_wall, time.process_time() - began_processor)


def measure(call: Call, tokens: int, rounds: int) -> dict[str, list[Times]]:
    """Return the times of each round; runs alternate, and the first round warms up."""
    group = Group(ranks=(0,), sequences=(0,), strategy="local")
    shard = make_shard(MicroBatch(groups=(group,)), [tokens], 0)
    kernel = choose_kernel(CPU, torch.float32, 64)

    def ours(*inputs: torch.Tensor) -> torch.Tensor:
        seq_ctx = SequenceContext(shard, Communicator(), kernel, CPU)
        return call.ours(*inputs, seq_ctx=seq_ctx)

    with torch.no_grad():
        dout = torch.randn_like(ours(*call.inputs))
    times: dict[str, list[Times]] = {"ours": [], "theirs": []}
    for number in range(rounds + 1):
        for name, function in (("ours", ours), ("theirs", call.theirs)):
            measured = step(function, call, dout)
            if number > 0:
                times[name].append(measured)
    return times


def main() -> None:
    """Measure, print the page, and write the record."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CALLS, default=list(CALLS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine('torch', 'transformers')}; load {load_average()}")
    print(f"{args.rounds} rounds\n")

    columns = (
        "layer",
        "shape",
        "tokens",
        "ours, s",
        "theirs, s",
        "ratio, wall",
        "ratio, processor",
    )
    print(table_head(columns, numbers=(2, 3, 4, 5, 6)))
    figures: dict[str, Any] = {}
    for name in args.only:
        tokens = min(args.tokens, MOST_TOKENS.get(name, args.tokens))
        call = CALLS[name](tokens)
        times = measure(call, tokens, args.rounds)
        figures[name] = {who: [one._asdict() for one in taken] for who, taken in times.items()}
        print(table_row((name, call.shape, f"{tokens:,}", *row_of(times))), flush=True)
    print(f"\nevery ratio must be at most {MOST}")
    write_record(args.json, figures)


def row_of(times: Mapping[str, list[Times]]) -> list[str]:
    """Return medians of both on the processor, and the ratios by both clocks."""
    ours, theirs = times["ours"], times["theirs"]
    cells = [f"{statistics.median(one.processor_s for one in who):.2f}" for who in (ours, theirs)]
    cells.append(spread(ratios((x.wall_s for x in ours), (x.wall_s for x in theirs)), 2))
    cells.append(spread(ratios((x.processor_s for x in ours), (x.processor_s for x in theirs)), 2))
    return cells


if __name__ == "__main__":
    main()
