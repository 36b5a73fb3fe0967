"""Random plans on ranks that are threads: each comes to its end with the gradients of one process.

    python -m tests.random_runs --count 10000

runs them by number. A number stands for the same plan on any machine:

    attention    an optimizer step over 2 to 8 ranks on 1 to 4 nodes: micro-batches of any laminar
                 groups, with Zeppelin's passes, by collectives, under checkpointing; its one sum
                 of gradients over all ranks comes last
    pipeline     a step of a small model: any cuts, one or two stages per rank, ranks that share
                 every chunk, checkpointing, split weight gradients

The launches of a rank and the course of events are drawn, too (`ThreadHub`). What is received is
NaN until it has been waited for, so an early read shows in the gradients, which are compared in
float64 with attention written out, or with the model on one process.
"""

import argparse
import copy
import functools
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.kernels.scans import grid
from hf_flexseq.pipeline.planning.plan import PipelinePlan
from hf_flexseq.plan import Plan
from hf_flexseq.plan import attention_schedule as schedule
from hf_flexseq.plan.blocks import Blocks
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.plan.units import Unit
from hf_flexseq.program import heads as head_pieces
from hf_flexseq.published.zeppelin.routes import routed_posts
from tests.attention.dense import dense_attention
from tests.attention.exact import row_paths
from tests.attention.recurrent import stepwise
from tests.hf.tiny import documents, reference_gradients, tiny_llama
from tests.matching import Launches
from tests.pipeline.plans import random_pipeline_plan
from tests.pipeline.test_exactness import make_executor, step_errors
from tests.plans import random_blocks, random_plan, random_unit
from tests.published.zeppelin.gainful_passes import Always
from tests.ranks import join, run_threads

CPU = torch.device("cpu")
MOST_ERROR = 1e-10
WORLDS = {2: (1, 2), 3: (1, 3), 4: (1, 2, 4), 6: (1, 2, 3), 8: (1, 2, 4)}  # ranks: nodes
HEAD_DIM = 4
PIPELINE_EVERY = 16  # one plan of so many is a pipeline's


# ---- what is drawn


RECURRENT = ("convolution", "gated delta", "kimi delta", "mamba2")
REACHES = (FULL, *(Reach(window=w) for w in (1, 2, 5, 12)), *(Reach(chunk=c) for c in (1, 3, 12)))


class Kind(NamedTuple):
    """What a layer computes."""

    recurrent: str | None = None
    """Which recurrent layer of `RECURRENT`; None for attention."""
    reach: Reach = FULL
    sinks: bool = False
    softcap: float | None = None
    value_size: int = HEAD_DIM
    both_ways: bool = False
    """Whether the tokens of blocks see each other both ways."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRun:
    """An optimizer step without a model: some layers of attention over a plan."""

    number: int
    launches: Launches
    topology: Topology
    plan: Plan
    heads: tuple[int, int]
    """Of queries, and of keys and values."""
    kinds: tuple[Kind, ...]
    """By layer."""
    blocks: Blocks
    """By sequence the tokens that see both ways."""
    use_blocks: bool
    passes: Always | None
    """Zeppelin's passes over the plan."""
    checkpoints: bool
    keeps_attention: bool
    large: int
    """Tokens from which on chunks travel one by one; see `attention_schedule.LARGE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRun:
    """An optimizer step of a small model: `stages` ranks of a pipeline have `virtual` stages each,
    and `degree` ranks share every chunk of a stage."""

    number: int
    launches: Launches
    stages: int
    degree: int
    virtual: int
    layers: int
    plan: PipelinePlan


Run = AttentionRun | PipelineRun


def _draw_kind(rng: random.Random) -> Kind:
    """A kind of layer; a third of the layers are plain. Windows and chunks are below the lengths
    of some sequences, and above those of others."""
    choice = rng.random()
    if choice < 0.35:
        return Kind()
    if choice < 0.55:
        return Kind(recurrent=rng.choice(RECURRENT))
    return Kind(
        reach=rng.choice(REACHES),
        sinks=rng.random() < 0.3,
        softcap=rng.choice((None, None, 1.5)),
        value_size=rng.choice((HEAD_DIM, HEAD_DIM, HEAD_DIM - 1)),
    )


def draw(number: int) -> Run:
    """Return the run of this number, on any machine the same."""
    rng = random.Random(number)
    launches = rng.choice(list(Launches))
    if number % PIPELINE_EVERY == PIPELINE_EVERY - 1:
        return _draw_pipeline(number, launches, rng)
    world_size = rng.choice(list(WORLDS))
    nodes = rng.choice(WORLDS[world_size])
    lengths = [rng.choice((1, 2, 3, 5, 8, 13, 40)) for _ in range(rng.randint(1, 6))]
    micro_batches = rng.choice((1, 1, 2))
    units: tuple[Unit, ...] = ()
    if number % 2:
        lengths, units = _with_trees(lengths, random.Random(f"trees of {number}"))
    plan = random_plan(
        lengths,
        world_size,
        rng,
        nodes=nodes,
        micro_batches=micro_batches,
        shared=0.8,
        units=units,
    )
    topology = Topology(nodes=nodes, ranks_per_node=world_size // nodes)
    kinds = tuple(_draw_kind(rng) for _ in range(rng.choice((2, 2, 2, 3))))
    kinds, blocks = _with_blocks(kinds, plan, random.Random(f"blocks of {number}"))
    heads = rng.choice(((4, 4), (4, 2), (3, 1)))
    use_blocks = rng.random() < 0.5
    passes = None
    if rng.random() >= 0.5 and not units:  # no tokens move where a layer is recurrent
        has_recurrent = any(kind.recurrent for kind in kinds)
        passes = Always(topology, remap=not has_recurrent and rng.random() < 0.6)
    return AttentionRun(
        number=number,
        launches=launches,
        topology=topology,
        plan=plan,
        heads=heads,
        kinds=kinds,
        blocks=blocks,
        use_blocks=use_blocks,
        passes=passes,
        checkpoints=rng.random() < 0.4,
        keeps_attention=rng.random() < 0.6,
        large=rng.choice((1, schedule.LARGE["cpu"])),
    )


def _with_blocks(
    kinds: tuple[Kind, ...], plan: Plan, rng: random.Random
) -> tuple[tuple[Kind, ...], Blocks]:
    """Layers of which some see both ways, in two thirds of the runs; and blocks of plain sequences
    in groups that see them."""
    if rng.random() < 0.3:
        return kinds, {}
    asking = []
    for kind in kinds:
        may_ask = kind.recurrent is None and kind.reach.chunk is None
        asking.append(kind._replace(both_ways=may_ask and rng.random() < 0.8))
    return tuple(asking), random_blocks(plan, rng)


def _with_trees(lengths: list[int], rng: random.Random) -> tuple[list[int], tuple[Unit, ...]]:
    """Tokens of every row where some sequences are units of several rows."""
    made: list[int] = []
    units = []
    for index, length in enumerate(lengths):
        if index and rng.random() < 0.4:
            made.append(length)
            continue
        unit = random_unit(len(made), rng.randint(2, 6), rng)
        units.append(unit)
        made += [unit.tokens, *[0] * (len(unit.rows) - 1)]
    return made, tuple(units)


def _draw_pipeline(number: int, launches: Launches, rng: random.Random) -> PipelineRun:
    degree = rng.choice((1, 1, 2))
    virtual = rng.choice((1, 1, 2))
    stages = rng.choice((2, 3, 4) if virtual * degree > 1 else (2, 3, 4, 6, 8))
    layers = stages * virtual
    # A document of five tokens has a target.
    lengths = [5, *(rng.choice((1, 2, 3, 5, 8, 13)) for _ in range(rng.randint(1, 4)))]
    splits, checkpoints = rng.random() < 0.5, rng.random() < 0.5
    options = {"split_weights": splits, "checkpointing": checkpoints, "layers": layers}
    return PipelineRun(
        number=number,
        launches=launches,
        stages=stages,
        degree=degree,
        virtual=virtual,
        layers=layers,
        plan=random_pipeline_plan(lengths, stages, rng, virtual=virtual, **options),
    )


# ---- attention


def run_attention(run: AttentionRun) -> float:
    """Run the plan on all ranks; return the largest relative error of a gradient."""
    small_pieces = mock.patch.dict(head_pieces.PIECE_ROWS, {"cpu": 1})
    large = mock.patch.dict(schedule.LARGE, {"cpu": run.large, "cuda": run.large})
    short_chunks = mock.patch.object(grid, "CHUNK", 4)  # of recurrent layers
    world_size = run.topology.world_size
    with large, small_pieces, short_chunks:
        routed_posts.cache_clear()  # what is kept there depends on it
        return attention_error(
            run,
            run_threads(attention_rank, world_size, run, launches=run.launches, seed=run.number),
        )


def attention_error(run: AttentionRun, by_rank) -> float:
    """Return the largest relative error of a gradient. by_rank: what `attention_rank` returns."""
    wanted_weight, wanted_tokens = _reference(run)
    found_tokens = [torch.full_like(x, torch.nan) for x in wanted_tokens]
    errors = []
    for weight, rows in by_rank:
        errors.append(_error(torch.from_numpy(weight), wanted_weight))
        for sequence, position, gradient in rows:
            found_tokens[sequence][position] = torch.from_numpy(gradient)
    errors.append(_error(torch.cat(found_tokens), torch.cat(wanted_tokens)))
    return _largest(errors)


def attention_rank(rank, world_size, run):
    """The gradient of the weight, summed over all ranks, and (sequence, position, gradient) of
    every token that this rank has outside of attention."""
    communicator = join(run.topology, use_blocks=run.use_blocks)
    weight = _weight(run)
    weight.grad = torch.zeros_like(weight)
    found = []
    for micro_batch in run.plan.micro_batches:
        shards = [make_shard(micro_batch, run.plan.lengths, r) for r in range(world_size)]
        if run.passes is not None:
            shards = run.passes.shards(micro_batch, run.plan.lengths) or shards
        if shards[rank].zones or shards[rank].tokens:
            found += _run_shard(shards[rank], weight, run, communicator)
    communicator.all_reduce(weight.grad)
    return weight.grad.numpy(), found


def _run_shard(shard, weight, run, communicator):
    """Forward and backward of one micro-batch; (sequence, position, gradient) of every token."""
    seq_ctx = SequenceContext(
        shard,
        communicator,
        choose_kernel(CPU, torch.float64, HEAD_DIM),
        CPU,
        save_attention_output=run.keeps_attention,
        passes=run.passes,
        blocks=run.blocks,
    )
    tokens = _tokens(run)
    rows = [
        (part.sequence, position)
        for part in shard.slices
        for position in range(part.start, part.stop)
    ]
    own = [tokens[sequence][position] for sequence, position in rows]
    x = torch.stack(own) if own else tokens[0][:0]
    x.requires_grad_()
    y = x * weight

    def attend(x, layer):
        if run.kinds[layer].recurrent is not None:
            return _recurrent(x, layer, weight, run, seq_ctx)
        qkv, options = _asked(x, layer, weight, run)
        both_ways = run.kinds[layer].both_ways
        out = sequence_parallel_attention(*qkv, seq_ctx, **options, both_ways=both_ways)
        return _widened(out)

    for layer in range(len(run.kinds)):
        if run.checkpoints:
            y = checkpoint(attend, y, layer, use_reentrant=False)
        else:
            y = attend(y, layer)
    y.square().sum().backward()
    return [(*row, gradient) for row, gradient in zip(rows, x.grad.numpy(), strict=True)]


def _asked(x, layer, weight, run):
    """[tokens, heads, head_dim] -> q, k and v, and the options of attention. The sinks are
    a column of the weight."""
    kv_heads = run.heads[1]
    kind = run.kinds[layer]
    v = x[:, -kv_heads:, : kind.value_size] * 2
    options = {"reach": kind.reach, "softcap": kind.softcap}
    if kind.sinks:
        options["sinks"] = weight[:, 0]
    return (x * (1 + layer), x[:, :kv_heads], v), options


def _recurrent(x, layer, weight, run, seq_ctx=None):
    """[tokens, heads, head_dim] -> the same shape; without a context of one whole sequence."""
    kind = run.kinds[layer].recurrent
    tokens, heads, _ = x.shape
    keys = x[:, : run.heads[1]]  # of which each serves some heads
    if heads % run.heads[1]:
        keys = x[:, :1]
    x = x * (1 + layer)
    if kind == "convolution":
        taps = torch.arange(1, 2 + layer + run.number % 3, dtype=x.dtype)
        channel = weight.flatten().unsqueeze(1)
        rows = stepwise.layer(
            kind, seq_ctx, x.flatten(1), (channel * taps).sin(), weight.flatten() / 2
        )
        return _widened(rows.view(tokens, heads, HEAD_DIM).tanh())
    if kind == "mamba2":
        steps = {"dt_bias": weight[:, 2], "dt_softplus": True, "dt_limit": (0.01, 2.0)}
        tensors = (x, x[..., 0], -weight[:, 0].exp(), keys, keys.tanh())
        return _widened(stepwise.layer(kind, seq_ctx, *tensors, D=weight[:, 1], **steps).tanh())
    if kind == "kimi delta":
        keys = x.tanh()  # one for each head
    g = -functional.softplus(x if kind == "kimi delta" else x[..., 0])
    tensors = (keys, keys * 2 + 1, x[..., : HEAD_DIM - 1], g, x[..., 1].sigmoid())
    return _widened(stepwise.layer(kind, seq_ctx, *tensors, l2norm=True))


def _widened(out):
    """[tokens, heads, value_size] -> [tokens, heads, head_dim]"""
    return functional.pad(out.tanh(), (0, HEAD_DIM - out.shape[2]))


def _tokens(run: AttentionRun) -> list[torch.Tensor]:
    """By sequence: [length, heads, head_dim]."""
    generator = torch.Generator().manual_seed(run.number)
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(n, run.heads[0], HEAD_DIM, **options) for n in run.plan.lengths]


def _weight(run: AttentionRun) -> torch.Tensor:
    """[heads, head_dim]"""
    generator = torch.Generator().manual_seed(run.number + 1)
    shape = (run.heads[0], HEAD_DIM)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def _reference(run):
    """The gradients of the weight, and of the tokens by sequence, on one process."""
    weight = _weight(run)
    leaves = [x.requires_grad_() for x in _tokens(run)]
    for leaf, new, blocks in _rows_of(run, leaves):
        y = leaf * weight
        for layer, kind in enumerate(run.kinds):
            if kind.recurrent is not None:
                y = _recurrent(y, layer, weight, run)
            else:
                qkv, options = _asked(y, layer, weight, run)
                own_blocks = blocks if kind.both_ways else ()
                y = _widened(dense_attention(*qkv, **options, blocks=own_blocks))
        y[new].square().sum().backward()
    return weight.grad, [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def _rows_of(run, leaves):
    """Every row by itself, which of its tokens no row before it has had, and its blocks."""
    units = {unit.sequence: unit for unit in run.plan.units}
    for sequence, leaf in enumerate(leaves):
        if len(leaf):  # a row inside of a unit has its tokens there
            blocks = run.blocks.get(sequence, ()) if sequence not in units else ()
            for path, new in row_paths(len(leaf), units.get(sequence)):
                yield leaf[path], new, blocks


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _largest(errors: list[float]) -> float:
    """NaN counts as the largest."""
    return max(errors, key=lambda error: (math.isnan(error), error))


# ---- pipelines


@functools.cache
def _model(layers: int, tied: bool):
    return tiny_llama(
        num_hidden_layers=layers, hidden_size=16, intermediate_size=16, tie_word_embeddings=tied
    )


def run_pipeline(run: PipelineRun) -> float:
    """Train and evaluate one step on all ranks; return the largest relative error of a gradient,
    or of a loss."""
    is_tied = run.number // PIPELINE_EVERY % 2 == 0  # every number of a pipeline is odd
    model = _model(run.layers, is_tied)
    wanted = reference_gradients(copy.deepcopy(model), documents(run.plan.lengths))
    arguments = (run, model, wanted)
    ranks = run.stages * run.degree
    options = {"launches": run.launches, "seed": run.number}
    by_rank = run_threads(_pipeline_rank, ranks, *arguments, **options)
    return _largest([error for errors in by_rank for error in errors])


def _pipeline_rank(rank, world_size, run, model, wanted):
    communicator = join()
    model = copy.deepcopy(model)
    executor = make_executor(model, run.stages, run.degree, communicator, run.virtual)
    return step_errors(communicator, executor, run.plan, *wanted, lengths=run.plan.lengths)


# ---- all of them


def error_of(drawn: Run) -> float:
    """Return the largest relative error of a run."""
    if isinstance(drawn, PipelineRun):
        return run_pipeline(drawn)
    return run_attention(drawn)


def run_all(numbers: Iterable[int]) -> None:
    """Run these numbers. Raises AssertionError naming the first run that fails, or whose gradients
    are not those of one process."""
    for number in numbers:
        drawn = draw(number)
        try:
            error = error_of(drawn)
        except (AssertionError, RuntimeError, ValueError) as failed:
            raise AssertionError(f"run {number} fails: {drawn}") from failed
        assert error <= MOST_ERROR, f"run {number} is off by {error}: {drawn}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--count", type=int, default=10_000, help="how many runs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    busy = time.process_time()
    run_all(range(asked.first, asked.first + asked.count))
    print(f"{asked.count:,} plans end, with all gradients within {MOST_ERROR:g} of one process.")
    print(f"{time.perf_counter() - start:.0f} s, {time.process_time() - busy:.0f} s of one core.")


if __name__ == "__main__":
    main()
