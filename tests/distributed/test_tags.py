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
from hf_flexseq.cost import HEAD_PIECES, PIECE_ROWS
from hf_flexseq.distributed import links
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import Capabilities, Lane, own_part
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import make_shard, remapped
from hf_flexseq.program import tags
from hf_flexseq.schedule import attention as schedule
from hf_flexseq.schedule.routing import MOST_PACKETS, NicFigures
from hf_flexseq.schedule.transfers import ring_fetches
from hf_flexseq.topology import Topology
from tests.plans import random_plan

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


def test_the_two_exchanges_of_every_turn_have_eight_tags_each():
    messages = []
    for turn in range(100):
        messages += [tags.ring_fetch(turn), tags.ring_return(turn)]
    assert messages == list(range(0, 1600, 8))


def test_zones_have_ranges_of_their_own_below_that_of_remapping():
    assert tags.zone_tag(0, 0) == 0
    assert tags.zone_tag(0, (1 << 17) - 1) == (1 << 17) - 1
    assert tags.zone_tag(1, 0) == 1 << 17
    assert tags.zone_tag(tags.MOST_ZONES - 1, (1 << 17) - 1) < tags.REMAP == 1 << 30
    for zone, message in ((-1, 0), (tags.MOST_ZONES, 0), (0, -1), (0, 1 << 17)):
        with pytest.raises(AssertionError, match="has no"):
            tags.zone_tag(zone, message)


def packet_tags(exchange_tag):
    """All tags that the packets of an exchange may take."""
    every = []
    for leg in range(3):
        for packet in range(MOST_PACKETS):
            first = tags.packet_tag(exchange_tag, leg, packet)
            every += range(first, first + tags.LEG_TAGS)
    return every


@pytest.mark.parametrize("zone", [0, 1, tags.MOST_ZONES - 1])
def test_packets_have_tags_of_their_own_in_the_upper_half_of_their_zone(zone):
    every = []
    for exchange in range(tags.EXCHANGES_IN_FLIGHT):
        every += packet_tags(tags.zone_tag(zone, 8 * exchange))
    assert len(set(every)) == len(every) == 16 * 3 * 8 * 64
    assert min(every) >= tags.zone_tag(zone, 1 << 16)
    assert max(every) <= tags.zone_tag(zone, (1 << 17) - 1)


def test_packets_repeat_after_the_exchanges_in_flight():
    assert packet_tags(0) == packet_tags(16 * 8)
    with pytest.raises(AssertionError, match="lies where the tags of packets do"):
        tags.packet_tag(1 << 16, 0, 0)
    with pytest.raises(AssertionError, match="no leg 3"):
        tags.packet_tag(0, 3, 0)
    with pytest.raises(AssertionError, match=f"no packet {MOST_PACKETS}"):
        tags.packet_tag(0, 0, MOST_PACKETS)


def test_remapping_lies_between_all_zones_and_the_links():
    every = packet_tags(tags.REMAP)
    assert len(set(every)) == len(every)
    assert min(every) >= tags.REMAP + tags.EXCHANGE_TAGS
    assert max(every) < tags.LINKS == 3 << 29


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
    ring_fetches.cache_clear()
    yield
    ring_fetches.cache_clear()


def run_rank(wire, micro_batch, lengths, rank, topology, *, links):
    """One rank's forward and backward of one layer; the strategies of its zones."""
    shard = make_shard(micro_batch, lengths, rank)
    if micro_batch.remap:
        shard = remapped(shard, micro_batch, lengths, topology)
    if shard.zones or shard.moves:
        transport = WireTransport(wire, rank, topology.world_size)
        communicator = Communicator(topology, transport=transport)
        kernel = choose_kernel(CPU, torch.float32, 4)
        seq_ctx = SequenceContext(shard, communicator, kernel, CPU, links=links)
        q = torch.zeros(shard.linear_tokens, 12, 4, requires_grad=True)
        kv = q[:, :4]
        sequence_parallel_attention(q, kv, kv, seq_ctx).sum().backward()
    return [zone.group.strategy for zone in shard.zones]


USED = {  # by strategy, the messages of its zones
    "ulysses": range(8),
    "zigzag": range(1 << 16),
    "balanced": range(1 << 16),
    "hybrid": range(1 << 16),
}
PACKETS = range(1 << 16, (1 << 16) + 24576)


def assert_in_range(tag, strategies, *, routed):
    """A tag belongs to remapping or to a zone whose strategy uses it."""
    if tag >= tags.REMAP:
        message = tag - tags.REMAP
        assert message < 8 or (routed and message in PACKETS)
        return
    zone, message = divmod(tag, 1 << 17)
    used = USED[strategies[zone]]
    may_be_routed = routed and strategies[zone] in ("zigzag", "balanced")
    assert message in used or (may_be_routed and message in PACKETS)


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


@pytest.mark.parametrize("routed", [False, True], ids=["straight", "routed"])
def test_messages_under_way_together_differ_and_stay_in_range(routed, large):
    wire = Wire()
    topology = Topology(nodes=2, ranks_per_node=3)
    # Over these every transfer that leaves a NIC idle is routed.
    figures = NicFigures(
        ranks_per_node=3, nics_per_node=3, inside_s=1e-15, across_s=1e-9, transfer_s=0.0
    )
    seen, users = set(), Counter()
    for micro_batch, lengths in drawn(random.Random(routed), topology):
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
                links=figures if routed else None,
            )
            users.update(strategies[rank])
            assert not +wire.open, "a rank does not wait for all of its transfers"
        assert wire.sent == wire.received, "the two sides do not post equal tags in one order"
        for source, _, tag in wire.sent:
            assert_in_range(tag, strategies[source], routed=routed)
            seen.add(tag)
    assert set(users) == {"local", *USED}, "a strategy was not drawn"
    assert wire.most_open > 10
    assert any(tag >= tags.REMAP for tag in seen), "no micro-batch was remapped"
    assert any(tag < tags.REMAP and tag % (1 << 17) in PACKETS for tag in seen) == routed
