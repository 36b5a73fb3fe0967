"""What every recipe does around its training."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from arguments import ModelArguments, PreferenceArguments
from hf_flexseq import PlanInfeasible
from run import (
    checkpoint_to_resume,
    choose_tokenizer,
    first_and_last,
    mean_of_ends,
    prepare,
    start_trace,
    train,
)


def args_for(folder, asked=None) -> SimpleNamespace:
    return SimpleNamespace(
        output_dir=str(folder), resume_from_checkpoint=asked, plan_trace=None, process_index=0
    )


def test_a_run_goes_on_from_its_last_checkpoint_unless_told_otherwise(tmp_path):
    assert checkpoint_to_resume(args_for(tmp_path / "not-there")) is None
    assert checkpoint_to_resume(args_for(tmp_path)) is None
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    last = str(tmp_path / "checkpoint-10")
    assert checkpoint_to_resume(args_for(tmp_path)) == last
    assert checkpoint_to_resume(args_for(tmp_path, "true")) == last
    assert checkpoint_to_resume(args_for(tmp_path, "false")) is None
    assert checkpoint_to_resume(args_for(tmp_path, "some/where")) == "some/where"


def test_resuming_from_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        checkpoint_to_resume(args_for(tmp_path, "true"))


def test_only_a_new_run_starts_a_new_trace(tmp_path):
    trace = tmp_path / "plan_trace.jsonl"
    trace.write_text("{}\n")
    args = args_for(tmp_path)
    start_trace(args, anew=False)
    assert (args.plan_trace, trace.exists()) == (str(trace), True)
    start_trace(args, anew=True)
    assert not trace.exists()


def trainer_that_logged(*logs) -> SimpleNamespace:
    return SimpleNamespace(state=SimpleNamespace(log_history=list(logs)))


def test_figures_of_a_run_are_its_first_and_its_last():
    trainer = trainer_that_logged({"eval_loss": 3.0}, {"loss": 9.0}, {"eval_loss": 2.0})
    assert first_and_last(trainer, "eval_loss") == (3.0, 2.0)
    assert first_and_last(trainer, "eval_reward") is None


def test_ends_of_a_run_are_compared_where_they_do_not_overlap():
    trainer = trainer_that_logged(*({"reward": float(i)} for i in range(6)))
    assert mean_of_ends(trainer, "reward", 2) == (0.5, 4.5)
    assert mean_of_ends(trainer, "reward", 3) == (1.0, 4.0)
    assert mean_of_ends(trainer, "reward", 4) is None


def test_a_tokenizer_is_trained_as_it_was_asked_for(tmp_path):
    data = PreferenceArguments(tokenizer_cache=str(tmp_path))

    def chosen(texts, **options):
        model = ModelArguments(model_config={"model_type": "llama"}, **options)
        return choose_tokenizer(model, data, lambda: texts)

    texts = ["ab\n", "ba"]
    assert len(chosen(texts, tokenizer_vocab_size=258)) == 258
    assert len(chosen(texts, new_tokenizer="characters")) == 6
    with pytest.raises(ValueError, match="name a tokenizer_name_or_path for python-stdlib"):
        chosen(None)


def test_a_named_tokenizer_does_not_look_at_the_corpus(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    model = ModelArguments(
        model_config={"model_type": "llama"}, tokenizer_name_or_path=str(tmp_path)
    )
    named = choose_tokenizer(model, PreferenceArguments(), lambda: pytest.fail("looked"))
    assert named("x").input_ids == tokenizer("x").input_ids


def test_a_sequence_that_fits_nowhere_ends_a_run_with_one_line(capsys):
    def infeasible(**options):
        raise PlanInfeasible("sequence 0 has 9 tokens")

    trainer = SimpleNamespace(args=SimpleNamespace(disable_tqdm=True), train=infeasible)
    with pytest.raises(SystemExit, match="2"):
        train(trainer, None, summary=None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: sequence 0 has 9 tokens")


def test_data_that_cannot_be_used_ends_a_run_with_one_line(capsys):
    args = SimpleNamespace(process_index=0, main_process_first=nullcontext)
    data = PreferenceArguments(dataset="no-such.jsonl")
    with pytest.raises(SystemExit, match="2"):
        prepare(None, data, args, made={}, texts_of=None, to_rows=None)
    assert capsys.readouterr().err == (
        "error: dataset='no-such.jsonl': there is no such file or folder\n"
    )
