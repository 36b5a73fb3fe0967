"""Attention layers on ranks against dense softmax attention of every row by itself, in float64."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.registry import STRATEGIES
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.plan.units import Unit
from tests.attention.dense import dense_attention
from tests.attention.group import (
    forward_backward,
    largest_error,
    nodes_of,
    own_rows,
    qkv_and_dout,
)
from tests.device import DEVICE, own_kernel
from tests.plans import path_tokens
from tests.ranks import join

SIZE = 8  # of a query head
SCALE = 0.3
SHARED = [name for name in STRATEGIES if name != "local"]

KINDS = {  # (reach, has sinks, softcap, size of a value head)
    "full": (FULL, False, None, SIZE),
    "window of one": (Reach(window=1), False, None, SIZE),
    "window with sinks": (Reach(window=13), True, None, SIZE),
    "wide window with a softcap": (Reach(window=30), False, 2.0, SIZE),
    "chunk of one": (Reach(chunk=1), False, None, SIZE),
    "large chunk with sinks": (Reach(chunk=29), True, None, SIZE),
    "sinks with a softcap": (FULL, True, 1.5, SIZE),
    "small values": (FULL, False, None, 5),
    "large values in a window": (Reach(window=4), True, None, 11),
}


class Case(NamedTuple):
    """Layers that attend to some sequences."""

    kind: str
    """One of `KINDS`."""
    heads: tuple[int, int]
    """Of queries, and of keys and values."""
    lengths: tuple[int, ...]
    """Tokens by sequence; of rows inside of a unit 0."""
    units: tuple[Unit, ...] = ()
    blocks: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] | None = None
    """(sequence, its blocks) of layers whose tokens of blocks see each other both ways; None of
    causal layers."""


def group_of(case: Case, ranks, strategy: str) -> MicroBatch:
    """All sequences in one group."""
    planned = tuple(sequence for sequence, length in enumerate(case.lengths) if length)
    group = Group(ranks=tuple(ranks), sequences=planned, strategy=strategy, units=case.units)
    return MicroBatch(groups=(group,))


@functools.cache
def given(case: Case):
    """By sequence q, k, v and dout."""
    size = KINDS[case.kind][3]
    return [qkv_and_dout(i, n, *case.heads, SIZE, size) for i, n in enumerate(case.lengths)]


def options_of(case: Case):
    """What attention is called with beside q, k and v."""
    reach, has_sinks, softcap, _ = KINDS[case.kind]
    sinks = None
    if has_sinks:
        sinks = torch.linspace(-1.0, 2.0, case.heads[0], dtype=torch.float64, device=DEVICE)
        sinks.requires_grad_()
    scale = None if case.kind == "full" else SCALE
    return {"reach": reach, "sinks": sinks, "softcap": softcap, "scale": scale}


def gradient_of(sinks):
    return None if sinks is None else sinks.grad.tolist()


# ---- row by row


def row_paths(tokens: int, unit: Unit | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the tokens of each row of a sequence, and which of these no row before it has."""
    paths = [torch.arange(tokens)]
    if unit is not None:
        paths = [torch.tensor(path_tokens(unit, last)) for _, last in unit.rows]
    seen = torch.zeros(tokens, dtype=torch.bool)
    for path in paths:
        yield path, ~seen[path]
        seen[path] = True
    assert seen.all()


def row_by_row(compute: Callable, tensors, unit: Unit | None):
    """out and the gradients of a sequence's tensors, where every row is computed by itself. A
    shared token's dout counts once. tensors: dout last. compute: the tensors of a row and the
    numbers of its tokens -> out of the row."""
    *tensors, dout = tensors
    tensors = [x.clone().requires_grad_() for x in tensors]
    out = torch.zeros_like(dout)
    total = torch.zeros((), dtype=torch.float64, device=dout.device)
    for path, new in row_paths(len(dout), unit):
        of_row = compute([x[path] for x in tensors], path)
        out[path[new]] = of_row[new].detach()
        total = total + (of_row[new] * dout[path[new]]).sum()
    total.backward()
    return [out, *(x.grad for x in tensors)]


@functools.cache
def wanted(case: Case):
    """By sequence out, dq, dk, dv; and the gradient of all sinks."""
    options = options_of(case)
    units = {unit.sequence: unit for unit in case.units}
    all_blocks = dict(case.blocks or ())
    found = []
    for sequence, tensors in enumerate(given(case)):
        of_sequence = all_blocks.get(sequence, ())

        def compute(qkv, path, blocks=of_sequence):
            at = {token: position for position, token in enumerate(path.tolist())}
            own = [(at[a], at[b - 1] + 1) for a, b in blocks if a in at]
            return dense_attention(*qkv, **options, blocks=own)

        if case.lengths[sequence]:
            found.append(row_by_row(compute, tensors, units.get(sequence)))
        else:
            found.append([tensors[-1], *tensors[:-1]])
    return found, gradient_of(options["sinks"])


# ---- on ranks


class Errors(NamedTuple):
    """Of a rank, of one case."""

    of_out: float
    """The largest difference."""
    of_gradients: float
    """The largest difference."""
    squares: list[tuple[float, float]]
    """Of out, dq, dk and dv: squared norms of the error and of what it should be."""
    sinks: list[float] | None
    """This rank's part of the gradient of the sinks."""


def context_on(communicator, micro_batch, case, *, kernel=None, **options) -> SequenceContext:
    """The context of a micro-batch on this rank."""
    shard = make_shard(micro_batch, case.lengths, communicator.rank)
    kernel = kernel or own_kernel(torch.float64, max(SIZE, KINDS[case.kind][3]))
    blocks = dict(case.blocks or ())
    return SequenceContext(shard, communicator, kernel, DEVICE, blocks=blocks, **options)


def attend(seq_ctx, case, *, checkpointed=False, both_ways=None):
    """out, dq, dk and dv of this rank, and its part of the gradient of the sinks."""
    options = options_of(case)
    both_ways = case.blocks is not None if both_ways is None else both_ways
    layer = partial(sequence_parallel_attention, seq_ctx=seq_ctx, both_ways=both_ways, **options)
    found = forward_backward(given(case), seq_ctx.shard, layer, checkpointed=checkpointed)
    return found, gradient_of(options["sinks"])


def errors_of(seq_ctx, case, **options) -> Errors:
    """Run a case on this rank. options: those of `attend`."""
    found, sinks = attend(seq_ctx, case, **options)
    by_sequence, _ = wanted(case)
    squares = [
        (float((x - y).square().sum()), float(y.square().sum()))
        for x, y in zip(found, own_rows(by_sequence, seq_ctx.shard), strict=True)
    ]
    of_out = largest_error(found[:1], [one[:1] for one in by_sequence], seq_ctx.shard)
    of_gradients = largest_error(found[1:], [one[1:] for one in by_sequence], seq_ctx.shard)
    return Errors(of_out, of_gradients, squares, sinks)


def run_cases(rank, world_size, strategies, cases, per_node=2):
    """The errors of this rank by strategy and case, where all ranks share all sequences."""
    communicator = join(nodes_of(world_size, per_node), use_blocks=world_size % 3 != 0)
    found = {}
    for strategy in strategies:
        ranks = [rank] if strategy == "local" else range(world_size)
        for number, case in enumerate(cases):
            keeps = number % 3 > 0  # of a checkpointed layer
            micro_batch = group_of(case, ranks, strategy)
            seq_ctx = context_on(communicator, micro_batch, case, save_attention_output=keeps)
            # on another number of ranks it is the other way round
            checkpointed = (number + world_size) % 2 == 0
            found[strategy, case] = errors_of(seq_ctx, case, checkpointed=checkpointed)
    return found


def assert_exact(by_rank):
    """by_rank: `Errors` by strategy and case."""
    wrong = {}
    for name in by_rank[0]:
        of_ranks = [found[name] for found in by_rank]
        of_out = max(errors.of_out for errors in of_ranks)
        of_gradients = max(errors.of_gradients for errors in of_ranks)
        # The gradient of a query that reads one key is zero, so the norms of all four tensors
        # together are the floor.
        squares = torch.tensor([errors.squares for errors in of_ranks]).sum(0).double()
        floor = 1e-3 * squares[:, 1].max()
        relative = float((squares[:, 0] / squares[:, 1].clamp_min(floor)).sqrt().max())
        _, exact = wanted(name[-1])
        if exact is not None:
            exact = torch.tensor(exact, dtype=torch.float64)
            sinks = torch.tensor([errors.sinks for errors in of_ranks], dtype=torch.float64)
            difference = sinks.sum(0) - exact
            of_gradients = max(of_gradients, float(difference.abs().max()))
            relative = max(relative, float(difference.norm() / exact.norm()))
        if not (of_out <= 1e-12 and of_gradients <= 1e-10 and relative <= 1e-12):
            wrong[name] = (of_out, of_gradients, relative)
    assert wrong == {}
