"""The segments of recurrent layers against the slices of all ranks, token by token."""

import random
from dataclasses import replace

import pytest

from hf_flexseq.plan import MicroBatch
from hf_flexseq.plan.segments import Segment, SegmentTree, segments_of
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.plan.units import ROOT
from tests.plans import one_group, path_tokens, random_unit, shards_of


def shards_with_units(strategy, degree, lengths, units):
    """What each rank of one group holds, [degree]. lengths: 0 for a row inside of a unit."""
    (group,) = one_group(range(degree), len(lengths), strategy).groups
    planned = tuple(i for i, length in enumerate(lengths) if length)
    micro_batch = MicroBatch(groups=(replace(group, sequences=planned, units=tuple(units)),))
    return [make_shard(micro_batch, lengths, rank) for rank in range(degree)]


def drawn(rng):
    """Units and plain sequences: (lengths, units)."""
    lengths, units = [], []
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.5:
            units.append(random_unit(len(lengths), rng.randint(1, 6), rng))
            lengths += [units[-1].tokens, *[0] * (len(units[-1].rows) - 1)]
        else:
            lengths.append(rng.choice((1, 2, 3, 5, 8, 13, 40)))
    return lengths, units


@pytest.mark.parametrize("strategy", ["ulysses", "zigzag", "balanced", "hybrid"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_segments_are_the_rows_of_their_ranks_and_every_row_goes_through_them(strategy, degree):
    rng = random.Random(degree)
    for _ in range(20):
        lengths, units = drawn(rng)
        trees = {}
        rows = {}  # (rank, member, token) -> row
        name = strategy if degree > 1 else "local"
        shards = shards_with_units(name, degree, lengths, units)
        for rank, shard in enumerate(shards):
            (zone,) = shard.zones
            found = segments_of(zone)
            for member, tree in found.trees.items():
                first = trees.setdefault(member, tree)
                assert (first.segments, first.parents) == (tree.segments, tree.parents)
            for one in found.held:
                segment = trees[one.member].segments[one.place]
                assert segment.holder == rank
                for token in range(segment.start, segment.stop):
                    rows[rank, zone.group.sequences[one.member], token] = one.row
                    one = one._replace(row=one.row + 1)
            for row, (sequence, token) in enumerate(
                (part.sequence, token)
                for part in zone.slices
                for token in range(part.start, part.stop)
            ):
                assert rows.pop((rank, sequence, token)) == row
        assert not rows
        for member, sequence in enumerate(zone.group.sequences):
            check_paths(trees[member], lengths[sequence], units, sequence)


def check_paths(tree, length, units, sequence):
    """Every row of a sequence is the segments before that of its last token, and that up to it."""
    assert (tree.segments[0].start, tree.segments[-1].stop) == (0, length)
    ends = {length: list(range(length))}  # token after a row -> the tokens of the row
    for unit in units:
        if unit.sequence == sequence:
            for _, last in unit.rows:
                ends[unit.layout.stops[last]] = path_tokens(unit, last)
            starts = set(unit.attended.starts)
            break
    else:
        starts = {0}
    for stop, wanted in ends.items():
        (place,) = (i for i, one in enumerate(tree.segments) if one.start < stop <= one.stop)
        path = [tree.segments[i] for i in [*tree.before(place), place]]
        tokens = [t for one in path for t in range(one.start, min(one.stop, stop))]
        assert tokens == wanted
    check_folded(tree)
    for place, segment in enumerate(tree.segments):
        parent = tree.parents[place]
        assert all(place in tree.after(above) for above in tree.before(place))
        assert all(place in tree.before(below) for below in tree.after(place))
        if parent != ROOT and segment.start not in starts:
            # within a node ranks alternate
            assert tree.segments[parent].stop == segment.start
            assert tree.segments[parent].holder != segment.holder


def check_folded(tree):
    """What goes on from any segment is there once, itself or in what it is folded into; and one
    rank has all that is folded."""
    folded = tree.folded()
    holders = [segment.holder for segment in tree.segments]
    has_all = [
        {holders[below] for below in tree.after(place)} <= {holders[place]}
        for place in range(len(holders))
    ]
    assert list(tree.wholes) == has_all
    for first, members in folded.items():
        parents = {tree.parents[place] for place in members}
        assert first == members[0]
        assert {holders[place] for place in members} == {holders[first]}
        assert len(parents) == 1
        assert members == [first] or all(has_all[place] for place in members)
        assert not any(has_all[place] for place in parents - {ROOT})
    for place, is_whole in enumerate(has_all):
        if is_whole:
            continue
        parts = [one for below in tree.after(place) for one in folded.get(below, ())]
        swallowed = {below for one in parts if has_all[one] for below in tree.after(one)}
        assert len(parts) == len(set(parts))
        assert set(parts) | swallowed == set(tree.after(place))
        assert not set(parts) & swallowed


def test_branches_of_a_rank_are_folded_into_the_first():
    #  0 [0, 2) - 1 [2, 3)
    #           - 1 [3, 9) - 1 [9, 10)
    #           - 0 [10, 11)
    segments = [Segment(0, 0, 2), Segment(1, 2, 3), Segment(1, 3, 9), Segment(1, 9, 10)]
    tree = SegmentTree([*segments, Segment(0, 10, 11)], [ROOT, 0, 0, 2, 0])
    assert tree.wholes == (False, True, True, True, True)
    assert tree.folded() == {0: [0], 1: [1, 2], 4: [4]}


def test_chunks_of_a_rank_that_follow_each_other_are_one_segment():
    (shard, _) = shards_of("zigzag", 2, [8])
    tree = segments_of(shard.zones[0]).trees[0]
    assert tree.segments == (Segment(0, 0, 2), Segment(1, 2, 6), Segment(0, 6, 8))
    assert tree.parents == (ROOT, 0, 1)


def test_rows_before_a_segment_are_those_of_its_path_the_nearest_first():
    #  [0, 2) - [2, 3) - [3, 9)
    #                  - [9, 10)
    segments = [Segment(0, 0, 2), Segment(0, 2, 3), Segment(0, 3, 9), Segment(1, 9, 10)]
    tree = SegmentTree(segments, [ROOT, 0, 1, 1])
    assert list(tree.rows_before(3, 2)) == [(1, 2), (0, 1)]
    assert list(tree.rows_before(3, 5)) == [(1, 2), (0, 0)]
    assert list(tree.rows_before(0, 5)) == []
    assert (tree.before(3), list(tree.after(1)), list(tree.after(2))) == ([0, 1], [2, 3], [])
