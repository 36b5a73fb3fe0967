"""The table of tags: functions stay in their ranges, and messages under way together differ.

The second half goes through the programs of every rank of random plans: what a rank posts and
waits for, and in which order, depends on the plan alone. `tests/attention/test_never_hangs.py`
shows that both ends of a message have the same tag.
"""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed import links
from hf_flexseq.distributed.transport import Lane
from hf_flexseq.plan import attention_schedule as schedule
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import tags
from hf_flexseq.program.heads import PIECE_ROWS
from hf_flexseq.program.instructions import LayerShape
from hf_flexseq.published.zeppelin.routes import routed_posts
from tests.plans import one_group, random_plan
from tests.program.rank_programs import TRANSFERS, messages_of, programs_of
from tests.published.zeppelin.gainful_passes import Always

# ---- the functions, against the numbers of the table


class RecordingTransport:
    """Writes the tags of posts down instead of posting."""

    def __init__(self):
        self.tags = []

    def post(self, lane, *, sends, recvs, label):
        self.tags += [message.tag for message in (*sends, *recvs)]
        return SimpleNamespace(wait=lambda: None)


def test_both_sides_of_a_link_count_its_messages():
    transport, lane = RecordingTransport(), Lane("hidden states", (0, 1))
    one, other = (links.StageLink(transport, lane, peer, links.HIDDEN_STATES) for peer in (1, 0))
    for elements in (3, 0, 2):  # a message without elements is counted but not posted
        one.send(torch.zeros(elements)).wait()
        other.receive(torch.zeros(elements)).wait()
    assert transport.tags == [tags.LINKS, tags.LINKS, tags.LINKS + 4, tags.LINKS + 4]


def test_tags_of_links_stay_in_range_and_differ_by_kind():
    last = (1 << 28) - 1
    assert tags.link_tag(0, last) == (1 << 31) - 2
    assert tags.link_tag(1, last) == (1 << 31) - 1
    assert tags.link_tag(0, last + 1) == tags.LINKS
    with pytest.raises(AssertionError, match="no kind 2"):
        tags.link_tag(2, 0)


# ---- programs of every user

SHAPE = LayerShape(query_heads=12, kv_heads=4, head_dim=4, dtype="float32")
USED = {  # by strategy, the messages of its zones
    "ulysses": range(8),
    "zigzag": range(1 << 16),
    "balanced": range(1 << 16),
    "hybrid": range(1 << 16),
}
OF_PASSES = range(1 << 16, 1 << 17)


@pytest.fixture(params=[1, 1024], ids=["chunk by chunk", "together"])
def large(request, monkeypatch):
    """Whether these short sequences travel chunk by chunk and piece by piece, as long ones do."""
    monkeypatch.setitem(schedule.LARGE, "cpu", request.param)
    if request.param == 1:
        monkeypatch.setitem(PIECE_ROWS, "cpu", 1)
    routed_posts.cache_clear()
    yield
    routed_posts.cache_clear()


def most_open(program, strategies, *, with_passes):
    """The most messages of a program that are under way together; they must differ."""
    posts = {}  # by number: whether it is sent, peer and tag of each message
    most = 0
    for one in program.instructions:
        if one.operation == "wait":
            del posts[one.constants[0]]
        if one.operation in TRANSFERS:
            posts[one.constants[0]] = [end[:3] for end in messages_of(one, program, SHAPE)]
            under_way = [message for messages in posts.values() for message in messages]
            assert len(set(under_way)) == len(under_way), "two messages at once"
            most = max(most, len(under_way))
            for _, _, tag in posts[one.constants[0]]:
                assert_in_range(tag, strategies, with_passes=with_passes)
    assert not posts, "a rank does not wait for all of its transfers"
    return most


def assert_in_range(tag, strategies, *, with_passes):
    """A tag belongs to a pass or to a zone whose strategy uses it."""
    if tag >= tags.PASS_TAGS:
        assert with_passes
        assert tag - tags.PASS_TAGS < 8
        return
    zone, message = divmod(tag, 1 << 17)
    may_be_routed = with_passes and strategies[zone] == "zigzag"
    assert message in USED[strategies[zone]] or (may_be_routed and message in OF_PASSES)


def drawn(rng, topology):
    """(micro-batch, lengths) of rings over all ranks, and of random plans."""
    for strategy in ("zigzag", "balanced"):
        yield one_group(range(topology.world_size), 3, strategy), (200, 60, 60)
    for _ in range(8):
        lengths = [rng.choice((1, 2, 5, 13, 60, 200)) for _ in range(rng.randint(2, 9))]
        plan = random_plan(
            lengths, topology.world_size, rng, nodes=topology.nodes, micro_batches=1
        )
        yield plan.micro_batches[0], plan.lengths


@pytest.mark.parametrize("with_passes", [False, True], ids=["straight", "with passes"])
def test_messages_under_way_together_differ_and_stay_in_range(with_passes, large):
    topology = Topology(nodes=2, ranks_per_node=3)
    passes = Always(topology) if with_passes else None
    users, most, kinds = set(), 0, Counter()
    for micro_batch, lengths in drawn(random.Random(with_passes), topology):
        shards = [make_shard(micro_batch, lengths, rank) for rank in range(topology.world_size)]
        options = {"device": "cpu", "passes": passes}
        for programs in programs_of(micro_batch, lengths, topology, SHAPE, **options).values():
            for rank, program in programs.items():
                strategies = [zone.group.strategy for zone in shards[rank].zones]
                users |= set(strategies)
                most = max(most, most_open(program, strategies, with_passes=with_passes))
                for one in program.instructions:
                    for _, _, tag, _ in messages_of(one, program, SHAPE):
                        kinds[tag < tags.PASS_TAGS, tag % (1 << 17) in OF_PASSES] += 1
    assert users == {"local", *USED}, "a strategy was not drawn"
    assert most > 10
    # messages of passes over a program, and of passes over the posts of zones
    assert bool(kinds[False, False]) == bool(kinds[True, True]) == with_passes
