"""Commands in the test's process: their words are separated by spaces."""

import pytest

from hf_flexseq.cli import main
from tests.cli.refusal_output import failed


@pytest.fixture
def flexseq(capsys):
    """A function that runs a command and returns what it prints."""

    def run(words):
        capsys.readouterr()
        assert main(words.split()) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """A function that runs a command and returns the one line that it is refused with."""
    return lambda words: failed(words.split(), capsys)
