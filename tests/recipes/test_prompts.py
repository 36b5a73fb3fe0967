"""Prompts: those that are made, what becomes of long ones, and the rewards of their answers."""

import pytest
from datasets import Dataset

from arguments import PromptArguments
from prompts import PLACES, counting_prompts, to_prompts
from rewards import check_columns, counts_on, exact, load_rewards

CHAT = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>"
CHAT += "{% endif %}"


def test_made_prompts_are_digits_always_the_same_and_have_a_long_tail():
    rows = list(counting_prompts(400))
    assert rows == list(counting_prompts(400))
    for row in rows:
        assert row["prompt"].isdecimal()
        last = int(row["prompt"][-1])
        said = "".join(str((last + i) % 10) for i in range(1, PLACES + 1))
        assert counts_on([row["prompt"]], [said], [row["places"]]) == [1.0]
    lengths = sorted(len(row["prompt"]) for row in rows)
    assert lengths[200] < 24
    assert lengths[-1] > 150


def test_long_prompts_are_refused_or_dropped(tokenizer):
    prompts = Dataset.from_list([{"prompt": "x" * n, "answer": str(n)} for n in (1, 2, 90)])
    said = "1 of 3 prompts are longer than max_prompt_length=20 tokens: set"
    with pytest.raises(ValueError, match=said):
        to_prompts(prompts, tokenizer, PromptArguments(max_prompt_length=20))
    dropping = PromptArguments(max_prompt_length=20, long_prompts="drop")
    kept, report = to_prompts(prompts, tokenizer, dropping)
    assert kept["answer"][:] == ["1", "2"]
    assert report == "2 prompts of at most 20 tokens (1 longer ones dropped)"
    with pytest.raises(ValueError, match="no prompt is left of 1"):
        to_prompts(prompts.select([2]), tokenizer, dropping)


# ---- rewards


def test_counting_on_is_the_share_of_places_with_the_next_digit():
    """Also where the digit before it is wrong."""
    for prompt, places, scores in (
        (
            "12307",
            4,
            {"8901": 1.0, "8902": 0.75, "89": 0.5, "89012345": 0.5, "": 0.0, "7777": 0.0},
        ),
        ("7", 4, {"3456": 0.75}),
        ("x", 1, {"1": 0.0}),
        ("", 1, {"1": 0.0}),
    ):
        for said, score in scores.items():
            found = counts_on(prompts=[prompt], completions=[said], places=[places], answer=said)
            assert found == [score], (prompt, said)


def test_functions_are_named_or_come_from_a_module_or_a_file(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(completions, **columns):\n    return [1]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["."])
    names = ["counts_on", "my_rewards.py:short", "my_rewards:short"]
    named, of_file, of_module = load_rewards(names)
    assert named is counts_on
    assert of_file(completions=["x"]) == of_module(completions=["x"]) == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("correct", "unknown reward function 'correct': take one of counts_on, exact, or give"),
        (":short", "unknown reward function ':short'"),
        ("no_such_module:short", "No module named 'no_such_module'"),
        ("no/such/file.py:short", "'no/such/file.py': no such file"),
        ("json:short", "json has no function 'short'"),
    ],
)
def test_a_function_that_is_not_there_is_refused_by_name(name, message):
    with pytest.raises(ValueError, match=message):
        load_rewards([name])


def test_a_function_needs_the_columns_that_it_reads():
    def given(completions, prompts, trainer_state, limit=3, **columns): ...

    def prompted(completions, prompt): ...

    names, rewards = ["exact", "counts_on"], [exact, counts_on]
    check_columns(names, rewards, ["prompt", "answer", "places"])
    with pytest.raises(ValueError, match="'exact' needs a column 'answer': the dataset has"):
        check_columns(names, rewards, ["prompt", "places"])
    check_columns(["given"], [given], ["prompt"])
    with pytest.raises(ValueError, match="'prompted' needs a column 'prompt'"):
        check_columns(["prompted"], [prompted], ["prompt"])
