"""A step whose loss has gradients that are known before it takes one pass, to the gradients of
two."""

import random

import pytest
import torch

from hf_flexseq.steps.figure_passes import FigurePasses, difference_of
from tests.hf.tiny import relative_errors
from tests.plans import random_plan
from tests.ranks import join, run_threads
from tests.steps.test_passes import (
    CLASSES,
    LENGTHS,
    TOPOLOGIES,
    model_of_figures,
    pass_step,
    run_passes,
    sources_of,
    summed_gradients,
)


class LinearObjective:
    """A sum of figures with fixed random weights, which are known."""

    totals = ()

    def __init__(self, model):
        self.model = model
        self.calls = 0
        self.first = {}  # the figures that were gathered

    def forward(self, inputs, weights=None):
        self.calls += 1
        return self.model(**inputs)

    def loss(self, figures):
        self.first = figures
        generator = torch.Generator().manual_seed(8)
        weights = {}
        for name, value in figures.items():
            weights[name] = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        return sum((weights[name] * figures[name]).sum() for name in figures), weights

    def backward(self, weighted):
        weighted.backward()

    def weights(self, row):
        """Its gradients, by name, of the tokens of a rank's row."""
        like = {"entropy": (), "log_probs": (), "scores": (CLASSES,)}  # in this order there
        tokens = sum(row.lengths)
        figures = {n: torch.zeros(tokens, *size).double() for n, size in like.items()}
        return self.loss(figures)[1]


def run_once(step, objective, weights):
    """Run the only pass of a step, and return its loss."""
    figures = FigurePasses(step, objective).only(weights)
    loss, gradients = objective.loss(figures)
    assert difference_of(weights, gradients) is None
    return loss


def passes(rank, world_size, plan, sources, lockstep, model_options):
    """Of two passes and of one: gradients, figures, the loss, and what the generator of random
    numbers gives afterwards; and whether one pass ran each micro-batch once."""
    communicator = join(TOPOLOGIES[world_size])
    model = model_of_figures(**model_options)
    found = []
    for once in (False, True):
        torch.manual_seed(5)
        step = pass_step(plan, sources, communicator, lockstep=lockstep)
        objective = LinearObjective(model)
        if once:
            loss = run_once(step, objective, objective.weights(step.row))
        else:
            loss = run_passes(step, objective)
        gradients = summed_gradients(model, communicator)
        found.append((gradients, objective.first, float(loss), torch.rand(1)))
    return *found, objective.calls == len(step.indices)


@pytest.mark.parametrize(
    ("world_size", "seed", "model_options"),
    [
        *((3, seed, {}) for seed in range(4)),
        # random numbers are those of the thread's process, so of one rank
        (1, 0, {"dropout": 0.3}),
        (1, 0, {"dropout": 0.3, "checkpointing": True}),
    ],
)
def test_one_pass_has_the_gradients_of_two(world_size, seed, model_options):
    """With dropout, too: the second pass repeats the random numbers of the first one, and leaves
    the generator as it found it."""
    micro_batches = 3 if model_options else None
    plan = random_plan(LENGTHS, world_size, random.Random(seed), micro_batches=micro_batches)
    arguments = (plan, sources_of(len(LENGTHS), world_size, seed), bool(seed % 2), model_options)
    for two, one, each_once in run_threads(passes, world_size, *arguments):
        assert max(relative_errors(one[0], two[0]).values()) < 1e-12
        for name, figure in two[1].items():
            assert torch.equal(one[1][name], figure)
        assert one[2] == pytest.approx(two[2], rel=1e-12)
        if world_size == 1:
            assert one[3] == two[3]
        assert each_once


def again(rank, world_size, plan, model_options):
    """Gradients of two passes, and of one with wrong weights whose gradients are dropped."""
    found = []
    for once in (False, True):
        torch.manual_seed(5)
        step = pass_step(plan, [0] * len(LENGTHS), join(TOPOLOGIES[1]))
        objective = LinearObjective(model_of_figures(**model_options))
        passes = FigurePasses(step, objective)
        weights = objective.weights(step.row)
        if once:
            wrong = {name: 1.001 * value for name, value in weights.items()}
            figures = passes.only(wrong)
            objective.model.zero_grad()
        else:
            figures = passes.first()
        _, gradients = objective.loss(figures)
        passes.second(figures, gradients)
        own = objective.model.named_parameters()
        found.append({name: parameter.grad for name, parameter in own})
    return found


@pytest.mark.parametrize("model_options", [{}, {"dropout": 0.3}])
def test_a_pass_with_wrong_weights_is_followed_by_a_second_one(model_options):
    plan = random_plan(LENGTHS, 1, random.Random(0), micro_batches=3)
    ((two, ours),) = run_threads(again, 1, plan, model_options)
    assert max(relative_errors(ours, two).values()) < 1e-12
