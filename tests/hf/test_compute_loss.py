"""Losses of a user's own, on two ranks and under three plans, against the plain Trainer in
float64: the plan changes nothing, whatever the loss is made of."""

import pytest
import torch
from transformers import Trainer

from hf_flexseq.steps.figure_passes import FigurePasses
from tests.hf.test_own_losses import figures_of
from tests.hf.test_trainer import float64_loss, logged
from tests.hf.tiny import documents, tiny_llama
from tests.hf.trainers import trained, trainer_of, weights_apart
from tests.ranks import run_cases

LENGTHS = [1 + (i * i * 7) % 60 for i in range(24)]

PLANS = (
    {"max_tokens_per_rank": 61},
    {"max_tokens_per_rank": 40, "planner": "static", "sp_degree": 2, "strategy": "ulysses"},
    {"max_tokens_per_rank": 64, "strategy": "local"},
)


class Gathers(Trainer):
    """A loss of all ranks' samples, as in contrastive learning."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        sums = figures_of(outputs, inputs["labels"])[0].sum(1)  # [samples]
        mean = self.accelerator.gather(sums.detach()).mean()
        loss = (sums - mean).square().mean() / 1000
        return (loss, outputs) if return_outputs else loss


class WeightsTokens(Trainer):
    """A sum over tokens, each with a weight of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weights = 1 + inputs["input_ids"][:, 1:] % 3
        outputs = model(**inputs)
        log_probs, _ = figures_of(outputs, inputs["labels"])
        loss = -(weights * log_probs).sum() / num_items_in_batch
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Penalty(Trainer):
    """The plain loss, and a term of parameters."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + 1e-2 * sum(p.square().sum() for p in model.parameters())


class MeanOfMeans(Trainer):
    """Each sample counts alike."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        log_probs, _ = figures_of(outputs, inputs["labels"])
        counts = (inputs["labels"][:, 1:] != -100).sum(1).clamp(min=1)
        loss = -(log_probs.sum(1) / counts).mean()
        return (loss, outputs) if return_outputs else loss


class Scaled(Trainer):
    """A sum over tokens."""

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        return (found[0] / 4, *found[1:]) if isinstance(found, tuple) else found / 4


class ByStep(Scaled):
    """A sum with another factor in later steps."""

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        factor = 1 + self.state.global_step
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor


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


# passes of each step: the name of the first method of `FigurePasses`, and "second" if it follows
TWO, ONE, AGAIN = ("first", "second"), ("only",), ("only", "second")
LOSSES = {
    Trainer: [(), (), ()],
    Scaled: [TWO, ONE, ONE],
    ByStep: [TWO, AGAIN, TWO],
    Gathers: [TWO, TWO, TWO],
    WeightsTokens: [TWO, TWO, TWO],
    Penalty: [TWO, TWO, TWO],
    MeanOfMeans: [TWO, TWO, TWO],
    HiddenStates: [TWO, TWO, TWO],
}


def counting(name, run, found):
    def counted(*args):
        found.append(name)
        return run(*args)

    return counted


def counted_passes(monkeypatch):
    """The passes of all steps from now on, one after the other."""
    found = []
    for name in ("first", "second", "only"):
        monkeypatch.setattr(FigurePasses, name, counting(name, getattr(FigurePasses, name), found))
    return found


def train(rank, world_size, base, plan, folder):
    model = tiny_llama()
    if plan is None:
        model.loss_function = float64_loss
    data = {"train_dataset": documents(LENGTHS)}
    settings = {"learning_rate": 0.1, "accumulation": 2}
    trainer = trainer_of(base, folder, flexseq=plan, model=model, **data, **settings)
    with pytest.MonkeyPatch.context() as patch:
        passes = counted_passes(patch)
        return trained(trainer), passes


@pytest.mark.processes
def test_own_losses_under_three_plans(tmp_path):
    cases = [(base, plan, tmp_path) for base in LOSSES for plan in (None, *PLANS)]
    results = iter(run_cases(train, 2, cases, seconds=170))
    for base, passes in LOSSES.items():
        stock = next(results)
        for plan in PLANS:
            for (wanted, _), (ours, found) in zip(stock, next(results), strict=True):
                assert found == [name for of_step in passes for name in of_step], (base, plan)
                assert weights_apart(wanted, ours) < 1e-10, (base, plan)
                losses = logged(ours.log, "loss"), logged(wanted.log, "loss")
                assert losses[0] == pytest.approx(losses[1], rel=1e-6), (base, plan)
