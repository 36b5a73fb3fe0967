import pytest

from hf_flexseq.program import heads, turns


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Heads come and go in pieces, and turns of rings are not joined, also where so few tokens
    would not be worth it."""
    monkeypatch.setitem(heads.PIECE_ROWS, "cpu", 0.01)
    monkeypatch.setitem(turns.WORTHY_PAIRS, "cpu", 1)
