"""Losses of the user's own on a causal language model: `compute_loss_func`, and classes that say
`flexseq_loss_on_whole_samples`, against the plain Trainer with whole logits."""

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from hf_flexseq import FlexSeqArguments, FlexSeqMixin, FlexSeqTrainer
from hf_flexseq.hf.model.loss import NO_LOGITS, attach_chunked_loss
from hf_flexseq.hf.objectives.heads import TokenFigures, figures_of_logits
from hf_flexseq.hf.objectives.outputs import PlannedOutput
from hf_flexseq.hf.one_pass import LossInOnePass
from hf_flexseq.kernels import token_outputs as kernel
from tests.hf.test_checks import OwnLoss, one_line
from tests.hf.test_metrics import scaled
from tests.hf.test_router import mixture
from tests.hf.test_trainer import OPTIONS, logged, padded, training_arguments, update_error
from tests.hf.tiny import VOCAB, documents, tiny_llama
from tests.ranks import run_ranks

LENGTHS = [1 + (i * i * 7) % 60 for i in range(24)]


# ---- the figures


def plain_figures(hidden, weight, bias, targets):
    """Log-probabilities of targets and entropies, through all logits."""
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    log_p = F.log_softmax(logits, dim=1)
    counts = targets != -100
    picked = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return picked * counts, -(log_p.exp() * log_p).sum(1) * counts


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_figures_and_their_gradients_are_those_of_all_logits(monkeypatch, rows, has_bias):
    monkeypatch.setattr(kernel, "chunk_rows", lambda *sizes: rows)
    torch.manual_seed(rows)
    hidden, weight = torch.randn(19, 12).double(), torch.randn(VOCAB, 12).double()
    bias = torch.randn(VOCAB).double() if has_bias else None
    targets = torch.randint(VOCAB, (19,))
    targets[::5] = -100
    weights = torch.randn(2, 19).double()
    gradients = []
    for compute in (plain_figures, kernel.token_outputs):
        leaves = [hidden, weight] + ([bias] if has_bias else [])
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        found = compute(*leaves, *([] if has_bias else [None]), targets)
        (torch.stack(found) * weights).sum().backward()
        gradients.append([*(f.detach() for f in found), *(leaf.grad for leaf in leaves)])
    for ours, plain in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)


def test_figures_of_half_precision_are_added_up_in_float32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(VOCAB, 16).bfloat16()
    targets = torch.randint(VOCAB, (40,))
    wanted = plain_figures(hidden.double(), weight.double(), None, targets)
    for found, value in zip(
        kernel.token_outputs(hidden, weight, None, targets), wanted, strict=True
    ):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="meet a head in"):
        kernel.token_outputs(hidden, weight.float(), None, targets)


def test_a_head_gives_figures_in_place_of_logits():
    model = tiny_llama()
    chunked = attach_chunked_loss(model)
    ids = torch.randint(VOCAB, (2, 9))
    logits = model(input_ids=ids).logits
    with chunked.giving_figures() as given:
        outputs = model(input_ids=ids, labels=ids)
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:].reshape(-1)
    wanted = plain_figures(logits.flatten(0, 1), torch.eye(VOCAB).double(), None, targets)
    torch.testing.assert_close(outputs.logits.flatten(0, 1), torch.stack(wanted, 1))
    torch.testing.assert_close(given.value, torch.stack(wanted, 1))
    assert model(input_ids=ids, labels=ids).logits is NO_LOGITS, "afterwards there is a loss again"
    chunked.detach()


def example(rank):
    """A row of tokens with targets, and weights of its figures."""
    torch.manual_seed(100 + rank)
    ids = torch.randint(VOCAB, (1, 7 + 4 * rank))
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    weights = torch.randn(2, ids.shape[1]).double()
    return {"input_ids": ids, "labels": targets, "shift_labels": targets}, weights


def sharded_figures(rank, world_size, policy):
    """Figures and gradients of a model whose head is a unit of its own."""
    model = tiny_llama()
    head = TokenFigures(model)
    head.attach()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model.lm_head, mp_policy=policy)
    fully_shard(model)
    inputs, weights = example(rank)
    found = head.forward(model, inputs)
    (torch.stack([found["log_probs"], found["entropy"]]) * weights).sum().backward()
    gradients = {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}
    return {name: value.detach().numpy() for name, value in found.items()}, gradients


@pytest.mark.processes
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        (MixedPrecisionPolicy(), 1e-12),
        # outputs of the head, and their gradients, are rounded; values are not
        (MixedPrecisionPolicy(output_dtype=torch.float32), 1e-6),
    ],
)
def test_figures_of_a_sharded_head(policy, tolerance):
    wanted = []
    for rank in range(2):
        model = tiny_llama()
        inputs, weights = example(rank)
        logits = model(input_ids=inputs["input_ids"]).logits[0]
        found = figures_of_logits(logits, inputs["labels"][0])
        (torch.stack([found["log_probs"], found["entropy"]]) * weights).sum().backward()
        wanted.append((found, {name: p.grad for name, p in model.named_parameters()}))
    for rank, (figures, gradients) in enumerate(run_ranks(sharded_figures, 2, policy)):
        for name, value in wanted[rank][0].items():
            np.testing.assert_allclose(figures[name], value.detach(), rtol=1e-12)
        for name, gradient in gradients.items():
            mean = (wanted[0][1][name] + wanted[1][1][name]) / 2
            assert float((torch.as_tensor(gradient) - mean).norm() / mean.norm()) < tolerance


# ---- training


def figures_of(outputs, labels):
    """What a loss reads of our outputs, made of whole logits where there are some."""
    if isinstance(outputs, PlannedOutput):
        return outputs.log_probs, outputs.entropy
    targets = labels[:, 1:]
    shape = targets.shape
    logits = outputs.logits[:, :-1].flatten(0, 1)
    head = torch.eye(logits.shape[1]).double()
    found = plain_figures(logits, head, None, targets.flatten())
    return found[0].view(shape), found[1].view(shape)


def focal_loss(outputs, labels, num_items_in_batch=None):
    """No sum over tokens: a sample's tokens count more where the sample is likely as a whole."""
    log_probs, entropy = figures_of(outputs, labels)
    mask = labels[:, 1:] != -100
    means = log_probs.sum(1) / mask.sum(1).clamp(min=1)  # [samples]
    weights = (1 - means.exp()) ** 2
    per_token = -log_probs * weights[:, None] - 0.1 * entropy
    return per_token.sum() / num_items_in_batch


class Focal(Trainer):
    """The same loss, and the model's own beside it."""

    flexseq_loss_on_whole_samples = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        labels = inputs["labels"]
        loss = focal_loss(outputs, labels, num_items_in_batch)
        log_probs, _ = figures_of(outputs, labels)
        plain = -log_probs.sum() / num_items_in_batch
        if isinstance(outputs, PlannedOutput):
            items = (labels[:, 1:] != -100).sum()
            torch.testing.assert_close(outputs.loss * items, plain * num_items_in_batch)
        loss = (loss + 0.5 * plain) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


CASES = {
    "function": {"func": focal_loss, "batch": 3},
    "accumulated": {"func": focal_loss, "batch": 2, "accumulation": 2},
    "class": {"base": Focal, "batch": 3},
    "scaled": {"func": focal_loss, "batch": 3, "model": scaled},
}


def weights_of(model):
    return {name: value.detach().numpy().copy() for name, value in model.named_parameters()}


def train(rank, world_size, flex, folder):
    found = {}
    for name, case in CASES.items():
        case = {"base": Trainer, "func": None, "accumulation": 1, "model": tiny_llama, **case}
        trainer = make(flex, folder, **case)
        before = weights_of(trainer.model)
        trainer.train()
        after = weights_of(trainer.model)
        evaluation = trainer.evaluate()["eval_loss"]
        found[name] = (before, after, logged(trainer.state.log_history, "loss"), evaluation)
    return found


def make(
    flex,
    folder,
    *,
    base,
    func=None,
    batch=2,
    accumulation=1,
    model=tiny_llama,
    settings=None,
    **options,
):
    extra = {}
    if flex:
        if not issubclass(base, FlexSeqMixin):
            base = type(f"Flex{base.__name__}", (FlexSeqMixin, base), {})
        extra = {"flexseq_args": FlexSeqArguments(**{**OPTIONS, **(settings or {})})}
    args = training_arguments(
        TrainingArguments,
        folder,
        batch=batch,
        accumulation=accumulation,
        **{"optim": "sgd", "learning_rate": 0.1, "max_steps": 3, **options},
    )
    args.per_device_eval_batch_size = 2
    return base(
        model=model(),
        args=args,
        train_dataset=documents(LENGTHS),
        eval_dataset=documents(LENGTHS[:8]),
        data_collator=padded,
        compute_loss_func=func,
        **extra,
    )


@pytest.mark.processes
def test_own_losses_train_as_the_plain_trainer_does(tmp_path):
    wanted = run_ranks(train, 2, False, tmp_path)
    found = run_ranks(train, 2, True, tmp_path)
    for name in CASES:
        *weights, losses, evaluation = wanted[0][name]
        before, after = ({n: torch.as_tensor(v) for n, v in own.items()} for own in weights)
        for rank in found:
            _, own, own_losses, own_evaluation = rank[name]
            assert update_error(before, after, own) < 1e-9, name
            np.testing.assert_allclose(own_losses, losses, rtol=1e-6)
            assert own_evaluation == pytest.approx(evaluation, rel=1e-6), name


def test_a_metric_beside_an_own_loss(tmp_path):
    seen = []
    for flex in (False, True):
        options = {"settings": {"max_tokens_per_rank": 61}} if flex else {}
        trainer = make(flex, tmp_path, base=Trainer, func=focal_loss, **options)
        trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
        trainer.compute_metrics = lambda given: {"best": float(given.predictions[0, 0])}
        seen.append(trainer.evaluate())
        if flex:
            assert trainer.predict(documents([5, 9])).predictions.shape == (2, 9)
    assert seen[1]["eval_best"] == seen[0]["eval_best"]
    assert seen[1]["eval_loss"] == pytest.approx(seen[0]["eval_loss"], rel=1e-6)


# ---- what is refused


def asks(name):
    def loss(outputs, labels, num_items_in_batch=None):
        if isinstance(name, str) and name.startswith("."):
            return getattr(outputs, name[1:]).sum()
        return outputs[name].sum()

    return loss


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".logits", r"outputs\.logits"),
        (".hidden_states", r"outputs\.hidden_states"),
        ("logits", r"outputs\['logits'\]"),
        (1, r"outputs\[1\]"),
    ],
)
def test_what_a_loss_cannot_have_is_named(tmp_path, name, said):
    ours = {"max_tokens_per_rank": 61}
    trainer = make(True, tmp_path, base=Trainer, func=asks(name), settings=ours)
    with pytest.raises(NotImplementedError, match=f"asks for {said}, .*log_probs") as raised:
        trainer.train()
    one_line(raised)


def test_outputs_have_what_they_have():
    outputs = PlannedOutput(loss=torch.ones(()), log_probs=torch.zeros(2, 3))
    assert outputs[0] is outputs.loss is outputs["loss"]
    assert outputs.get("log_probs") is outputs.log_probs
    assert "logits" not in outputs
    assert set(outputs) == {"loss", "log_probs"}
    assert not hasattr(outputs, "_anything")
    with pytest.raises(NotImplementedError, match=r"asks for outputs\['logits'\]"):
        outputs.get("logits")


class OnOtherTokens(FlexSeqTrainer):
    flexseq_loss_on_whole_samples = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{**inputs, "input_ids": inputs["input_ids"].flip(0)})
        return outputs.loss


class Twice(OnOtherTokens):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss + model(**inputs).loss


@pytest.mark.processes
@pytest.mark.parametrize("base", [OnOtherTokens, Twice])
def test_gradients_are_of_one_call_for_each_batch(tmp_path, base):
    trainer = make(True, tmp_path, base=base, settings={"max_tokens_per_rank": 61})
    with pytest.raises(NotImplementedError, match=f"{base.__name__} .* or calls the model twice"):
        trainer.train()


@pytest.mark.processes
def test_labels_of_padding_are_refused(tmp_path):
    def collate(examples):
        batch = padded(examples)
        return {**batch, "labels": batch["input_ids"]}

    trainer = make(
        True, tmp_path, base=Trainer, func=focal_loss, settings={"max_tokens_per_rank": 61}
    )
    trainer.data_collator = collate
    with pytest.raises(ValueError, match="labels where its attention_mask has padding") as raised:
        trainer.train()
    one_line(raised)


class WithoutLabels(OwnLoss):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return F.cross_entropy(logits[0, :-1], labels[0, 1:])


@pytest.mark.processes
def test_one_pass_keeps_to_sums_over_tokens(tmp_path):
    """Labels of a micro-batch are shifted already: a loss of its own logits would be wrong."""
    ours = {"max_tokens_per_rank": 61}
    trainer = make(True, tmp_path, base=OwnLoss, settings=ours)
    assert isinstance(trainer._flexseq_loss, LossInOnePass), "handing on takes one pass"
    trainer = make(True, tmp_path, base=WithoutLabels, settings=ours)
    with pytest.raises(
        NotImplementedError, match="WithoutLabels.*flexseq_loss_on_whole_samples"
    ) as raised:
        trainer.train()
    one_line(raised)


class FormerName(OwnLoss):
    flexseq_loss_at_home = True


def test_the_former_name_of_the_attribute_is_refused_and_the_new_one_named(tmp_path):
    with pytest.raises(ValueError, match="flexseq_loss_on_whole_samples = True") as raised:
        make(True, tmp_path, base=FormerName, settings={"max_tokens_per_rank": 61})
    one_line(raised)


def test_an_own_loss_does_not_run_in_pipeline_stages(tmp_path):
    with pytest.raises(NotImplementedError, match="set it to 1") as raised:
        make(True, tmp_path, base=Trainer, func=focal_loss, settings={"pipeline_parallel_size": 2})
    one_line(raised)


def test_a_router_loss_beside_an_own_one_is_refused(tmp_path):
    settings = {"max_tokens_per_rank": 61}
    with pytest.raises(NotImplementedError, match="set config.output_router_logits=False") as own:
        make(True, tmp_path, base=Trainer, func=focal_loss, model=mixture, settings=settings)
    one_line(own)
