"""What a refused command prints."""

from hf_flexseq.cli import main


def failed(argv, capsys, run=main, name="flexseq"):
    """The one line that a refused command prints."""
    capsys.readouterr()
    try:
        status = run(argv)
    except SystemExit as end:
        status = end.code
    shown = capsys.readouterr()
    assert status == 2
    assert shown.err.startswith(name)
    assert shown.err.count("\n") == 1
    assert len(shown.err) <= 301
    assert shown.err.rstrip("\n").isprintable()
    return shown.err
