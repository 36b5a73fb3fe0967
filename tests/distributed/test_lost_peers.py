"""Messages over gloo to and from ranks that are gone, on a stub of torch.distributed."""

from datetime import timedelta

import pytest
import torch

from hf_flexseq.distributed.gloo import GlooTransport
from hf_flexseq.distributed.transport import Lane, LostRank, Message
from tests.distributed.stub import StubDistributed, StubJob

CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)


def post(monkeypatch, gone, *, sends, recvs):
    """What rank 0 of 4 posts to and from these peers, in order, while some are gone."""
    job = StubJob(cpu="gloo")
    stub = StubDistributed(monkeypatch, rank=0, world_size=4, job=job, gone=gone)
    transport = GlooTransport(MINUTE, CPU)
    transport.post(
        Lane("ring", (0, 1, 2, 3)),
        sends=[Message(torch.ones(1), peer, 7) for peer in sends],
        recvs=[Message(torch.ones(1), peer, 7) for peer in recvs],
        label=lambda peer, sending: f"the words of rank {0 if sending else peer}",
    )
    return [message for group in stub.groups for batch in group.ran for message in batch]


def test_receives_are_posted_before_sends(monkeypatch):
    posted = post(monkeypatch, gone=(), sends=[1, 3], recvs=[3, 2])
    assert posted == [("recv", 3), ("recv", 2), ("send", 1), ("send", 3)]


@pytest.mark.parametrize(
    ("sends", "recvs", "what"),
    [
        ([1, 2, 3], [1, 2, 3], "receive from rank 2 the words of rank 2"),
        ([1, 2, 3], [1, 3], "send to rank 2 the words of rank 0"),
        ([2], [], "send to rank 2 the words of rank 0"),
    ],
)
def test_only_the_peer_that_is_gone_is_named_and_not_those_that_are_there(
    monkeypatch, sends, recvs, what
):
    with pytest.raises(LostRank) as raised:
        post(monkeypatch, gone=(2,), sends=sends, recvs=recvs)
    assert str(raised.value).startswith(f"rank 0 could not {what}: [/gloo/")
