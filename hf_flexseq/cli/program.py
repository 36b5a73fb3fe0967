"""`program`: what one rank does in the attention of a micro-batch, or in what recurrent layers
exchange, instruction by instruction."""

import re
from argparse import ArgumentTypeError, Namespace

from hf_flexseq.cli.files import asked_step, read_steps, tell_broken_lines
from hf_flexseq.layers import FULL, Reach
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.shard import Shard, make_shard
from hf_flexseq.program.compile import (
    HALO,
    HALO_RETURN,
    SUMMARIES_AFTER,
    SUMMARIES_BEFORE,
    Machine,
    MicroBatchLayout,
    backward,
    forward,
    of_rows,
)
from hf_flexseq.program.instructions import ITEM_BYTES, LayerShape, Program, RowShape
from hf_flexseq.topology import Topology
from hf_flexseq.values import MAX_COUNT, quoted

LAYER = "32x8x128"  # Llama 3.1 8B

# What a recurrent layer exchanges, forward and backward.
RECURRENT = {
    "convolution": (HALO, HALO_RETURN),
    "scan": (SUMMARIES_BEFORE, SUMMARIES_AFTER),
}
# Rows that a convolution reads: one alone asks for nothing, and all are listed one by one.
LEAST_WIDTH, MOST_WIDTH = 2, 64

# Work of a group, in events of about ten microseconds: the instructions of a ring for each of its
# ranks, and the sequences that each of its kernel calls lists.
EVENTS_PER_RANK = 20
SEQUENCES_PER_EVENT = 2


def layer(text: str) -> tuple[int, int, int]:
    """Read query heads, KV heads and head size written as QxKVxD, such as 32x8x128.

    Raises ArgumentTypeError for anything else.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)
    if not match:
        raise ArgumentTypeError(
            f"{quoted(text)} is no layer: write QUERYxKVxSIZE, such as {LAYER}"
        )
    heads, kv_heads, size = map(int, match.groups())
    if heads % kv_heads:
        raise ArgumentTypeError(f"{quoted(text)}: {heads} query heads over {kv_heads} KV heads")
    if heads * size > MAX_COUNT:
        raise ArgumentTypeError(f"{quoted(text)} is above {MAX_COUNT:,} numbers a token")
    return heads, kv_heads, size


def reach(text: str) -> Reach:
    """Read which keys a query reads, written as full, window:N or chunk:N.

    Raises ArgumentTypeError for anything else.
    """
    if text == "full":
        return FULL
    match = re.fullmatch(r"(window|chunk):([1-9][0-9]{0,11})", text)
    if not match:
        raise ArgumentTypeError(
            f"{quoted(text)} is no reach: write full, window:N or chunk:N, such as window:1024"
        )
    kind, tokens = match.groups()
    return Reach(**{kind: int(tokens)})


def recurrent_rows(text: str) -> tuple[str, RowShape]:
    """Read a recurrent layer's rows written as convolution:CHANNELSxWIDTH, such as
    convolution:8192x4, or scan:HEADSxKEYxVALUE, such as scan:32x128x128.

    Returns what it is, and its rows in bfloat16: those of a scan are summaries of a delta rule, in
    float32. Raises ArgumentTypeError for anything else.
    """
    number = "([1-9][0-9]{0,5})"
    match = re.fullmatch(f"convolution:{number}x{number}", text)
    if match:
        channels, width = map(int, match.groups())
        if not LEAST_WIDTH <= width <= MOST_WIDTH:
            raise ArgumentTypeError(
                f"{quoted(text)}: a convolution reads {LEAST_WIDTH} to {MOST_WIDTH} rows"
            )
        return "convolution", RowShape(channels, "bfloat16", width)
    match = re.fullmatch(f"scan:{number}x{number}x{number}", text)
    if not match:
        raise ArgumentTypeError(
            f"{quoted(text)} is no recurrent layer: write convolution:CHANNELSxWIDTH or "
            "scan:HEADSxKEYxVALUE, such as convolution:8192x4"
        )
    heads, key, value = map(int, match.groups())
    columns = heads * key * (key + value)
    if columns > MAX_COUNT:
        raise ArgumentTypeError(f"{quoted(text)} is above {MAX_COUNT:,} numbers a summary")
    return "scan", RowShape(columns, "float32")


def program(options: Namespace) -> None:
    """Print the programs of one rank in one micro-batch of a plan, forward and backward."""
    file = read_steps(options.plan, options.limits)
    step = asked_step(file, options)
    plan = step.plan
    if not isinstance(plan, Plan):
        raise ValueError(
            f"{options.plan}: step {step.number} is a pipeline's, whose chunks are not shown "
            "here; flexseq view draws it"
        )
    topology = options.topology or _one_node(plan, options)
    check(plan, topology)
    if not 0 <= options.micro_batch < len(plan.micro_batches):
        raise ValueError(
            f"step {step.number} has {len(plan.micro_batches)} micro-batches, so there is no "
            f"--micro-batch {options.micro_batch}"
        )
    if options.rank >= topology.world_size:
        raise ValueError(
            f"the plan is for {topology.world_size} ranks, so there is no --rank {options.rank}"
        )
    shard = _shard(plan, options)
    if shard.zones:
        _print_programs(shard, topology, options)
    else:
        print(f"rank {options.rank} works in no group of micro-batch {options.micro_batch}")
    tell_broken_lines(file, options)


def _print_programs(shard: Shard, topology: Topology, options: Namespace) -> None:
    """Print the programs of a shard, forward and backward, with a title each: of attention, or of
    a recurrent layer where one is asked for."""
    machine = Machine(
        topology=topology,
        device=options.device,
        wide_gradients=options.device == "cpu",  # as the kernels of either device say
    )
    parts = MicroBatchLayout(shard, machine).parts
    if options.recurrent is not None:
        kind, rows = options.recurrent
        for what in RECURRENT[kind]:
            made = of_rows(parts, what, rows)
            print(_title(what, made, topology, options.rank))
            print(made)
        return
    heads, kv_heads, size = options.layer
    shape = LayerShape(heads, kv_heads, size, options.dtype, options.reach)
    there = forward(parts, shape)
    back = backward(parts, shape, there.saved)
    for name, made in (("forward", there), ("backward", back)):
        print(_title(name, made, topology, options.rank))
        print(made)


def _shard(plan: Plan, options: Namespace) -> Shard:
    """Return what the rank holds of the micro-batch that was asked for."""
    micro_batch = plan.micro_batches[options.micro_batch]
    events = 0
    for group in micro_batch.groups_of(options.rank):
        events += group.degree * (EVENTS_PER_RANK + len(group.sequences) // SEQUENCES_PER_EVENT)
    what = f"micro-batch {options.micro_batch} may be {events:,} events of rank {options.rank}"
    options.limits.refuse_above("work", events, what)
    return make_shard(micro_batch, plan.lengths, options.rank)


def _one_node(plan: Plan, options: Namespace) -> Topology:
    """Return a node that has all ranks of the plan."""
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    world = max((group.stop for group in groups), default=1)
    options.limits.refuse_above("ranks", world, f"the plan is for {world:,} ranks")
    return Topology(nodes=1, ranks_per_node=world)


def _title(name: str, made: Program, topology: Topology, rank: int) -> str:
    """Return a line that says what a program amounts to."""
    posts = made.posts(topology.node_of, rank=rank)
    return (
        f"{name} of rank {rank}: {len(made.instructions)} instructions, "
        f"{made.kernel_calls} attention calls, {made.launches} launches, {posts} posts, "
        f"{made.messages} messages"
    )


DTYPES = tuple(ITEM_BYTES)
