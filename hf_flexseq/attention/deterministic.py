"""The price of deterministic attention, measured on one rank; `program/deterministic.py` says what
it does, `block_pairs.py` computes it."""

import time
from typing import NamedTuple

import torch

from hf_flexseq.attention.context import SequenceContext
from hf_flexseq.attention.function import sequence_parallel_attention
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.kernels import Kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard

SLOWDOWN_RUNS = 3  # times that `slowdown` measures each attention
SLOWDOWN_FIRST_TOKENS = 1024  # length that `slowdown` begins with
SLOWDOWN_SECONDS = 1.0  # that `slowdown` spends on its last length, about


class Slowdown(NamedTuple):
    """What deterministic attention costs on one rank."""

    tokens: int  # of the sequence that was measured
    factor: float  # how many times as long it takes as one kernel call


def slowdown(
    longest: int, q: torch.Tensor, k: torch.Tensor, communicator: Communicator, kernel: Kernel
) -> Slowdown:
    """Measure how many times as long deterministic attention takes as one kernel call.

    The sequence has `longest` tokens, or the largest power of two of them that is measured in
    about `SLOWDOWN_SECONDS`. This rank has it alone; where ranks share one, each pair of blocks of
    two ranks is computed twice in the backward.

    q: [1, heads, head_dim] and k: [1, kv_heads, head_dim], one token.
    """
    tokens = min(longest, SLOWDOWN_FIRST_TOKENS)
    while True:
        usual_s, deterministic_s = _seconds_of_both(tokens, q, k, communicator, kernel)
        # twice the tokens have four times the pairs
        next_s = 4 * SLOWDOWN_RUNS * (usual_s + deterministic_s)
        if tokens == longest or next_s > SLOWDOWN_SECONDS:
            return Slowdown(tokens, deterministic_s / usual_s)
        tokens = min(2 * tokens, longest)


def _seconds_of_both(
    tokens: int, q: torch.Tensor, k: torch.Tensor, communicator: Communicator, kernel: Kernel
) -> tuple[float, float]:
    """Measure the seconds of one kernel call, and those of deterministic attention.

    q: [1, heads, head_dim] and k: [1, kv_heads, head_dim], each token of the sequence.
    """
    group = Group(ranks=(communicator.rank,), sequences=(0,), strategy="local")
    shard = make_shard(MicroBatch(groups=(group,)), [tokens], communicator.rank)
    q = q.repeat(tokens, 1, 1)  # [1, heads, head_dim] -> [tokens, heads, head_dim]
    k = k.repeat(tokens, 1, 1)
    usual = SequenceContext(shard, communicator, kernel, q.device)
    deterministic = SequenceContext(shard, communicator, kernel, q.device, deterministic=True)
    return _seconds(usual, q, k), _seconds(deterministic, q, k)


def _seconds(seq_ctx: SequenceContext, q: torch.Tensor, k: torch.Tensor) -> float:
    """Measure the seconds of a forward and a backward: the least of a few runs, for others may be
    at work on the machine. q: [tokens, heads, head_dim]. k: [tokens, kv_heads, head_dim]."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, k.clone()))
    least = float("inf")
    for _ in range(SLOWDOWN_RUNS):
        start = time.perf_counter()
        with torch.enable_grad():  # the first step may be one of an evaluation
            out = sequence_parallel_attention(q, k, v, seq_ctx, scale=1.0)
        torch.autograd.grad(out, (q, k, v), out.detach())
        if q.is_cuda:
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - start)
    return least
