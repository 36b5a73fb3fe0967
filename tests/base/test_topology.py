"""Topology: which ranks sit together, and which may form a group."""

import pytest

from hf_flexseq.base.topology import Topology


@pytest.mark.parametrize("nodes, ranks_per_node", [(0, 8), (1, 0), (-1, 2)])
def test_empty_topologies_are_refused(nodes, ranks_per_node):
    with pytest.raises(ValueError, match="must be at least 1"):
        Topology(nodes=nodes, ranks_per_node=ranks_per_node)


def test_from_world_spreads_ranks_evenly():
    assert Topology.from_world(12, 6) == Topology(nodes=2, ranks_per_node=6)
    with pytest.raises(ValueError, match="cannot be spread evenly"):
        Topology.from_world(12, 8)


@pytest.mark.parametrize(
    "nodes, ranks_per_node", [(1, 1), (1, 2), (1, 8), (8, 8), (2, 3), (3, 1), (5, 6)]
)
def test_aligned_blocks_are_allowed_and_fewer_than_ranks(nodes, ranks_per_node):
    topology = Topology(nodes=nodes, ranks_per_node=ranks_per_node)
    blocks = list(topology.aligned_blocks())
    assert len(blocks) == len(set(blocks)) < max(2, topology.world_size)
    assert all(topology.allows(*block) and block[1] - block[0] > 1 for block in blocks)
    widths = [stop - start for start, stop in blocks]
    assert widths == sorted(widths, reverse=True)
    assert topology.world_size == 1 or blocks[0] == (0, topology.world_size)
