"""`python -m hf_flexseq.program`: instructions of one rank in the attention of a micro-batch, or
in the exchanges of recurrent layers.
"""

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from hf_flexseq.base.layers import FULL, Reach
from hf_flexseq.base.topology import Topology
from hf_flexseq.base.values import MAX_COUNT, quoted
from hf_flexseq.command_line import (
    OneLineParser,
    limit_option,
    number_option,
    plan_option,
    run_command,
    say,
    set_run,
    topology_option,
)
from hf_flexseq.plan import Plan, check
from hf_flexseq.plan.files import read_steps
from hf_flexseq.plan.shard import Shard, make_shard
from hf_flexseq.program.compile import (
    BACKWARD,
    FORWARD,
    HALO,
    HALO_RETURN,
    SUMMARIES_AFTER,
    SUMMARIES_BEFORE,
    compile_program,
    parts_of,
)
from hf_flexseq.program.instructions import ITEM_BYTES, LayerShape, Program, RowShape
from hf_flexseq.program.zones import Machine

LAYER = "32x8x128"  # Llama 3.1 8B

# Exchanges of a recurrent layer, forward and backward.
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
        raise ArgumentTypeError(f"expected QUERYxKVxSIZE such as {LAYER}, got {quoted(text)}")
    heads, kv_heads, size = map(int, match.groups())
    if heads % kv_heads:
        raise ArgumentTypeError(
            f"expected query heads that are a multiple of KV heads, got {quoted(text)}"
        )
    if heads * size > MAX_COUNT:
        raise ArgumentTypeError(
            f"expected at most {MAX_COUNT:,} numbers a token, got {quoted(text)}"
        )
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
            f"expected full, window:N or chunk:N such as window:1024, got {quoted(text)}"
        )
    kind, tokens = match.groups()
    return Reach(**{kind: int(tokens)})


def recurrent_rows(text: str) -> tuple[str, RowShape]:
    """Read a recurrent layer's rows written as convolution:CHANNELSxWIDTH, such as
    convolution:8192x4, or scan:HEADSxKEYxVALUE, such as scan:32x128x128.

    Returns `convolution` or `scan`, and its rows: in bfloat16 for a convolution; for a scan
    summaries of a delta rule, in float32. Raises ArgumentTypeError for anything else.
    """
    number = "([1-9][0-9]{0,5})"
    match = re.fullmatch(f"convolution:{number}x{number}", text)
    if match:
        channels, width = map(int, match.groups())
        if not LEAST_WIDTH <= width <= MOST_WIDTH:
            raise ArgumentTypeError(
                f"expected a convolution of {LEAST_WIDTH} to {MOST_WIDTH} rows, got {quoted(text)}"
            )
        return "convolution", RowShape(channels, "bfloat16", width)
    match = re.fullmatch(f"scan:{number}x{number}x{number}", text)
    if not match:
        raise ArgumentTypeError(
            "expected convolution:CHANNELSxWIDTH or scan:HEADSxKEYxVALUE such as "
            f"convolution:8192x4, got {quoted(text)}"
        )
    heads, key, value = map(int, match.groups())
    columns = heads * key * (key + value)
    if columns > MAX_COUNT:
        raise ArgumentTypeError(
            f"expected at most {MAX_COUNT:,} numbers a summary, got {quoted(text)}"
        )
    return "scan", RowShape(columns, "float32")


def program(options: Namespace) -> None:
    """Print the programs of one rank in one micro-batch of a plan, forward and backward."""
    file = read_steps(options.plan, options.limits)
    step = file.step(options.step)
    plan = step.plan
    if not isinstance(plan, Plan):
        raise ValueError(
            f"{options.plan}: expected a plan of groups, got a pipeline's at step {step.number}; "
            "flexseq view draws it"
        )
    topology = options.topology or _one_node(plan, options)
    check(plan, topology)
    if options.micro_batch >= len(plan.micro_batches):
        raise ValueError(
            f"expected --micro-batch below {len(plan.micro_batches)}, got {options.micro_batch}"
        )
    if options.rank >= topology.world_size:
        raise ValueError(f"expected --rank below {topology.world_size}, got {options.rank}")
    shard = _shard(plan, options)
    if shard.zones:
        _print_programs(shard, topology, options)
    else:
        print(f"rank {options.rank} works in no group of micro-batch {options.micro_batch}")
    if file.broken:
        say(options, f"{options.plan}: {file.remark()}")


def _print_programs(shard: Shard, topology: Topology, options: Namespace) -> None:
    """Print the programs of a shard: of attention, or of the recurrent layer in the options."""
    machine = Machine(
        topology=topology,
        device=options.device,
        wide_gradients=options.device == "cpu",  # as the kernels of either device say
    )
    parts = parts_of(shard, machine)
    heads, kv_heads, size = options.layer
    shape: LayerShape | RowShape
    shape = LayerShape(heads, kv_heads, size, options.dtype, options.reach)
    whats = (FORWARD, BACKWARD)
    if options.recurrent is not None:
        kind, shape = options.recurrent
        whats = RECURRENT[kind]
    there = None
    for what in whats:
        made = compile_program(parts, what, shape, there)
        there = there or made
        print(_title(what, made, topology, options.rank))
        print(made)


def _shard(plan: Plan, options: Namespace) -> Shard:
    """Return the rank's shard of the micro-batch that was asked for."""
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
    """Return a line that sums up a program."""
    posts = made.posts(topology.node_of, rank=rank)
    return (
        f"{name} of rank {rank}: {len(made.instructions)} instructions, "
        f"{made.kernel_calls} attention calls, {made.launches} launches, {posts} posts, "
        f"{made.messages} messages"
    )


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = OneLineParser(
        prog="python -m hf_flexseq.program",
        description="Print what one rank does in a layer of a micro-batch, step by step.",
    )
    set_run(parser, program)
    plan_option(parser)
    number_option(parser, "rank", "rank that runs the program")
    number_option(parser, "micro-batch", "index of the micro-batch in the plan")
    number_option(parser, "step", "index of the step in the file")
    topology_option(parser, required=False, help="default: one node of all ranks")
    parser.add_argument(
        "--layer",
        type=layer,
        default=layer(LAYER),
        metavar="QxKVxD",
        help=f"query heads, KV heads and size of a head (default {LAYER})",
    )
    parser.add_argument(
        "--reach",
        type=reach,
        default=FULL,
        metavar="full|window:N|chunk:N",
        help="keys that a query reads (default full)",
    )
    parser.add_argument(
        "--recurrent",
        type=recurrent_rows,
        metavar="convolution:CxW|scan:HxKxV",
        help="print the exchanges of a recurrent layer instead of attention: channels and width "
        "of a convolution, or heads and sizes of key and value of a delta rule",
    )
    parser.add_argument(
        "--dtype", choices=tuple(ITEM_BYTES), default="bfloat16", help="default bfloat16"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="device, which decides how small a kernel call may be, and the dtype of partial "
        "gradients (default cuda)",
    )
    limit_option(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_command(make_parser(), sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
