"""Answers to held-out questions, before a training and after it."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from answers import Answers
from arguments import DataArguments
from data import to_sequences

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "vocab_size": 300, "eos_token_id": 1}


@pytest.fixture
def held_out(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT)
    talks = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i} of {i}"}]
        for i in range(3)
    ]
    return to_sequences(Dataset.from_dict({"messages": talks}), tokenizer, DataArguments())[0]


def trainer_of(model, **changes):
    parts = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False}
    parts["args"] = SimpleNamespace(pipeline_parallel_size=1)
    return SimpleNamespace(model=model, is_world_process_zero=lambda: True, **parts | changes)


@pytest.mark.slow
def test_a_model_that_learns_finds_the_written_answers_likelier(held_out, tokenizer):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    answers = Answers(held_out, 1, tokenizer)
    answers.ask(trainer_of(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for row in 60 * list(held_out):
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    answers.ask(trainer_of(model))
    likely, question, _, before, _, after = answers.lines()
    assert likely.startswith("log-likelihood of the held-out answers: -")
    assert likely.endswith(", 3 of 3 rise")
    assert question == "question:      0?"
    assert after.strip().startswith("0 of ")
    assert " of " not in before


def test_answers_need_questions_and_a_whole_model(held_out, tokenizer):
    assert Answers(None, 0, tokenizer).lines() == []
    text, _ = to_sequences(Dataset.from_dict({"text": ["ab"]}), tokenizer, DataArguments())
    for nothing in (None, text):
        with pytest.raises(ValueError, match="show_answers=2: no held-out sequence begins with"):
            Answers(nothing, 2, tokenizer)
    in_stages = SimpleNamespace(pipeline_parallel_size=2)
    for divided in ({"is_fsdp_enabled": True}, {"args": in_stages}):
        with pytest.raises(ValueError, match="show_answers=1 needs the whole model on a process"):
            Answers(held_out, 1, tokenizer).ask(trainer_of(None, **divided))
