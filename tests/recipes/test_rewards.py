"""Rewards: the rules that are there, and functions of one's own."""

import pytest

from rewards import check_columns, counts_on, exact, load_rewards, text_of


def test_counting_on_is_the_share_of_places_with_the_next_digit():
    said = ["8901", "8902", "89", "89012345", "", "7777"]
    assert counts_on(prompts=["12307"] * 6, completions=said, places=[4] * 6, answer=said) == [
        1.0,
        0.75,
        0.5,
        0.5,
        0.0,
        0.0,
    ]


def test_a_digit_counts_on_from_the_one_before_also_where_that_was_wrong():
    assert counts_on(prompts=["7"], completions=["3456"], places=[4]) == [0.75]
    assert counts_on(prompts=["x", ""], completions=["1", "1"], places=[1, 1]) == [0.0, 0.0]


def test_exact_leaves_whitespace_around_an_answer_aside():
    assert exact(completions=["42", " 42\n", "4 2"], answer=["42"] * 3) == [1.0, 1.0, 0.0]


def test_a_conversation_is_what_its_messages_say():
    said = [{"role": "assistant", "content": "42"}]
    assert text_of(said) == "42"
    assert exact(completions=[said], answer=["42"]) == [1.0]


def test_functions_are_named_or_come_from_a_module_or_a_file(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def short(completions, **columns):\n    return [1]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["."])
    named, of_file, of_module = load_rewards(
        ["counts_on", "my_rewards.py:short", "my_rewards:short"]
    )
    assert named is counts_on
    assert of_file(completions=["x"]) == of_module(completions=["x"]) == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "correct",
            "there is no reward function 'correct': take one of counts_on, exact, or give",
        ),
        (":short", "there is no reward function ':short'"),
        ("no_such_module:short", "No module named 'no_such_module'"),
        ("no/such/file.py:short", "'no/such/file.py': there is no such file"),
        ("json:short", "json has no function 'short'"),
    ],
)
def test_a_function_that_is_not_there_is_refused_by_name(name, message):
    with pytest.raises(ValueError, match=message):
        load_rewards([name])


def test_a_function_needs_the_columns_that_it_reads():
    names, rewards = ["exact", "counts_on"], [exact, counts_on]
    check_columns(names, rewards, ["prompt", "answer", "places"])
    with pytest.raises(
        ValueError, match="'exact' needs a column 'answer': the dataset has prompt"
    ):
        check_columns(names, rewards, ["prompt", "places"])


def test_a_function_gets_what_trl_gives_and_no_prompt_column():
    def given(completions, prompts, trainer_state, limit=3, **columns): ...

    def prompted(completions, prompt): ...

    check_columns(["given"], [given], ["prompt"])
    with pytest.raises(ValueError, match="'prompted' needs a column 'prompt'"):
        check_columns(["prompted"], [prompted], ["prompt"])
