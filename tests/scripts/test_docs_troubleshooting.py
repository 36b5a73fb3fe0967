"""Every error that docs/troubleshooting.md quotes is one that the code prints."""

import ast
import re
from functools import cache

import pytest

from tests.programs import ROOT
from tests.scripts.docs_blocks import FENCE

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [text.strip() for language, _, text in FENCE.findall(PAGE) if language == "text"]
OF_OTHERS = ["torch.OutOfMemoryError: CUDA out of memory."]
SHORTEST = 20  # letters of a string that say which message it is
LEAST = 0.25  # share of a message that is the same whatever is filled in


@cache
def patterns():
    """A pattern for each string of the package and the recipes: a group for each constant part."""
    found = set()
    for folder in ("hf_flexseq", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            for parts in strings_of(ast.parse(path.read_text(encoding="utf-8"))):
                if sum(map(len, parts)) >= SHORTEST:
                    found.add(".+?".join(f"({re.escape(part)})" for part in parts))
    return [re.compile(pattern) for pattern in sorted(found)]


def strings_of(node):
    """The strings below a node, each as its parts before, between and behind what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield [node.value]
    elif isinstance(node, ast.JoinedStr):
        texts = [""]
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts[-1] += part.value
            else:
                texts.append("")
        yield texts
    else:
        for below in ast.iter_child_nodes(node):
            yield from strings_of(below)


def is_printed(message):
    """Whether the strings of the code that are whole in a message make enough of it up."""
    covered = set()
    for pattern in patterns():
        match = pattern.search(message)
        if match is not None:
            for group in range(1, pattern.groups + 1):
                covered |= set(range(*match.span(group)))
    return len(covered) >= LEAST * len(message)


def test_there_are_about_25():
    assert 25 <= len(QUOTED) <= 30
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.slow
@pytest.mark.parametrize("message", [one for one in QUOTED if one not in OF_OTHERS])
def test_a_quoted_error_is_one_of_the_code(message):
    assert is_printed(message)


def test_a_message_with_other_words_is_noticed():
    message = next(one for one in QUOTED if "has no hf_flexseq options" in one)
    assert is_printed(message)
    assert not is_printed(message.replace("has no hf_flexseq", "lacks hf_flexseq"))
    assert not is_printed(message.removesuffix(message[-20:]))
