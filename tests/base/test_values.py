"""Values that come from outside: what is taken, and how anything else is named."""

import math

import pytest

from hf_flexseq.base import values


@pytest.mark.parametrize("value", [True, None, "3", 3.0, [3], -1, 11, 10**4000])
def test_other_than_whole_numbers_in_bounds_are_named_in_one_line(value):
    with pytest.raises(ValueError, match="count=") as caught:
        values.whole("count", value, most=10)
    assert len(str(caught.value)) < values.LINE


@pytest.mark.parametrize("value", [True, None, "3", math.nan, math.inf, -math.inf, -0.5, 10**400])
def test_other_than_finite_numbers_in_bounds_are_refused(value):
    with pytest.raises(ValueError, match="seconds=.*must"):
        values.number("seconds", value, most=1e9)


def test_numbers_at_their_bounds_are_taken():
    assert values.whole("count", 10, least=10, most=10) == 10
    assert values.number("seconds", 1e9, most=1e9) == 1e9
    assert values.positive("bytes", 5e-324) == 5e-324
    assert values.wholes("ids", [], most=3) == ()
    with pytest.raises(ValueError, match="bytes=0.0: must be positive"):
        values.positive("bytes", 0.0)


@pytest.mark.parametrize("ids", [[0, True], [0, 1.0], [0, -1], [0, 4], [0, None], "01", {"0": 1}])
def test_a_list_of_whole_numbers_holds_nothing_else(ids):
    with pytest.raises(ValueError, match="ids"):
        values.wholes("ids", ids, most=3)


@pytest.mark.parametrize("text", ["\x1b[31m", "two\nlines", "\u202eleft", "\ud800", "x" * 201, 3])
def test_a_name_acts_on_no_terminal(text):
    with pytest.raises(ValueError, match="name=") as caught:
        values.word("name", text)
    assert str(caught.value).isprintable()


def test_a_quoted_value_is_short_however_deep_and_long_it_is():
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, [0] * 10**6, {"k": "v" * 10**6}, "y" * 10**6, 10**3000, b"\x1b" * 1000):
        assert len(values.quoted(value)) < values.LINE
        assert values.quoted(value).isprintable()


def test_a_message_is_one_printable_line():
    assert values.one_line("a\n b\x1b[0m") == "a b\\x1b[0m"
    assert len(values.one_line("x" * 1000)) == values.LINE
    assert values.one_line("x" * 1000).endswith("...")


@pytest.mark.parametrize(
    "record, message",
    [
        ({"a": 1}, r"not a thing: missing keys \['b'\]"),
        ({"a": 1, "b": 2, "d": 3}, r"not a thing: unknown keys \['d'\]"),
        ({"a": 1, "b": 2, "version": 2}, "a thing of version 2: this hf_flexseq reads version 1"),
        ([1], "a JSON object, got list"),
    ],
)
def test_keys_that_are_missing_or_unknown_are_named(record, message):
    needed = {"needed": ("a", "b"), "optional": ("c",)}
    good = {"a": 1, "b": 2, "version": 1}
    assert values.fields_of(good, "a thing", **needed) == good
    with pytest.raises(ValueError, match=message):
        values.fields_of(record, "a thing", **needed)
