"""A step whose loss has gradients that are known before it takes one pass, to the gradients of
two."""

import random

import pytest
import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.steps.figure_passes import FigurePasses, check_known
from tests.hf.tiny import relative_errors
from tests.plans import random_plan
from tests.ranks import join, run_threads
from tests.steps.test_passes import (
    CLASSES,
    LENGTHS,
    TOPOLOGIES,
    LinearObjective,
    model_of_figures,
    pass_step,
    run_passes,
    sources_of,
    summed_gradients,
)

ALONE = Topology(nodes=1, ranks_per_node=1)


class CountedObjective(LinearObjective):
    """A linear loss whose weights are known."""

    def __init__(self, model):
        super().__init__(model)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)

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
    check_known(weights, gradients)
    return loss


def passes(rank, world_size, plan, sources, lockstep):
    """Gradients of two passes and of one, figures of both, and the forwards of the second."""
    communicator = join(TOPOLOGIES[world_size])
    model = model_of_figures()
    found = []
    for once in (False, True):
        step = pass_step(plan, sources, communicator, lockstep=lockstep)
        objective = CountedObjective(model)
        if once:
            loss = run_once(step, objective, objective.weights(step.row))
        else:
            loss = run_passes(step, objective)
        gradients = summed_gradients(model, communicator)
        found.append((gradients, objective.first, float(loss)))
    return found, objective.calls == len(step.indices)


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_has_the_gradients_of_two(seed):
    world_size = 3
    plan = random_plan(LENGTHS, world_size, random.Random(seed), nodes=1)
    sources = sources_of(len(LENGTHS), world_size, seed)
    for (two, one), each_once in run_threads(passes, world_size, plan, sources, bool(seed % 2)):
        assert max(relative_errors(one[0], two[0]).values()) < 1e-12
        for name, figure in two[1].items():
            assert torch.equal(one[1][name], figure)
        assert one[2] == pytest.approx(two[2], rel=1e-12)
        assert each_once


def with_wrong_weights(rank, world_size, plan):
    step = pass_step(plan, [0] * len(LENGTHS), join(ALONE))
    objective = CountedObjective(model_of_figures())
    weights = objective.weights(step.row)
    weights["entropy"] *= 1.001
    with pytest.raises(RuntimeError, match="other gradients of entropy than it was known to have"):
        run_once(step, objective, weights)
    del weights["entropy"]
    with pytest.raises(RuntimeError, match="other gradients of entropy"):
        run_once(step, objective, weights)


def test_weights_that_are_not_the_gradients_are_refused():
    plan = random_plan(LENGTHS, 1, random.Random(0), nodes=1)
    run_threads(with_wrong_weights, 1, plan)
