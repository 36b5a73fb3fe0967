"""`compute_metrics` and `predict()` of causal language models: the arrays of the plain Trainer on
as many ranks, made of logits that are never gathered."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTTrainer

from hf_flexseq import DataCollatorForFlexSeq, FlexSeqArguments, FlexSeqMixin
from tests.hf.test_checks import one_line
from tests.hf.test_trainer import OPTIONS, padded, training_arguments
from tests.hf.tiny import VOCAB, documents, reference_loss, tiny_llama
from tests.ranks import run_ranks

LENGTHS = [3, 50, 2, 17, 8, 30, 2, 61, 5, 12, 44]


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def without_labels(examples):
    batch = padded([{"labels": [], **example} for example in examples])
    del batch["labels"]
    return batch


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


def make(flex, folder, *, base=Trainer, collator=padded, model=None, cap=61, **options):
    functions = {}
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if name in options:
            functions[name] = options.pop(name)
    settings = {"batch": 2, "accumulation": 1, "optim": "sgd", "max_steps": 2, **options}
    extra = {}
    if flex:
        base = type(f"Flex{base.__name__}", (FlexSeqMixin, base), {})
        extra = {"flexseq_args": FlexSeqArguments(**{**OPTIONS, "max_tokens_per_rank": cap})}
    return base(
        model=model or tiny_llama(),
        args=training_arguments(
            TrainingArguments, folder, per_device_eval_batch_size=2, **settings
        ),
        train_dataset=documents(LENGTHS),
        eval_dataset=documents(LENGTHS),
        data_collator=collator,
        **functions,
        **extra,
    )


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


def evaluations(rank, world_size, flex, folder):
    """What metrics are given, in one evaluation after the other."""
    found = {}

    def evaluate(name, function, **options):
        seen = Seen()
        trainer = make(
            flex,
            folder,
            cap=40,
            compute_metrics=seen,
            preprocess_logits_for_metrics=function,
            **options,
        )
        metrics = trainer.evaluate()
        hits, loss = metrics["eval_hits"], metrics["eval_loss"]
        found[name] = (seen.arrays, hits, loss)

    evaluate("everything", best, include_for_metrics=["loss", "inputs"])
    evaluate("by batch", rank_of_label, batch_eval_metrics=True)
    evaluate("several", best_and_others, base=OwnLoss, eval_accumulation_steps=1)

    # while it trains, and afterwards
    seen = Seen()
    trainer = make(
        flex,
        folder,
        cap=40,
        compute_metrics=seen,
        preprocess_logits_for_metrics=best,
        eval_strategy="steps",
        eval_steps=1,
    )
    if flex:
        trainer.train()
        log = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        trainer.model.set_attn_implementation("sdpa")
        with torch.no_grad():
            reference = float(reference_loss(trainer.model, documents(LENGTHS)))
        found["while it trains"] = (len(seen.arrays), log[-1], reference)

    # predict(), with labels and without
    trainer = make(flex, folder, cap=40, preprocess_logits_for_metrics=best_and_others)
    output = trainer.predict(documents(LENGTHS[:5]))
    found["predict"] = (output.predictions, output.label_ids)
    trainer = make(
        flex,
        folder,
        cap=40,
        preprocess_logits_for_metrics=best_and_others,
        collator=without_labels,
    )
    output = trainer.predict([{"input_ids": own["input_ids"]} for own in documents(LENGTHS[:5])])
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    found["predict without labels"] = output.predictions
    return found


def at_tokens(array, lengths=LENGTHS):
    """The values of the tokens of an array [samples, tokens, ...]."""
    mask = np.arange(array.shape[1]) < np.array(lengths)[:, None]
    return array[mask]


@pytest.mark.processes
def test_metrics_get_the_arrays_of_the_plain_trainer(tmp_path):
    wanted = run_ranks(evaluations, 2, False, tmp_path)
    found = run_ranks(evaluations, 2, True, tmp_path)
    with torch.no_grad():
        loss = float(reference_loss(tiny_llama(), documents(LENGTHS)))
    for stock, ours in zip(wanted, found, strict=True):
        # 1. predictions, labels, losses and inputs
        ((predictions, labels, losses, inputs),), hits, _ = stock["everything"]
        ((own_predictions, own_labels, own_losses, own_inputs),), own_hits, own_loss = ours[
            "everything"
        ]
        assert own_predictions.shape == predictions.shape
        assert (at_tokens(own_predictions) == at_tokens(predictions)).all()
        np.testing.assert_array_equal(own_labels, labels)
        np.testing.assert_array_equal(own_inputs, inputs)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
        assert own_hits == hits
        assert own_loss == pytest.approx(loss, rel=1e-10), "over all tokens, and none twice"
        padding = np.arange(predictions.shape[1]) >= np.array(LENGTHS)[:, None]
        assert (own_predictions[padding] == -100).all()

        # 2. batch by batch
        arrays, hits, _ = stock["by batch"]
        own_arrays, own_hits, own_loss = ours["by batch"]
        for batch, own in zip(arrays, own_arrays, strict=True):
            kept = batch[1] != -100
            np.testing.assert_array_equal(own[1], batch[1])
            np.testing.assert_array_equal(own[0][kept], batch[0][kept])
        assert own_loss == pytest.approx(loss, rel=1e-10)

        # 3. several results, and a compute_loss of one's own
        ((many, labels, _, _),), hits, _ = stock["several"]
        ((own_many, own_labels, _, _),), own_hits, own_loss = ours["several"]
        np.testing.assert_array_equal(own_labels, labels)
        for own, array in zip(own_many, many, strict=True):
            assert own.shape == array.shape
            np.testing.assert_allclose(at_tokens(own), at_tokens(array), rtol=1e-12)
        assert own_hits == hits
        assert own_loss == pytest.approx(loss, rel=1e-10)

        # 4. while it trains
        evaluated, last, reference = ours["while it trains"]
        assert evaluated == 2
        assert last == pytest.approx(reference, rel=1e-10)

        # 5. predict()
        np.testing.assert_array_equal(ours["predict"][1], stock["predict"][1])
        pairs = zip(ours["predict"][0], stock["predict"][0], strict=True)
        alone = zip(ours["predict without labels"], stock["predict without labels"], strict=True)
        for own, array in (*pairs, *alone):
            assert own.shape == array.shape
            np.testing.assert_allclose(
                at_tokens(own, LENGTHS[:5]), at_tokens(array, LENGTHS[:5]), rtol=1e-12
            )


class ScaledForCausalLM(LlamaForCausalLM):
    """Does something to its logits, so that it keeps its own loss."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        items = {}
        for name in ("num_items_in_batch", "shift_labels"):
            if name in kwargs:
                items[name] = kwargs.pop(name)
        outputs = self.model(input_ids=input_ids, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state) * 3.0
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.vocab_size, **items)
        return type(self).outputs(loss=loss, logits=logits)

    from transformers.modeling_outputs import CausalLMOutputWithPast as outputs


def scaled(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return ScaledForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, vocab_size=VOCAB)
    ).double()


def test_a_model_that_scales_its_logits_shows_them_scaled(tmp_path):
    def peak(logits, labels):
        return logits.amax(dim=-1)

    arrays = []
    for flex in (False, True):
        trainer = make(flex, tmp_path, model=scaled(), preprocess_logits_for_metrics=peak)
        arrays.append(trainer.predict(documents(LENGTHS)).predictions)
    np.testing.assert_allclose(at_tokens(arrays[1]), at_tokens(arrays[0]), rtol=1e-6)


def test_chunks_see_the_labels_of_their_tokens(tmp_path, monkeypatch):
    chunks = []

    def keep(logits, labels):
        chunks.append(logits.shape[1])
        return rank_of_label(logits, labels)

    whole = make(True, tmp_path, preprocess_logits_for_metrics=rank_of_label)
    wanted = whole.predict(documents(LENGTHS)).predictions
    monkeypatch.setattr("hf_flexseq.hf.model.loss.chunk_rows", lambda *sizes: 7)
    trainer = make(True, tmp_path, preprocess_logits_for_metrics=keep)
    found = trainer.predict(documents(LENGTHS)).predictions
    np.testing.assert_array_equal(found, wanted)
    assert max(chunks) == 7


@pytest.mark.parametrize("collator", [None, DataCollatorForFlexSeq()])
def test_examples_without_a_collator_are_padded(tmp_path, collator):
    wanted = make(False, tmp_path, preprocess_logits_for_metrics=best)
    trainer = make(True, tmp_path, preprocess_logits_for_metrics=best, collator=collator)
    output = trainer.predict(documents(LENGTHS))
    stock = wanted.predict(documents(LENGTHS))
    np.testing.assert_array_equal(output.label_ids, stock.label_ids)
    np.testing.assert_array_equal(at_tokens(output.predictions), at_tokens(stock.predictions))


def test_labels_of_other_names(tmp_path):
    def weighted(logits, labels):
        ids, weights = labels
        return F.one_hot(ids.clamp(min=0), VOCAB).sum(-1) * weights

    def collate(examples):
        batch = padded(examples)
        return {**batch, "token_type_ids": batch["input_ids"] % 3}

    options = {"label_names": ["labels", "token_type_ids"], "collator": collate}

    class TakesTypesForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, token_type_ids=None, **kwargs):
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    outputs = []
    for flex in (False, True):
        model = TakesTypesForCausalLM(tiny_llama().config).double()
        trainer = make(
            flex, tmp_path, model=model, preprocess_logits_for_metrics=weighted, **options
        )
        outputs.append(trainer.predict(documents(LENGTHS)))
    stock, ours = outputs
    for own, wanted in zip(ours.label_ids, stock.label_ids, strict=True):
        np.testing.assert_array_equal(own, wanted)
    np.testing.assert_array_equal(at_tokens(ours.predictions), at_tokens(stock.predictions))


def test_loss_only_needs_nothing(tmp_path):
    trainer = make(True, tmp_path, compute_metrics=Seen(), prediction_loss_only=True)
    metrics = trainer.evaluate()
    assert "eval_hits" not in metrics
    with torch.no_grad():
        wanted = float(reference_loss(tiny_llama(), documents(LENGTHS)))
    assert metrics["eval_loss"] == pytest.approx(wanted, rel=1e-10)


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
    given = {"compute_metrics": Seen()}
    if function is not None:
        given["preprocess_logits_for_metrics"] = function
    with pytest.raises(kind, match=message) as raised:
        make(True, tmp_path, **given)
    one_line(raised)
    del given["compute_metrics"]
    trainer = make(True, tmp_path, **given)
    with pytest.raises(kind, match=message):
        trainer.predict(documents(LENGTHS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator_config": {"even_batches": False}}, "even_batches=False"),
        (
            {"base": OwnLoss, "include_for_metrics": ["loss"]},
            "include_for_metrics=.*FlexOwnLoss's or its model's",
        ),
    ],
)
def test_what_metrics_cannot_have(tmp_path, options, message):
    given = {"compute_metrics": Seen(), "preprocess_logits_for_metrics": best}
    with pytest.raises(NotImplementedError, match=message) as raised:
        make(True, tmp_path, **given, **options)
    one_line(raised)


def test_metrics_of_a_fused_head(tmp_path):
    trainer = make(False, tmp_path, compute_metrics=Seen())
    trainer.__class__ = type("Mine", (FlexSeqMixin, SFTTrainer), {})
    trainer._is_vision_dataset = False  # as its constructor would have it
    with pytest.raises(
        NotImplementedError, match="Mine with compute_metrics.*: its head returns no logits"
    ) as raised:
        trainer._setup_flexseq(FlexSeqArguments())
    one_line(raised)
