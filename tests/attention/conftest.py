import pytest

from hf_flexseq.program import heads


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Heads come and go in pieces also where so few tokens would not be worth it."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cpu", 0.01)
