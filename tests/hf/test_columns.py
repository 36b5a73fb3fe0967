"""Columns of examples that transformers, accelerate or TRL give a meaning to: each is honoured as
by the stock trainer, refused by its name, or named in the log as one that nothing reads."""

import numpy as np
import pytest
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_flexseq import DataCollatorForFlexSeq
from tests.hf.plain import Stream, padded
from tests.hf.tiny import VOCAB, tiny_llama
from tests.hf.trainers import trained, trainer_of, weights_apart, word_tokenizer
from tests.ranks import run_cases

IDS = [7, 3, 9, 4, 11, 5, 8, 6, 2, 10]
PLAIN = {"input_ids": IDS, "labels": [-100, *IDS[1:4], -100, *IDS[5:]]}
NEXT = [*IDS[1:], 12]
ENDS = [0, 4, 10]
APART = {"position_ids": [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]}  # what the stock trainer takes apart

# Columns that are honoured, and what the stock trainer is to be given for them.
HONOURED = {
    "shift_labels": ({"labels": NEXT, "shift_labels": NEXT}, None),
    "shift_labels, other mask": ({"shift_labels": [-100] * 5 + [*IDS[6:], -100]}, None),
    "position_ids": (APART, None),
    "cu_seq_lens_q": ({"cu_seq_lens_q": ENDS}, APART),
    "cu_seq_lens_k": ({"cu_seq_lens_k": ENDS}, APART),
    "cu_seqlens": ({"cu_seqlens": ENDS}, APART),
    "seq_lengths": ({"seq_lengths": [4, 6]}, APART),
    "max_length_q": ({"max_length_q": 6}, {}),
    "max_length_k": ({"max_length_k": 6}, {}),
    "attention_mask": (
        {"attention_mask": [1] * 7 + [0] * 3, "labels": [*IDS[:7], -100, -100, -100]},
        None,
    ),
}
# Those that a causal language model does not honour.
OTHERS = {
    "seq_idx": [0] * 4 + [1] * 6,
    "segment_ids": [1] * 4 + [2] * 6,
    "attention_mask of sequences": [1] * 4 + [2] * 6,
    "token_type_ids": [0] * 4 + [1] * 6,
    "mm_token_type_ids": [0] * 4 + [1] * 6,
    "cache_position": list(range(10)),
    "inputs_embeds": [[0.5] * 32] * 10,
    "label_ids": IDS,
    "label": 1,
    "logits_to_keep": 3,
    "sample_weight": 0.5,
    "length": 10,
}
OF_TOKENS = ("loss_mask", "labels_mask", "assistant_masks", "completion_mask", "prompt_mask")
OF_TOKENS += ("special_tokens_mask", "weights", "loss_weights", "advantages", "rewards")
OTHERS |= {name: [0] * 5 + [1] * 5 for name in OF_TOKENS}

REFUSED = {"seq_idx", "segment_ids", "attention_mask of sequences", "inputs_embeds", "label"}
REFUSED |= {"logits_to_keep", "sample_weight", "length"}
NOT_READ = {"length", "logits_to_keep"}  # where TRL's collator drops them, nothing is lost


def make_trainer(base, folder, flexseq, rows, *, model=None, **settings):
    settings = {"max_steps": 1, "remove_unused_columns": False, "data_collator": None, **settings}
    config = TrainingArguments
    if issubclass(base, SFTTrainer):
        config = SFTConfig
        settings |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
        settings |= {"processing_class": word_tokenizer()}
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    model = model or tiny_llama()
    settings |= {"config": config, "flexseq": flexseq, "train_dataset": data, "model": model}
    return trainer_of(base, folder, batch=settings.pop("batch", 1), **settings)


def stock_loss(base, folder, row, **settings):
    trainer = make_trainer(base, folder, None, [row], **settings)
    return trainer.evaluate(trainer.train_dataset)["eval_loss"]


def our_loss(base, folder, row, **settings):
    return first_loss(make_trainer(base, folder, {}, [row], **settings))


def first_loss(trainer):
    trainer.train()
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONOURED)
def test_columns_that_have_a_meaning_train_as_under_the_stock_trainer(name, tmp_path):
    given, for_stock = HONOURED[name]
    row = PLAIN | given
    wanted = stock_loss(Trainer, tmp_path, row if for_stock is None else PLAIN | for_stock)
    # otherwise the column would say nothing
    assert name.startswith("max_") or wanted != pytest.approx(
        stock_loss(Trainer, tmp_path, PLAIN), abs=1e-4
    )
    assert our_loss(Trainer, tmp_path, row) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("base", [Trainer, pytest.param(SFTTrainer, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OTHERS)
def test_columns_that_nothing_reads_are_refused_or_named(name, base, tmp_path, caplog):
    column = name.partition(" ")[0]
    row = PLAIN | {column: OTHERS[name]}
    if base is Trainer and name in REFUSED:
        with pytest.raises(ValueError, match=column):
            our_loss(base, tmp_path, row)
        return
    found = our_loss(base, tmp_path, row)
    assert found == pytest.approx(stock_loss(base, tmp_path, PLAIN), abs=1e-6)
    assert found == pytest.approx(stock_loss(base, tmp_path, row), abs=1e-6)
    assert column in caplog.text or name in NOT_READ


@pytest.mark.parametrize("base", [Trainer, SFTTrainer])
def test_columns_that_the_trainer_removes_are_named_once(base, tmp_path, caplog):
    """Tokenizers make masks of ones and types of zeros unasked, which are not named."""
    columns = {name: OTHERS[name] for name in ("sample_weight", "weights", "seq_idx")}
    silent = {"attention_mask": [1] * 10, "token_type_ids": [0] * 10, "text": "some words"}
    row = PLAIN | columns | silent
    found = our_loss(base, tmp_path, row, remove_unused_columns=True)
    assert found == pytest.approx(stock_loss(base, tmp_path, PLAIN), abs=1e-6)
    assert caplog.text.count("sample_weight, seq_idx, weights of train_dataset is dropped") == 1
    assert not any(name in caplog.text for name in silent)


# ---- labels that are shifted already


@pytest.mark.parametrize("base", [Trainer, SFTTrainer])
@pytest.mark.parametrize("removes", [True, False])
def test_shifted_labels_that_do_not_reach_the_model_as_such_are_refused(base, removes, tmp_path):
    rows = [PLAIN | {"labels": NEXT}]
    if removes or base is SFTTrainer:  # the Trainer, or TRL's collator, drops it
        rows[0]["shift_labels"] = NEXT
    trainer = make_trainer(base, tmp_path, {}, rows, remove_unused_columns=removes)
    with pytest.raises(ValueError, match="labels of example 0 are shifted already"):
        trainer.train()


def shifted_rows():
    """Rows as for accelerate's context parallelism: parts of longer documents."""
    rows = []
    for number in range(8):
        document = [2 + (number * 7 + i * i) % (VOCAB - 2) for i in range(4 + 5 * (number % 4))]
        targets = [*document[1:-1], -100 if number == 3 else document[-1]]
        rows.append({"input_ids": document[:-1], "labels": targets, "shift_labels": targets})
    return rows


WAYS = {
    "a list": {"train_dataset": shifted_rows()},
    "a stream": {"train_dataset": Stream(shifted_rows())},
    "ours": {"data_collator": DataCollatorForFlexSeq()},
}


def with_targets(folder, batch, flexseq, name=None, base=Trainer, **settings):
    given = {"data_collator": padded, "max_steps": 2, **WAYS.get(name, {}), **settings}
    rows = given.pop("train_dataset", shifted_rows())
    return make_trainer(base, folder, flexseq, rows, batch=batch, **given)


def run(rank, world_size, folder, name):
    return trained(with_targets(folder, 2, {}, name), evaluates=False)


@pytest.mark.processes
def test_given_targets_train_and_evaluate_as_under_the_stock_trainer(tmp_path):
    stock = trained(with_targets(tmp_path, 4, None))
    assert weights_apart(stock, trained(with_targets(tmp_path, 4, {}))) < 2e-6
    by_case = run_cases(run, 2, [(tmp_path, name) for name in ("a list", "ours")], seconds=120)
    for by_rank in by_case:
        for found in by_rank:
            assert weights_apart(stock, found) < 2e-6
    stream = trained(with_targets(tmp_path, 4, {}, "a stream"))
    wanted = trained(with_targets(tmp_path, 4, None, "a stream"))
    assert weights_apart(wanted, stream) < 2e-6
    sft = trained(with_targets(tmp_path, 4, {}, "ours", base=SFTTrainer))
    assert weights_apart(trained(with_targets(tmp_path, 4, None, base=SFTTrainer)), sft) < 2e-6


def of_targets(outputs, labels, num_items_in_batch=None):
    """Weigh tokens of a sample, from our outputs or from logits and the targets beside them."""
    found = getattr(outputs, "log_probs", None)
    if found is None:
        targets = outputs.targets[:, :-1]
        found = outputs.logits[:, :-1].log_softmax(-1)
        found = found.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        found = found.masked_fill(targets == -100, 0)
    return -(found.sum(dim=1) ** 2).sum() / 100


class OnSamples(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        if "logits" in dict(outputs):
            outputs.targets = inputs["shift_labels"]
        loss = of_targets(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def test_losses_on_whole_samples_read_given_targets(tmp_path):
    last = [row | {"shift_labels": [*row["shift_labels"][:-1], -100]} for row in shifted_rows()]
    runs = []
    for flexseq in (None, {}):
        runs.append(
            trained(with_targets(tmp_path, 4, flexseq, base=OnSamples, train_dataset=last))
        )
    assert weights_apart(*runs) < 2e-6
    with pytest.raises(NotImplementedError, match="give the last token of a row a target"):
        with_targets(tmp_path, 4, {}, base=OnSamples).train()


def test_predictions_come_with_the_loss_of_given_targets(tmp_path):
    found = []
    for flexseq in (None, {}):
        trainer = with_targets(
            tmp_path,
            4,
            flexseq,
            eval_dataset=shifted_rows(),
            per_device_eval_batch_size=8,
            compute_metrics=lambda p: {
                "sum": float(np.where(p.label_ids < 0, 0, p.predictions).sum())
            },
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        found.append(trainer.evaluate())
    stock, ours = found
    assert ours["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-6)
    assert ours["eval_sum"] == stock["eval_sum"]
