"""Zeppelin's passes where they always pay: a slow and prompt network between fast nodes."""

from dataclasses import replace

from hf_flexseq.cost.presets import PRESETS
from hf_flexseq.published.zeppelin.passes import ZeppelinPasses
from hf_flexseq.published.zeppelin.remap import remapped_shards

SLOW = replace(
    PRESETS["llama-3.1-8b-a800"],
    bandwidths=((2, 1e12), (4, 1e12), (8, 1e12), (16, 1e3)),
)


class Always(ZeppelinPasses):
    """Routes what leaves a NIC idle, and remaps whatever has a token for every rank."""

    def __init__(self, topology, *, remap=True, route=True):
        super().__init__(SLOW, topology, lockstep=True)
        self._all = remap
        if not route:
            self._links = None

    def shards(self, micro_batch, lengths):
        tokens = sum(group.tokens(lengths) for group in micro_batch.groups)
        if not self._all or tokens < self._topology.world_size:
            return None
        return remapped_shards(micro_batch, lengths, self._topology)

    def shard(self, micro_batch, lengths, rank):
        """What a rank holds of a remapped micro-batch."""
        return remapped_shards(micro_batch, lengths, self._topology)[rank]
