"""`compute_metrics` and `predict()` of causal language models: the arrays of the plain Trainer on
as many ranks, made of logits that are never gathered."""

import numpy as np
import pytest
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_flexseq import DataCollatorForFlexSeq
from tests.hf.plain import Stream, float64_loss, logged
from tests.hf.tiny import documents, reference_loss, refused, tiny_llama
from tests.hf.trainers import OwnLoss, trainer_of, word_tokenizer
from tests.ranks import run_cases

LENGTHS = [3, 50, 2, 17, 8, 30, 2, 61, 5, 12, 44]


def best(logits, labels):
    return logits.argmax(dim=-1)


def best_and_others(logits, labels):
    """Two results, one of them with several values; labels are None without any."""
    assert labels is None or labels.shape == logits.shape[:2]
    return logits.argmax(dim=-1), logits.topk(3, dim=-1).values


def rank_of_label(logits, labels):
    """How many tokens are likelier than the label at the same place."""
    picked = logits.gather(2, labels.clamp(min=0).unsqueeze(2))
    return (logits > picked).sum(dim=2)


def make(flex, folder, *, base=Trainer, cap=61, **settings):
    data = {"train_dataset": documents(LENGTHS), "eval_dataset": documents(LENGTHS)}
    options = {"max_tokens_per_rank": cap} if flex else None
    return trainer_of(base, folder, flexseq=options, max_steps=2, **data, **settings)


def showing(function):
    return {"preprocess_logits_for_metrics": function}


class Seen:
    """A metric that keeps what it is given."""

    def __init__(self):
        self.arrays = []

    def __call__(self, given, compute_result=None):
        as_numpy = [given.predictions, given.label_ids, given.losses, given.inputs]
        self.arrays.append([torch_to_numpy(value) for value in as_numpy])
        last = given.predictions
        if isinstance(last, tuple):
            last = last[0]
        kept = np.asarray(given.label_ids) != -100
        return {"hits": float((np.asarray(last) == np.asarray(given.label_ids))[kept].sum())}


def torch_to_numpy(value):
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {name: torch_to_numpy(own) for name, own in value.items()}
    return value


EVALUATIONS = {
    "everything": {**showing(best), "include_for_metrics": ["loss", "inputs"]},
    "by batch": {**showing(rank_of_label), "batch_eval_metrics": True},
    "several": {**showing(best_and_others), "base": OwnLoss, "eval_accumulation_steps": 1},
}


def evaluations(rank, world_size, flex, folder):
    """What metrics are given, in one evaluation after the other, and what predict() returns."""
    found = {}
    for name, options in EVALUATIONS.items():
        seen = Seen()
        metrics = make(flex, folder, cap=40, compute_metrics=seen, **options).evaluate()
        found[name] = (seen.arrays, metrics["eval_hits"], metrics["eval_loss"])

    for columns in (None, ("input_ids",)):
        rows = documents(LENGTHS[:5])
        if columns:
            rows = [{name: row[name] for name in columns} for row in rows]
        trainer = make(flex, folder, cap=40, **showing(best_and_others))
        output = trainer.predict(rows)
        found["predict", columns] = (output.predictions, output.label_ids)
        assert (output.label_ids is None) == ("test_loss" not in output.metrics) == bool(columns)

    if flex:
        seen = Seen()
        while_it_trains = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": seen}
        trainer = make(flex, folder, cap=40, **showing(best), **while_it_trains)
        trainer.train()
        assert len(seen.arrays) == 2
        trainer.model.set_attn_implementation("sdpa")
        assert logged(trainer.state.log_history, "eval_loss")[-1] == pytest.approx(
            loss_of(trainer.model), rel=1e-10
        )
    return found


def loss_of(model):
    with torch.no_grad():
        return float(reference_loss(model, documents(LENGTHS)))


def at_tokens(array, lengths=LENGTHS):
    """The values of the tokens of an array [samples, tokens, ...]."""
    mask = np.arange(array.shape[1]) < np.array(lengths)[:, None]
    return array[mask]


@pytest.mark.processes
def test_metrics_get_the_arrays_of_the_plain_trainer(tmp_path):
    wanted, found = run_cases(evaluations, 2, [(False, tmp_path), (True, tmp_path)])
    for stock, ours in zip(wanted, found, strict=True):
        for name in EVALUATIONS:
            assert ours[name][1] == stock[name][1], name
            # over all tokens, and none twice; a loss of the user's is the plain Trainer's
            loss, rel = loss_of(tiny_llama()), 1e-10
            if "base" in EVALUATIONS[name]:
                loss, rel = stock[name][2], 1e-6
            assert ours[name][2] == pytest.approx(loss, rel=rel), name

        # 1. predictions, labels, losses and inputs
        ((predictions, labels, losses, inputs),) = stock["everything"][0]
        ((own_predictions, own_labels, own_losses, own_inputs),) = ours["everything"][0]
        assert own_predictions.shape == predictions.shape
        assert (at_tokens(own_predictions) == at_tokens(predictions)).all()
        np.testing.assert_array_equal(own_labels, labels)
        np.testing.assert_array_equal(own_inputs, inputs)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
        padding = np.arange(predictions.shape[1]) >= np.array(LENGTHS)[:, None]
        assert (own_predictions[padding] == -100).all()

        # 2. batch by batch
        for batch, own in zip(stock["by batch"][0], ours["by batch"][0], strict=True):
            kept = batch[1] != -100
            np.testing.assert_array_equal(own[1], batch[1])
            np.testing.assert_array_equal(own[0][kept], batch[0][kept])

        # 3. several results, of an evaluation and of predict()
        pairs = [(ours["several"][0][0], stock["several"][0][0], LENGTHS)]
        for columns in (None, ("input_ids",)):
            name = ("predict", columns)
            pairs.append((ours[name], stock[name], LENGTHS[:5]))
        for (own_arrays, own_labels, *_), (arrays, labels, *_), lengths in pairs:
            np.testing.assert_array_equal(own_labels, labels)
            for own, array in zip(own_arrays, arrays, strict=True):
                assert own.shape == array.shape
                np.testing.assert_allclose(
                    at_tokens(own, lengths), at_tokens(array, lengths), rtol=1e-12
                )


# ---- streams


STREAMS = {  # rows, and options
    "7 rows": (7, {}),
    "a rank has none": (5, {"base": OwnLoss, "eval_accumulation_steps": 1}),
    "less than a round": (3, {"batch_eval_metrics": True, "include_for_metrics": []}),
    "no repeats": (8, {"dataloader_drop_last": True}),
    "a worker": (7, {"dataloader_num_workers": 1, "per_device_eval_batch_size": 3}),
}


def streamed(rank, world_size, flex, folder):
    """Metrics, the arrays that make them, and what predict() returns: of a stream in ours, of a
    list in the stock trainer, where repeats are known."""
    found = {}
    for name, (count, options) in STREAMS.items():
        rows = documents((LENGTHS * 2)[:count])
        if flex:
            rows = Stream(rows)
        seen = Seen()
        given = {"compute_metrics": seen, "include_for_metrics": ["inputs"], **showing(best)}
        trainer = make(flex, folder, cap=61, **given | options)
        metrics = trainer.evaluate({"one": rows, "two": rows})
        assert metrics["eval_one_loss"] == metrics["eval_two_loss"]
        output = trainer.predict(rows)
        if flex and name == "7 rows":
            workers = make(flex, folder, **given, dataloader_num_workers=2)
            with refused("dataloader_num_workers=2.*set it to 1", ValueError):
                workers.evaluate(rows)
        found[name] = (seen.arrays, metrics["eval_one_hits"], metrics["eval_one_loss"])
        found[name] += (output.predictions, output.label_ids)
    return found


@pytest.mark.processes
def test_no_sample_of_a_stream_counts_twice(tmp_path):
    wanted, found = run_cases(streamed, 2, [(False, tmp_path), (True, tmp_path)])
    for name, (count, options) in STREAMS.items():
        with torch.no_grad():
            loss = float(reference_loss(tiny_llama(), documents((LENGTHS * 2)[:count])))
        for stock, ours in zip(wanted, found, strict=True):
            assert ours[name][1] == stock[name][1], name
            if "base" not in options:
                assert ours[name][2] == pytest.approx(loss, rel=1e-10), name
            for own, arrays in zip(ours[name][0], stock[name][0], strict=True):
                assert len(own[1]) == len(arrays[1])
                np.testing.assert_array_equal(own[1], arrays[1])
                np.testing.assert_array_equal(own[3], arrays[3])
            lengths = (LENGTHS * 2)[:count]
            np.testing.assert_array_equal(ours[name][4], stock[name][4])
            np.testing.assert_array_equal(
                at_tokens(ours[name][3], lengths), at_tokens(stock[name][3], lengths)
            )


class ScaledForCausalLM(LlamaForCausalLM):
    """Does something to its logits, so that it keeps its own loss."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        names = kwargs.keys() & {"num_items_in_batch", "shift_labels"}
        items = {name: kwargs.pop(name) for name in names}
        outputs = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state) * 3.0
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.vocab_size, **items)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def scaled():
    return tiny_llama(cls=ScaledForCausalLM)


def predicted(folder, **settings):
    """What the stock trainer and ours predict."""
    model = settings.pop("model", tiny_llama)
    found = []
    for flex in (False, True):
        trainer = make(flex, folder, model=model(), **settings)
        found.append(trainer.predict(documents(LENGTHS)))
    return found


@pytest.mark.slow
def test_a_model_that_scales_its_logits_shows_them_scaled(tmp_path):
    peak = showing(lambda logits, labels: logits.amax(dim=-1))
    stock, ours = predicted(tmp_path, model=scaled, **peak)
    np.testing.assert_allclose(
        at_tokens(ours.predictions), at_tokens(stock.predictions), rtol=1e-6
    )


def test_chunks_see_the_labels_of_their_tokens(tmp_path, monkeypatch):
    chunks = []

    def keep(logits, labels):
        chunks.append(logits.shape[1])
        return rank_of_label(logits, labels)

    wanted = make(True, tmp_path, **showing(rank_of_label)).predict(documents(LENGTHS))
    monkeypatch.setattr("hf_flexseq.hf.model.loss.chunk_rows", lambda *sizes: 7)
    found = make(True, tmp_path, **showing(keep)).predict(documents(LENGTHS))
    np.testing.assert_array_equal(found.predictions, wanted.predictions)
    assert max(chunks) == 7


@pytest.mark.parametrize("collator", [None, DataCollatorForFlexSeq()])
def test_examples_without_a_collator_are_padded(tmp_path, collator):
    stock = make(False, tmp_path, **showing(best)).predict(documents(LENGTHS))
    trainer = make(True, tmp_path, data_collator=collator, **showing(best))
    ours = trainer.predict(documents(LENGTHS))
    np.testing.assert_array_equal(ours.label_ids, stock.label_ids)
    np.testing.assert_array_equal(at_tokens(ours.predictions), at_tokens(stock.predictions))


def test_labels_of_padding_are_told_of(tmp_path, caplog):
    def labelled(examples):
        batch = DataCollatorForSeq2Seq(word_tokenizer())([dict(own) for own in examples])
        return {**batch, "labels": batch["labels"].where(batch["attention_mask"] == 1, 0)}

    trainer = make(True, tmp_path, data_collator=labelled, **showing(best))
    found = trainer.predict(documents(LENGTHS))
    said = [record.message for record in caplog.records if "beside padding" in record.message]
    assert len(said) == 1
    assert "make them -100" in said[0]
    assert (found.predictions[0][LENGTHS[0] :] == -100).all()


def test_sequences_that_train_recomputed_are_predicted_too(tmp_path):
    options = {"cost_model": "estimate", "max_tokens_per_rank": None}
    settings = {"compute_metrics": Seen(), **showing(best)}
    trainer = trainer_of(Trainer, tmp_path, flexseq=options, max_steps=1, **settings)
    trainer.flexseq.lower_cap(30)  # the longest document has 60 tokens
    trainer.train()
    rows = documents(LENGTHS)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(loss_of(trainer.model), rel=1e-10)
    assert trainer.predict(rows).predictions.shape == (len(rows), max(LENGTHS))


def test_generated_predictions_are_refused(tmp_path):
    """A callback may generate: see `test_drawn_settings.py`."""
    generates = {"base": Seq2SeqTrainer, "config": Seq2SeqTrainingArguments}
    generates |= {"predict_with_generate": True, "generation_max_length": 60}
    what = "does not support predict_with_generate=True with compute_metrics.*on_evaluate"
    with refused(what):
        make(True, tmp_path, **generates, compute_metrics=Seen(), **showing(best))
    with refused(what):
        make(True, tmp_path, **generates).predict(documents(LENGTHS))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (None, NotImplementedError, "whole logits .* 61 numbers or 488 bytes for every token"),
        (lambda logits, labels: logits, NotImplementedError, "returns whole logits, 61 numbers"),
        (lambda logits, labels: logits.argmax(-1)[:, :-1], ValueError, "shift or average in"),
        (lambda logits, labels: logits.mean(), ValueError, "give values for each of them"),
        (lambda logits, labels: {"best": logits}, ValueError, "makes dict of logits"),
    ],
)
def test_whole_vocabularies_and_shapes_are_refused_early(tmp_path, function, kind, message):
    given = {} if function is None else showing(function)
    with refused(message, kind):
        make(True, tmp_path, compute_metrics=Seen(), **given)
    trainer = make(True, tmp_path, **given)
    with pytest.raises(kind, match=message):
        trainer.predict(documents(LENGTHS))


def test_what_metrics_cannot_have(tmp_path):
    given = {"compute_metrics": Seen(), **showing(best)}
    with refused("even_batches=False"):
        make(True, tmp_path, **given, accelerator_config={"even_batches": False})
    model = tiny_llama()
    model.loss_function = float64_loss
    with refused("include_for_metrics=.*the loss of LlamaForCausalLM"):
        make(True, tmp_path, **given, model=model, include_for_metrics=["loss"])
