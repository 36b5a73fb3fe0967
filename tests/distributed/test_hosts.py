"""Nodes as launchers and host names tell them."""

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.distributed import hosts
from hf_flexseq.distributed.hosts import last_error, topology_of
from hf_flexseq.distributed.lone_rank import LoneTransport


class Answers:
    """A transport on whose host all ranks have answered."""

    def __init__(self, sizes, names):
        self.world_size = len(names)
        self.cpu_group = self
        self._answers = list(zip(sizes, names, strict=True))

    def gather_values(self, own):
        return self._answers


@pytest.mark.parametrize(
    ("sizes", "names", "nodes"),
    [
        (["2"] * 4, "aabb", 2),
        ([None] * 6, "aabbcc", 3),
        (["2"] * 4, "aaaa", 2),  # several nodes emulated on one machine
    ],
)
def test_the_launcher_says_how_many_ranks_a_node_has_or_else_host_names(sizes, names, nodes):
    assert topology_of(Answers(sizes, names)) == Topology(nodes=nodes, ranks_per_node=2)


@pytest.mark.parametrize(
    ("sizes", "names", "message"),
    [
        (["2"] * 4, "abcd", "LOCAL_WORLD_SIZE=2 .* ranks 0 to 1 .* on a, b:"),
        (["4"] * 4, "aabb", "LOCAL_WORLD_SIZE=4 .* ranks 0 to 3 .* on a, b:"),
        (["2"] * 4, "abab", "ranks 0 to 1 share a node, but they are on a, b:"),
        (["3", "3", "3", "1"], "aaab", r"differs .*\(3, 1\).* a: 3, b: 1; start"),
        (["2", "2", None, None], "aabb", r"differs .*\(2, None\).* a: 2, b: 2"),
        (["3"] * 4, "aaaa", "4 ranks cannot be spread evenly over nodes of 3"),
        ([None] * 4, "aaab", "spread evenly over nodes of 3"),
        ([None] * 4, "abba", "ranks 0 to 1 should share a machine.*a, b, b, a"),
        (["two"] * 2, "aa", "LOCAL_WORLD_SIZE='two': expected a number"),
        (["0"] * 2, "aa", "2 ranks cannot be spread evenly over nodes of 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(sizes, names, message):
    with pytest.raises(ValueError, match=message) as raised:
        topology_of(Answers(sizes, names))
    assert "\n" not in str(raised.value)


def test_a_rank_answers_with_its_environment_and_its_host(monkeypatch):
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "a")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert topology_of(LoneTransport()) == Topology(nodes=1, ranks_per_node=1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert topology_of(LoneTransport()) == Topology(nodes=1, ranks_per_node=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    with pytest.raises(ValueError, match="'none': expected a number"):
        topology_of(LoneTransport())


ELASTIC = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====================
  error_file: <N/A>
====================="""


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (f"[rank1]: Traceback:\n[rank1]: ValueError: no luck\nW1126 stopped\n{ELASTIC}\n",
         "ValueError: no luck"),
        ("a.b.LostRank: rank 0 lost rank 1\n", "a.b.LostRank: rank 0 lost rank 1"),
        ("one\ntwo\n\nthree\nfour\n", "two / three / four"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_last_error_of_ranks_is_theirs_and_not_their_launcher_s(said, found):
    assert last_error(said) == found
