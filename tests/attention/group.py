"""Contexts of ranks that attend in one group, and what they attend to."""

import functools

import torch
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.topology import Topology
from hf_flexseq.plan.shard import make_shard
from tests.device import DEVICE, own_kernel
from tests.plans import one_group


def nodes_of(world_size, per_node=2):
    """Nodes of `per_node` ranks, or of one where ranks do not fill them."""
    per_node = per_node if world_size % per_node == 0 else 1
    return Topology(nodes=world_size // per_node, ranks_per_node=per_node)


def context_of(
    communicator, strategy, lengths, *, dtype=torch.float64, kernel=None, head_dim=8, passes=None
):
    """A rank's context where all ranks share all sequences; under `local` it has them alone."""
    ranks = range(communicator.topology.world_size)
    if strategy == "local":
        ranks = [communicator.rank]
    shard = make_shard(one_group(ranks, len(lengths), strategy), lengths, communicator.rank)
    kernel = kernel or own_kernel(dtype, head_dim)
    return SequenceContext(shard, communicator, kernel, DEVICE, passes=passes)


@functools.cache
def qkv_and_dout(seed, tokens, heads, kv_heads, size=8, value_size=None):
    """Random q, k, v and dout, in float64."""
    generator = torch.Generator().manual_seed(seed)
    value_size = value_size or size
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(tokens, *shape, **options).to(DEVICE) for shape in shapes]


def own_rows(by_sequence, shard):
    """Of each tensor, by sequence and tensor, the rows that a shard holds; there may be none."""
    tensors = []
    for tensor in range(len(by_sequence[0])):
        rows = [by_sequence[0][tensor][:0]]
        rows += [by_sequence[one.sequence][tensor][one.start : one.stop] for one in shard.slices]
        tensors.append(torch.cat(rows))
    return tensors


def forward_backward(given, shard, compute, *, checkpointed=False):
    """out and gradients of a rank's rows. given: by sequence the tensors, dout last. compute: a
    layer, of the rows of all tensors but dout."""
    *tensors, dout = own_rows(given, shard)
    tensors = [x.requires_grad_() for x in tensors]

    def run(*tensors):
        # the layer is no identity, so that a replay has something to compute
        return compute(*(x * 1 for x in tensors))

    out = checkpoint(run, *tensors, use_reentrant=False) if checkpointed else run(*tensors)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in tensors)]


def largest_error(tensors, by_sequence, shard):
    """The largest difference of tensors to the rows of a shard, 0 without rows."""
    return max(
        float((x - y).abs().max()) if x.numel() else 0.0
        for x, y in zip(tensors, own_rows(by_sequence, shard), strict=True)
    )
