"""The segments of recurrent layers in their trees: paths, and what is folded. That every row goes
through its own segments is shown by `tests/attention/recurrent`."""

from hf_flexseq.plan.segments import Segment, SegmentTree, segments_of
from hf_flexseq.plan.units import ROOT
from tests.plans import shards_of


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
