"""Programs of all ranks in one micro-batch."""

import math

from hf_flexseq.base.topology import Topology
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import compile as compiler
from hf_flexseq.program.instructions import RowShape
from hf_flexseq.program.zones import Machine
from tests.plans import one_group

TRANSFERS = ("post", "all_to_all")

OF_ATTENTION = (compiler.FORWARD, compiler.BACKWARD, compiler.BACKWARD_OF_ROWS)
OF_ROWS = (  # of recurrent layers
    compiler.HALO,
    compiler.HALO_RETURN,
    compiler.SUMMARIES_BEFORE,
    compiler.SUMMARIES_AFTER,
)


def programs_of(
    micro_batch,
    lengths,
    topology,
    shape,
    *,
    device="cuda",
    passes=None,
    ranks=None,
    whats=None,
    blocks=None,
):
    """By what they do, the programs by rank. shape: a LayerShape, or a RowShape of a recurrent
    layer. blocks: by sequence the tokens that see both ways."""
    machine = Machine(topology=topology, device=device, wide_gradients=device == "cpu")
    if whats is None:
        whats = OF_ROWS if isinstance(shape, RowShape) else OF_ATTENTION
    shards = passes.shards(micro_batch, lengths) if passes else None
    found = {what: {} for what in whats}
    for rank in range(topology.world_size) if ranks is None else ranks:
        shard = shards[rank] if shards else make_shard(micro_batch, lengths, rank)
        parts = compiler.parts_of(shard, machine, blocks or {})
        forward = None
        for what in whats:
            program = compiler.compile_program(parts, what, shape, forward)
            forward = forward or program
            if passes is not None:
                program = passes.of_programs(shard, machine)(program, what, shape)
            found[what][rank] = program
    return found


def programs_of_group(strategy, degree, lengths, shape, *, per_node=None, **options):
    """The same of one group of all ranks, on nodes of so many; None is a node for all."""
    per_node = per_node or degree
    topology = Topology(nodes=-(-degree // per_node), ranks_per_node=per_node)
    micro_batch = one_group(range(degree), len(lengths), strategy)
    return programs_of(
        micro_batch, lengths, topology, shape, **({"ranks": range(degree)} | options)
    )


def nbytes(value, shape):
    """The bytes of a value, in a layer of this shape."""
    return math.prod(value.shape) * shape.item_bytes(value.dtype)


def messages_of(one, program, shape):
    """(whether it is sent, peer, tag, bytes) of each message of an instruction."""
    if one.operation not in TRANSFERS:
        return []
    spec = one.constants[1]
    if one.operation == "post":
        return [
            (is_sent, peer, tag, nbytes(program.all_values[value], shape))
            for is_sent, messages in ((True, spec.sends), (False, spec.recvs))
            for value, peer, tag in messages
        ]
    item = shape.item_bytes(program.all_values[one.ins[0]].dtype)
    return [
        (is_sent, peer, spec.tag, item * count)
        for is_sent, counts in ((True, spec.sent), (False, spec.received))
        for peer, count in zip(spec.ranks, counts, strict=True)
        if count and peer != spec.ranks[spec.own]
    ]


def moved_bytes(program, shape, *, is_sent=False):
    """Bytes of all messages that a program receives, or sends."""
    found = [messages_of(one, program, shape) for one in program.instructions]
    return sum(size for messages in found for sent, *_, size in messages if sent == is_sent)
