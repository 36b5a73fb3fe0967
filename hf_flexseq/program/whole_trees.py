"""Attention over units where all of their tokens are at hand, by the keys that a layer reads."""

from collections.abc import Sequence

from hf_flexseq.base.layers import Reach
from hf_flexseq.plan.shard import Cut
from hf_flexseq.plan.units import UnitLayout
from hf_flexseq.program.exchange import Channel
from hf_flexseq.program.halo_rows import halo_zone
from hf_flexseq.program.ring_steps import ZoneLayout
from hf_flexseq.program.tables import Tables
from hf_flexseq.program.trees import TreeZone, tree_records
from hf_flexseq.program.zones import ZoneAttention

ONE_CHUNK = "balanced"  # the layout in which a rank alone has a sequence as one chunk


def whole_tree_zone(
    rows: slice,
    lengths: Sequence[int],
    trees: Sequence[UnitLayout | None],
    channel: Channel,
    tables: Tables,
    reach: Reach,
) -> ZoneAttention:
    """Return attention over sequences of which at least one is a unit.

    rows: where they stand, one after the other. lengths, trees: of each sequence.
    """
    if reach.is_full:
        return TreeZone(rows, tree_records(lengths, trees, tables))
    cuts = [Cut(bounds=(0, length), mirrored=False) for length in lengths]
    layout = ZoneLayout(cuts, ONE_CHUNK, 0, channel.group.ranks[:1], tables)
    return halo_zone(rows, layout, reach, channel, trees)
