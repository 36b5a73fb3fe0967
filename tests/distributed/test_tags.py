"""The table of tags: functions stay in their ranges, and messages under way together differ.

The second half runs the attention of every rank of random plans, one rank after the other in this
process. Transfers move nothing and are only written down, which is enough: what a rank posts and
waits for, and in which order, depends on the plan alone.
"""

import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from hf_flexseq.attention import SequenceContext, sequence_parallel_attention
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import HEAD_PIECES, PIECE_ROWS
from hf_flexseq.distributed import links
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import Capabilities, Lane, own_part
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan import attention_schedule as schedule
from hf_flexseq.plan.shard import make_shard
from hf_flexseq.program import tags
from hf_flexseq.program.ring_steps import WORTHY_PAIRS
from hf_flexseq.published.zeppelin.routes import routed_posts
from tests.plans import random_plan
from tests.published.zeppelin.always import Always

CPU = torch.device("cpu")

# ---- the functions, against the numbers of the table


def test_pieces_of_heads_have_tags_of_their_own():
    pieces = range(HEAD_PIECES)
    messages = [tags.seq_to_head(piece) for piece in pieces]
    messages += [tags.head_to_seq(piece) for piece in pieces]
    assert len(set(messages)) == 2 * HEAD_PIECES
    assert set(messages) <= set(range(8))
    for function in (tags.seq_to_head, tags.head_to_seq):
        with pytest.raises(AssertionError, match="no piece"):
            function(HEAD_PIECES)


def test_the_two_exchanges_of_every_ring_step_have_eight_tags_each():
    messages = []
    for step in range(100):
        messages += [tags.ring_fetch(step), tags.ring_return(step)]
    assert messages == list(range(0, 1600, 8))


def test_zones_have_ranges_of_their_own_below_that_of_passes():
    assert tags.zone_tag(0, 0) == 0
    assert tags.zone_tag(0, (1 << 17) - 1) == (1 << 17) - 1
    assert tags.zone_tag(1, 0) == 1 << 17
    assert (
        tags.zone_tag(tags.MOST_ZONES - 1, (1 << 17) - 1)
        < tags.PASS_TAGS
        == 1 << 30
        < tags.LINKS
        == 3 << 29
    )
    for zone, message in ((-1, 0), (tags.MOST_ZONES, 0), (0, -1), (0, 1 << 17)):
        with pytest.raises(AssertionError, match="has no"):
            tags.zone_tag(zone, message)


class RecordingTransport:
    """Writes the tags of posts down instead of posting."""

    def __init__(self):
        self.tags = []

    def post(self, lane, *, sends, recvs, label):
        self.tags += [message.tag for message in (*sends, *recvs)]
        return SimpleNamespace(wait=lambda: None)


def test_both_sides_of_a_link_count_its_messages():
    transport, lane = RecordingTransport(), Lane("hidden states", (0, 1))
    one = links.StageLink(transport, lane, 1, links.HIDDEN_STATES)
    other = links.StageLink(transport, lane, 0, links.HIDDEN_STATES)
    for elements in (3, 0, 2):  # a message without elements is counted but not posted
        one.send(torch.zeros(elements)).wait()
        other.receive(torch.zeros(elements)).wait()
    first = tags.LINKS
    assert transport.tags == [first, first, first + 4, first + 4]


def test_tags_of_links_stay_in_range_and_differ_by_kind():
    last = (1 << 28) - 1
    assert tags.link_tag(0, last) == (1 << 31) - 2
    assert tags.link_tag(1, last) == (1 << 31) - 1
    assert tags.link_tag(0, last + 1) == tags.LINKS
    with pytest.raises(AssertionError, match="no kind 2"):
        tags.link_tag(2, 0)


# ---- calls of every user


class Wire:
    """What ranks post and wait for, and what is wrong about it."""

    def __init__(self):
        # (rank, "send" or "receive", peer, tag) -> messages posted and not yet waited for
        self.open = Counter()
        # (source, target, tag) -> elements of the messages, in the order of posting on that side
        self.sent, self.received = defaultdict(list), defaultdict(list)
        self.most_open = 0

    def post(self, rank, sends, recvs):
        messages = []
        for way, transfers in (("receive", recvs), ("send", sends)):
            for message in transfers:
                assert 0 <= message.tag < 1 << 31
                key = (rank, way, message.peer, message.tag)
                assert not self.open[key], f"two messages at once: {key}"
                self.open[key] += 1
                messages.append(key)
                elements = message.tensor.numel()
                if way == "send":
                    self.sent[rank, message.peer, message.tag].append(elements)
                else:
                    self.received[message.peer, rank, message.tag].append(elements)
                    message.tensor.zero_()
        self.most_open = max(self.most_open, self.open.total())
        return SimpleNamespace(wait=lambda: self.open.subtract(messages))


class WireTransport:
    """Every message of a rank written down instead of sent."""

    capabilities = Capabilities(ordered=False, waits_on_stream=False)

    def __init__(self, wire, rank, world_size):
        self.wire, self.rank, self.world_size = wire, rank, world_size

    def open_lane(self, kind, parts, *, peers=()):
        return Lane(kind, own_part(parts, self.rank))

    def post(self, lane, *, sends, recvs, label):
        return self.wire.post(self.rank, sends, recvs)


@pytest.fixture(params=[1, 1024], ids=["chunk by chunk", "together"])
def large(request, monkeypatch):
    """Whether these short sequences travel chunk by chunk and piece by piece, as long ones do."""
    monkeypatch.setitem(schedule.LARGE, "cpu", request.param)
    if request.param == 1:
        monkeypatch.setitem(PIECE_ROWS, "cpu", 1)
    monkeypatch.setitem(WORTHY_PAIRS, "cpu", 1)  # steps that are not joined leave NICs idle
    routed_posts.cache_clear()
    yield
    routed_posts.cache_clear()


def run_rank(wire, micro_batch, lengths, rank, topology, *, passes):
    """One rank's forward and backward of one layer; the strategies of its zones."""
    shard = make_shard(micro_batch, lengths, rank)
    if passes is not None:
        shard = passes.shard(micro_batch, lengths, rank)
    if shard.zones or shard.tokens:
        transport = WireTransport(wire, rank, topology.world_size)
        communicator = Communicator(topology, transport=transport)
        kernel = choose_kernel(CPU, torch.float32, 4)
        seq_ctx = SequenceContext(shard, communicator, kernel, CPU, passes=passes)
        q = torch.zeros(shard.tokens, 12, 4, requires_grad=True)
        kv = q[:, :4]
        sequence_parallel_attention(q, kv, kv, seq_ctx).sum().backward()
    return [zone.group.strategy for zone in shard.zones]


USED = {  # by strategy, the messages of its zones
    "ulysses": range(8),
    "zigzag": range(1 << 16),
    "balanced": range(1 << 16),
    "hybrid": range(1 << 16),
}
OF_PASSES = range(1 << 16, 1 << 17)


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
        lengths = (200, 60, 60)
        ranks = tuple(range(topology.world_size))
        group = Group(ranks=ranks, sequences=(0, 1, 2), strategy=strategy)
        yield MicroBatch(groups=(group,)), lengths
    for _ in range(8):
        lengths = [rng.choice((1, 2, 5, 13, 60, 200)) for _ in range(rng.randint(2, 9))]
        plan = random_plan(
            lengths, topology.world_size, rng, nodes=topology.nodes, micro_batches=1
        )
        yield plan.micro_batches[0], plan.lengths


@pytest.mark.parametrize("with_passes", [False, True], ids=["straight", "with passes"])
def test_messages_under_way_together_differ_and_stay_in_range(with_passes, large):
    wire = Wire()
    topology = Topology(nodes=2, ranks_per_node=3)
    passes = Always(topology) if with_passes else None
    seen, users = set(), Counter()
    for micro_batch, lengths in drawn(random.Random(with_passes), topology):
        wire.sent.clear()
        wire.received.clear()
        strategies = {}  # by rank
        for rank in range(topology.world_size):
            strategies[rank] = run_rank(
                wire,
                micro_batch,
                lengths,
                rank,
                topology,
                passes=passes,
            )
            users.update(strategies[rank])
            assert not +wire.open, "a rank does not wait for all of its transfers"
        assert wire.sent == wire.received, "the two sides do not post equal tags in one order"
        for source, _, tag in wire.sent:
            assert_in_range(tag, strategies[source], with_passes=with_passes)
            seen.add(tag)
    assert set(users) == {"local", *USED}, "a strategy was not drawn"
    assert wire.most_open > 10
    assert any(tag >= tags.PASS_TAGS for tag in seen) == with_passes
    of_passes = [tag for tag in seen if tag < tags.PASS_TAGS and tag % (1 << 17) in OF_PASSES]
    assert bool(of_passes) == with_passes
