"""Files that are too long, too deep or no text are refused in one line, while they are read."""

import gzip
import json
import os
import pickle
import threading
from contextlib import suppress

import pytest

from hf_flexseq.base.reading import Limits, parse_json, read_text

SMALL = Limits(bytes=1000)


def test_text_is_read_gzipped_or_not(tmp_path):
    (tmp_path / "a").write_text("für\n")
    (tmp_path / "a.gz").write_bytes(gzip.compress("für\n".encode()))
    assert read_text(tmp_path / "a") == read_text(tmp_path / "a.gz") == "für\n"
    (tmp_path / "whole").write_bytes(b"x" * 1000)
    assert len(read_text(tmp_path / "whole", SMALL)) == 1000


@pytest.mark.parametrize("name", ["long.txt", "archive.gz", "/dev/zero"])
def test_what_is_too_long_is_refused_with_the_option_that_raises_the_limit(tmp_path, name):
    (tmp_path / "long.txt").write_bytes(b"x" * 1001)
    (tmp_path / "archive.gz").write_bytes(gzip.compress(b"0" * 10**6, mtime=0))
    with pytest.raises(ValueError, match="is 1,000 bytes, raise it with --limit bytes="):
        read_text(tmp_path / name, SMALL)


def test_the_limit_holds_for_a_pipe_without_an_end(tmp_path):
    """Its writer is stopped by the reader that has seen enough."""
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with suppress(BrokenPipeError), (tmp_path / "pipe").open("wb") as pipe:
            while True:
                pipe.write(b"1\n" * 1000)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with pytest.raises(ValueError, match="too long"):
        read_text(tmp_path / "pipe", SMALL)
    writer.join(timeout=30)
    assert not writer.is_alive()


@pytest.mark.parametrize(
    "name, data",
    [
        ("binary", b"\xff\xfe\x00"),
        ("pickle", pickle.dumps([1])),
        ("no.gz", b"1\n2\n"),
        ("torn.gz", gzip.compress(b"1\n" * 100, mtime=0)[:-9]),
        ("bent.gz", gzip.compress(bytes(range(100)), mtime=0)[:12] + b"\xff" * 40),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match="is no") as caught:
        read_text(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 100_000, "too deep|lists and objects"),
        ("[" * 100_000 + "]" * 100_000, "lists and objects|too deep"),
        ('{"a":' * 900, "too deep|not JSON"),
        ("NaN", "NaN is not a number"),
        ('{"a": [-Infinity]}', "-Infinity is not a number"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ("9" * 5000, "4300 digits"),
        ('{"a": 1', "is not JSON"),
        ("", "is not JSON"),
    ],
)
def test_json_that_is_none_or_means_two_things_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_more_lists_than_memory_holds_are_counted_before_they_are_made():
    text = json.dumps([[]] * 1000)
    with pytest.raises(ValueError, match="1,001 lists and objects, more than 1,000") as bad:
        parse_json(text, SMALL)
    enough = int(str(bad.value).rpartition("bytes=")[2])
    assert parse_json(text, Limits(bytes=enough)) == [[]] * 1000


def test_limits_are_whole_numbers_and_positive():
    with pytest.raises(ValueError, match="ranks=0: must be at least 1"):
        Limits(ranks=0)
