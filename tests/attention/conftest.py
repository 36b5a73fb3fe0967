import pytest

from hf_flexseq.attention import bound_programs
from hf_flexseq.program import heads
from tests.attention.strict_operations import StrictFused
from tests.device import DEVICE


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Heads come in pieces across nodes, also where so few tokens would not be worth it."""
    monkeypatch.setitem(heads.PIECE_ROWS, DEVICE.type, 1)


@pytest.fixture(autouse=True)
def strict_operations(monkeypatch):
    """What a GPU could not do fails on the CPU, too."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(bound_programs, "choose_fused", lambda device: StrictFused())
