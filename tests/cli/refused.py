"""What a refused command prints."""

from collections.abc import Callable

import pytest

from hf_flexseq.cli import main


def failed(
    argv: list[str],
    capsys: pytest.CaptureFixture[str],
    run: Callable[[list[str]], int] = main,
    name: str = "flexseq",
) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    try:
        status = run(argv)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    shown = capsys.readouterr()
    assert status == 2
    assert shown.err.startswith(name)
    assert shown.err.count("\n") == 1
    assert len(shown.err) <= 301
    assert shown.err.rstrip("\n").isprintable()
    return shown.err
