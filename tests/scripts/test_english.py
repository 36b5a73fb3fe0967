"""The English of pages and docstrings: ten habits, each with a budget per 1,000 words.

Write a noun instead of a pronoun or a what-clause, a compound or "per" instead of "of", people or
programs as subjects, and the reason first. **A budget only falls**: whoever rewrites a text lowers
it to the new figure.
"""

import ast
import re

import pytest

from tests.programs import ROOT

THINGS = r"(?:ranks?|layers?|plans?|rows?|modules?|kernels?|steps?|tokens?|tensors?)"
WHOLES = r"(?:token|rank|step|micro-batch|layer|node|group|sequence|head)"
HABITS = {
    "a pronoun for a noun": r"\b(?:that|those) of\b",
    "a what-clause": r"\bwhat (?:an?|the|it|they|he|you|we|is|was|are|were|ha[sd]|have|can|may|"
    r"must|each|every|do|does|did|this|one|others?|ranks?|\w+(?:s|ed))\b",
    "things that lie or stand": r"\b(?:lies?|lay|stands?|stood) "
    r"(?:over|in|on|at|beside|behind|before)\b",
    "one that": r"\b(?:one|ones|all) (?:that|which)\b",
    "of instead of a compound": r"\b(?:bytes|tokens|seconds|numbers?|rows|memory|layers|sizes?) "
    rf"of (?:an?|each|every) (?:\w+ )?{WHOLES}\b",
    "of its own": r"\bof (?:its|their|one's|your) own\b",
    "things that act": rf"\b{THINGS} "
    r"(?:knows?|learns?|chooses?|wants?|asks?|says?|tells?|comes?|goes|go|gets?)\b",
    "an idiom": r"\b(?:without a word|in silence|begins? alike|by (?:it|them)sel(?:f|ves))\b",
    "there is": r"\bthere (?:is|are|was|were)\b",
    "the reason last": r", (?:since|for (?:it|they|its|their|the|a)|so that)\b",
}
PAGES, DOCSTRINGS = "docs/*.md", "hf_flexseq/**/*.py"
BUDGETS = {
    PAGES: (0.05, 0.15, 0.05, 0.05, 0.15, 0.4, 0.25, 0.25, 0.05, 0.2),
    DOCSTRINGS: (0.05, 0.05, 0.05, 0.4, 0.9, 0.4, 0.45, 0.2, 0.5, 0.95),
}
BAD = """Those of rank 0 stand in one that says what it is, since bytes of a token are of its own;
there is a row, and rows come by themselves."""


def prose(path):
    """The words of a page without its code, or of a module's docstrings and texts of fields."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " x ", text, flags=re.DOTALL)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    values = [node.value for node in nodes if isinstance(node.value, ast.Constant)]
    return "\n".join(one.value for one in values if isinstance(one.value, str))


def rates(pattern):
    """How often each habit occurs in 1,000 words of the files, and the places of each."""
    texts = {path.name: prose(path) for path in sorted(ROOT.glob(pattern))}
    count = sum(len(text.split()) for text in texts.values())
    places = {
        habit: [
            f"{name}: {found[0]}"
            for name, text in texts.items()
            for found in re.finditer(words, text, re.IGNORECASE)
        ]
        for habit, words in HABITS.items()
    }
    return {habit: 1000 * len(found) / count for habit, found in places.items()}, places


def test_each_habit_is_seen():
    assert [habit for habit, words in HABITS.items() if not re.search(words, BAD, re.I)] == []


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [PAGES, DOCSTRINGS])
def test_habits_keep_to_their_budgets(pattern):
    found, places = rates(pattern)
    for (habit, rate), budget in zip(found.items(), BUDGETS[pattern], strict=True):
        assert rate <= budget, f"{habit}: {rate:.3f} per 1,000 words; {places[habit][:40]}"
