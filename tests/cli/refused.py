"""What a refused command prints."""

import pytest

from hf_flexseq.cli import main


def failed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    try:
        status = main(argv)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert status == 2
    assert shown.err.startswith("flexseq")
    assert shown.err.count("\n") == 1
    assert len(shown.err) <= 301
    assert shown.err.rstrip("\n").isprintable()
    return shown.err
