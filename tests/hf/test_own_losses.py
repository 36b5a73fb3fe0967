"""Losses of the user's own on a causal language model: `compute_loss_func` and methods of a class,
against the plain Trainer with whole logits."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer

from hf_flexseq import FlexSeqTrainer
from hf_flexseq.hf.losses.heads import TokenFigures, figures_of_logits
from hf_flexseq.hf.losses.outputs import PlannedOutput
from hf_flexseq.hf.model.loss import NO_LOGITS, attach_chunked_loss
from hf_flexseq.kernels import token_outputs
from hf_flexseq.steps.figure_passes import FigurePasses
from tests.differential.case import Case
from tests.differential.runs import both_on_ranks, here
from tests.hf.plain import float64_loss, padded
from tests.hf.test_metrics import scaled
from tests.hf.tiny import VOCAB, documents, refused, tiny_llama, whole
from tests.hf.trainers import OwnLoss, assert_logged_alike, trained, trainer_of, weights_apart
from tests.ranks import run_cases

LENGTHS = [1 + (i * i * 7) % 60 for i in range(24)]
OPTIONS = {"max_tokens_per_rank": 61, "lookahead": 0}


# ---- the figures


def plain_figures(hidden, weight, bias, targets, *, with_means=False):
    """Log-probabilities of targets, entropies, and means of all log-probabilities, through all
    logits."""
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    log_p = F.log_softmax(logits, dim=1)
    counts = targets != -100
    picked = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    found = picked * counts, -(log_p.exp() * log_p).sum(1) * counts
    return (*found, log_p.mean(1) * counts) if with_means else found


def drawn(seed):
    """Hidden states, weight and bias of a head, targets of 19 tokens, and weights of three figures
    of each."""
    torch.manual_seed(seed)
    operands = [torch.randn(19, 12), torch.randn(VOCAB, 12), torch.randn(VOCAB)]
    targets = torch.randint(VOCAB, (19,))
    targets[::5] = -100
    return operands, targets, torch.randn(3, 19).double()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_figures_and_their_gradients_are_those_of_all_logits(monkeypatch, rows, has_bias):
    monkeypatch.setattr(token_outputs, "chunk_rows", lambda *sizes: rows)
    operands, targets, weights = drawn(rows)
    gradients = []
    for compute in (plain_figures, token_outputs.token_outputs):
        leaves = [operand.double().requires_grad_() for operand in operands]
        hidden, weight, bias = leaves
        found = compute(hidden, weight, bias if has_bias else None, targets, with_means=True)
        (torch.stack(found) * weights).sum().backward()
        gradients.append([*(f.detach() for f in found), *(x.grad for x in leaves[: 2 + has_bias])])
    for ours, plain in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)


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


def figures_and_gradients(rank, world_size, policy=None):
    """Figures and gradients of a rank's row, of its model sharded with a policy of the head, or of
    a model of its own through all logits."""
    model = tiny_llama()
    torch.manual_seed(100 + rank)
    ids = torch.randint(VOCAB, (1, 7 + 4 * rank))
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    weights = torch.randn(2, ids.shape[1]).double()
    if policy is None:
        found = figures_of_logits(model(input_ids=ids).logits[0], targets[0])
    else:
        head = TokenFigures(model)
        head.attached(SimpleNamespace(chunked_loss=attach_chunked_loss(model)), answer=None)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model.lm_head, mp_policy=policy)
        fully_shard(model)
        labels = {"labels": targets, "shift_labels": targets}
        found = head.forward(model, {"input_ids": ids, **labels})
    (torch.stack([found["log_probs"], found["entropy"]]) * weights).sum().backward()
    gradients = {name: whole(p.grad).numpy() for name, p in model.named_parameters()}
    names = ("log_probs", "entropy")
    return {name: found[name].detach().numpy() for name in names}, gradients


@pytest.mark.processes
def test_figures_of_a_sharded_head():
    wanted = [figures_and_gradients(rank, 2) for rank in range(2)]
    # outputs of the head, and their gradients, are rounded; values are not
    rounding = MixedPrecisionPolicy(output_dtype=torch.float32)
    policies = [MixedPrecisionPolicy(), rounding]
    by_policy = run_cases(figures_and_gradients, 2, [(policy,) for policy in policies])
    for by_rank, tolerance in zip(by_policy, (1e-12, 1e-6), strict=True):
        for (figures, gradients), (own, _) in zip(by_rank, wanted, strict=True):
            for name, value in own.items():
                np.testing.assert_allclose(figures[name], value, rtol=1e-12)
            for name, gradient in gradients.items():
                mean = (wanted[0][1][name] + wanted[1][1][name]) / 2
                assert np.linalg.norm(gradient - mean) / np.linalg.norm(mean) < tolerance


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
    """Not a sum over tokens: those of a sample count more if it is likely as a whole."""
    log_probs, entropy = figures_of(outputs, labels)
    mask = labels[:, 1:] != -100
    means = log_probs.sum(1) / mask.sum(1).clamp(min=1)  # [samples]
    weights = (1 - means.exp()) ** 2
    per_token = -log_probs * weights[:, None] - 0.1 * entropy
    return per_token.sum() / num_items_in_batch


class Focal(Trainer):
    """The same loss plus the model's own."""

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


class Gathers(Trainer):
    """A loss of all ranks' samples, as in contrastive learning."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        sums = figures_of(outputs, inputs["labels"])[0].sum(1)  # [samples]
        mean = self.accelerator.gather(sums.detach()).mean()
        loss = (sums - mean).square().mean() / 1000
        return (loss, outputs) if return_outputs else loss


class HiddenStates(Trainer):
    """The plain loss, and a term of hidden states and of logits."""

    def flexseq_figures(self, outputs, inputs):
        best = outputs.logits[0].logsumexp(-1)
        return {"sizes": outputs.hidden_states[-1][0].square(), "best": best}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask = inputs["attention_mask"].bool()
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            outputs = model(**inputs, output_hidden_states=True)
            hidden, logits = outputs.hidden_states[-1], outputs.logits
            sizes, best = hidden.square(), logits.logsumexp(-1)
        else:
            outputs = model(**inputs)
            sizes, best = outputs.sizes, outputs.best
        loss = outputs.loss + sizes[mask].mean() + 0.1 * best[mask].square().mean()
        return (loss, outputs) if return_outputs else loss


class Scaled(Trainer):
    """A sum over tokens, with another factor in later steps where it goes by them."""

    goes_by_steps = False

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        factor = 1 + self.state.global_step if self.goes_by_steps else 0.25
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor


class ByStep(Scaled):
    goes_by_steps = True


FUNCTION = {"compute_loss_func": focal_loss}
DATA = {"train_dataset": documents(LENGTHS), "eval_dataset": documents(LENGTHS[:8])}
SETTINGS = {**DATA, "learning_rate": 0.1}
PLAIN = Case(settings=SETTINGS | FUNCTION, evaluates=True)
IN_TWO = {"batch": 2, "accumulation": 2}
TRAINED = {"train_dataset": documents(LENGTHS), "learning_rate": 0.1}
PLANS = (
    {"max_tokens_per_rank": 40, "planner": "static", "sp_degree": 2, "strategy": "ulysses"},
    {"max_tokens_per_rank": 64, "strategy": "local"},
)
CASES = {
    "accumulated": replace(PLAIN, batch=8, accumulation=2, stock_settings=IN_TWO),
    "class": replace(PLAIN, base=Focal, settings=SETTINGS),
    "scaled": replace(PLAIN, model=scaled),
    **{
        f"{base.__name__}, {plan['strategy']}": Case(
            base=base,
            settings=TRAINED,
            batch=8,
            accumulation=2,
            stock_loss=float64_loss,
            stock_settings=IN_TWO,
            flexseq=plan,
        )
        for base in (Gathers, HiddenStates)
        for plan in PLANS
    },
}


def make(folder, *, flexseq=OPTIONS, base=Trainer, model=tiny_llama, **settings):
    settings = {**SETTINGS, **settings}
    return trainer_of(base, folder, flexseq=flexseq, model=model(), **settings)


@pytest.mark.processes
def test_own_losses_train_as_the_plain_trainer_does(tmp_path):
    for name, stock, ours in both_on_ranks(CASES, tmp_path):
        assert weights_apart(stock, ours) < 1e-9, name
        assert_logged_alike(stock, ours, ["loss", "eval_loss"], rel=1e-6)


# Of three steps, each in two passes, or in one whose gradients are known before.
PASSES = {Scaled: "first second only only", ByStep: "first second only second first second"}


@pytest.mark.slow
@pytest.mark.parametrize("base", PASSES)
def test_a_sum_over_tokens_takes_one_pass_where_its_factor_is_known(tmp_path, monkeypatch, base):
    found = []

    def noting(name):
        method = getattr(FigurePasses, name)
        return lambda *args: (found.append(name), method(*args))[1]

    for name in ("first", "second", "only"):
        monkeypatch.setattr(FigurePasses, name, noting(name))
    make(tmp_path, base=base).train()
    assert " ".join(found) == PASSES[base]


def summed_loss(outputs, labels, num_items_in_batch=None):
    if isinstance(outputs, PlannedOutput):
        return -outputs.log_probs.sum() / num_items_in_batch
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def test_a_sum_over_no_token_leaves_the_weights_as_under_the_plain_trainer(tmp_path):
    rows = documents(LENGTHS)
    for row in rows[8:12]:  # the third step, when the loss is known as a sum
        row["labels"] = [-100] * len(row["labels"])
    settings = {"train_dataset": rows, "compute_loss_func": summed_loss}
    settings["train_sampling_strategy"] = "sequential"
    flexseq = OPTIONS | {"on_nonfinite": "warn"}  # of the loss 0 / 0
    case = Case(settings=SETTINGS | settings, flexseq=flexseq)
    stock, ours = here(case, tmp_path)
    assert weights_apart(stock, ours) < 1e-9


# ---- what is refused


def test_outputs_have_what_they_have():
    outputs = PlannedOutput(loss=torch.ones(()), log_probs=torch.zeros(2, 3))
    assert outputs[0] is outputs.loss is outputs["loss"]
    assert outputs.get("log_probs") is outputs.log_probs
    assert "logits" not in outputs
    assert set(outputs) == {"loss", "log_probs"}
    assert not hasattr(outputs, "_anything")
    with refused(r"asks for outputs\.hidden_states"):
        _ = outputs.hidden_states
    with refused(r"asks for outputs\['logits'\]"):
        outputs.get("logits")
    for key in ("logits", 1):
        with refused(re.escape(f"asks for outputs[{key!r}]")):
            _ = outputs[key]


class OnOtherTokens(FlexSeqTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{**inputs, "input_ids": inputs["input_ids"].flip(0)})
        return outputs.loss


class Twice(OnOtherTokens):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss + model(**inputs).loss


def labelled_padding(examples):
    batch = padded(examples)
    return {**batch, "labels": batch["input_ids"]}


class DropsForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        mlp = self.model.layers[0].mlp
        mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.1))


def with_dropout():
    return tiny_llama(cls=DropsForCausalLM)


@pytest.mark.slow
def test_gradients_are_of_one_call_for_each_batch(tmp_path):
    with refused("OnOtherTokens .* its batch does not have.*_prepare_inputs"):
        make(tmp_path, base=OnOtherTokens).train()
    with refused("Twice .* calls a model with dropout twice"):
        make(tmp_path, base=Twice, model=with_dropout).train()


def test_a_hook_that_mixes_sequences_is_refused_in_predictions(tmp_path):
    best = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    trainer = make(tmp_path, **FUNCTION, **best)
    trainer.model.model.norm.register_forward_hook(
        lambda module, args, outputs: outputs - outputs.mean(1, keepdim=True)
    )
    with refused("two sequences have the losses .* in one row"):
        trainer.predict(trainer.eval_dataset)


@pytest.mark.slow
def test_labels_of_padding_are_refused(tmp_path):
    with refused("labels where its attention_mask has padding", ValueError):
        make(tmp_path, data_collator=labelled_padding, **FUNCTION).train()


@pytest.mark.parametrize("teacher", ["some/path", len, None])
def test_a_loss_of_ones_own_may_keep_a_teacher_of_any_kind(tmp_path, teacher):
    trainer = trainer_of(OwnLoss, tmp_path, flexseq={}, max_steps=1)
    trainer.teacher_model = teacher
    assert trained(trainer).log
