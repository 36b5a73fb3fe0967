"""Steps whose loss is computed on the source ranks: whatever a loss makes of log-probabilities,
entropies and scores of whole sequences, and wherever a plan has put their tokens, gradients are
those of one process that keeps one graph of everything, to 1e-10 in float64. A loss whose
gradients are known before it takes one pass, to the gradients of two."""

import math
import random
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_flexseq.attention import SequenceContext
from hf_flexseq.base.topology import Topology
from hf_flexseq.kernels.choose import choose_kernel
from hf_flexseq.plan.layout import PlanLayout
from hf_flexseq.steps.exchange import micro_batch_routes
from hf_flexseq.steps.figure_passes import FigurePasses, difference_of
from hf_flexseq.steps.inputs import indices_to_run, inputs_of
from hf_flexseq.steps.micro_batches import RankMicroBatches
from hf_flexseq.steps.source_row import DrawnStep, PlannedStep
from tests.hf.by_hand import TWO_NODES, drawn_row, summed_gradients
from tests.hf.tiny import documents, relative_errors, taken_gradients, tiny_llama
from tests.plans import group, plan_of_groups, random_plan
from tests.ranks import join, run_threads

CPU = torch.device("cpu")

LENGTHS = [1, 2, 17, 5, 31, 3, 40, 11]
EXAMPLES = documents(LENGTHS)
CLASSES = 3
PLANS = 8  # of a number of ranks
TOPOLOGIES = {ranks: Topology(nodes=1, ranks_per_node=ranks) for ranks in (1, 2, 3)}
TOPOLOGIES[4] = TWO_NODES
# The figures on which the loss of a plan's step depends; "one" is where that of rank 0 alone does.
USES = (
    {"log_probs": "all"},
    {"log_probs": "all", "entropy": "one"},
    {"log_probs": "all", "entropy": "all", "scores": "all"},
    {"scores": "one"},
    {"log_probs": "all", "sums": "all"},
    {"scores": "all", "sums": "one"},
)
# Beside figures there are sums over all tokens of the step.
TOTALS = ("sums",)


# ---- a model that gives figures, and a loss of them


def model_of_figures(dropout=0.0, checkpointing=False, attention="flexseq"):
    """A causal model that is called on a row and returns figures of its tokens, each
    [tokens, ...], in float64 altogether: TRL's own head computes in float32."""
    model = tiny_llama()
    model.set_attn_implementation(attention)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.score = nn.Linear(32, CLASSES, bias=False, dtype=torch.float64)
    nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    if dropout:
        for layer in model.model.layers:
            layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(dropout))
    model.forward = MethodType(_figures_of, model)
    return model.train()


def _figures_of(model, input_ids, shift_labels, labels=None, **options):
    hidden = model.model(input_ids=input_ids, use_cache=False, **options).last_hidden_state[0]
    logits = F.linear(hidden, model.lm_head.weight).log_softmax(-1)  # [tokens, vocabulary]
    targets = shift_labels[0].clamp(min=0)
    return {
        "log_probs": logits.gather(-1, targets[:, None])[:, 0],
        "entropy": -(logits.exp() * logits).sum(-1),
        "scores": model.score(hidden),  # [tokens, classes]
    }


def random_loss(figures, rank, uses, seed):
    """A function of all figures of a rank's row that is no sum over tokens, a scalar."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    mixed = torch.zeros(4, dtype=torch.float64)
    for name, whose in uses.items():
        if whose == "all" or rank == 0:
            values = figures[name].flatten()  # [tokens times values of one]
            weights = torch.randn(4, len(values), generator=generator, dtype=torch.float64)
            mixed = mixed + weights @ values / max(math.sqrt(len(values)), 1.0)
    return mixed.tanh().square().sum() + (mixed[0] * mixed[1]).sin()


def sums_of(figures):
    """A sum over tokens, [classes]."""
    return figures["scores"].tanh().sum(dim=0)


class RandomObjective:
    """`random_loss` of what a wrapped model gives."""

    totals = TOTALS

    def __init__(self, model, rank, uses, seed):
        self.model, self.rank, self.uses, self.seed = model, rank, uses, seed
        self.calls = 0

    def forward(self, inputs, weights=None):
        self.calls += 1
        figures = self.model(**inputs)
        return {**figures, "sums": sums_of(figures)}

    def loss(self, figures):
        leaves = {name: value.clone().requires_grad_() for name, value in figures.items()}
        loss = random_loss(leaves, self.rank, self.uses, self.seed)
        if loss.requires_grad:  # not so on a rank whose loss depends on nothing
            loss.backward()
        gradients = {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}
        return loss.detach(), gradients

    def backward(self, weighted):
        weighted.backward()


def sources_of(count, world_size, seed):
    """The rank that draws each sequence; some draw none."""
    rng = random.Random(seed)
    return sorted(rng.randrange(world_size) for _ in range(count))


def one_process(sources, world_size, uses, seed):
    """The sum of all ranks' losses, and its gradients by parameter, of one process that calls its
    own attention on one document at a time."""
    model = model_of_figures(attention="sdpa")
    by_rank = []
    sums = torch.zeros(CLASSES, dtype=torch.float64)
    for rank in range(world_size):
        found = []
        for example, source in zip(EXAMPLES, sources, strict=True):
            if source == rank:
                labels = torch.tensor([[*example["labels"][1:], -100]])
                found.append(model(torch.tensor([example["input_ids"]]), labels))
        if found:
            figures = {name: torch.cat([own[name] for own in found]) for name in found[0]}
            sums = sums + sums_of(figures)
        else:
            figures = {name: torch.zeros(0, dtype=torch.float64) for name in uses}
        by_rank.append(figures)
    total = torch.zeros((), dtype=torch.float64)
    for rank, figures in enumerate(by_rank):
        total = total + random_loss({**figures, "sums": sums}, rank, uses, seed)
    total.backward()
    return float(total.detach()), taken_gradients(model)


# ---- ranks that are threads


def pass_step(plan, sources, communicator, *, lockstep=False):
    """A step as the executor dispatches it. Every rank draws its part of the examples."""
    row = drawn_row(EXAMPLES, sources, communicator)
    layout = PlanLayout(plan, communicator.rank)
    shards = layout.shards
    routes = micro_batch_routes(row, layout, sources, communicator)
    columns = routes.dispatch(row.columns)
    kernel = choose_kernel(CPU, torch.float64, 8)

    def context(shard):
        return SequenceContext(shard, communicator, kernel, CPU)

    drawn = DrawnStep(
        number=0,
        request=0,
        row=row,
        lengths=plan.lengths,
        sources=tuple(sources),
        targets=(1,) * len(plan.lengths),
    )
    return RankMicroBatches(
        PlannedStep(drawn=drawn, plan=plan),
        indices=indices_to_run(shards, lockstep=lockstep),
        counts=[shard.tokens for shard in shards],
        inputs_of=lambda index: inputs_of(shards[index], columns[index], CPU, context),
        routes=routes,
        device=CPU,
    )


def run_passes(step, objective):
    """Run both passes of a step around its loss, and return the loss."""
    passes = FigurePasses(step, objective)
    figures = passes.first()
    step.loss, gradients = objective.loss(figures)
    passes.second(figures, gradients)
    return step.loss


def cases_of(world_size):
    """Plans with who draws what, what the loss uses, and whether ranks run in lockstep and layers
    are checkpointed."""
    topology = TOPOLOGIES[world_size]
    rng = random.Random(world_size)
    cases = []
    for seed in range(PLANS):
        plan = random_plan(LENGTHS, world_size, rng, nodes=topology.nodes)
        sources = sources_of(len(LENGTHS), world_size, seed)
        uses = USES[seed % len(USES)]
        cases.append((plan, sources, uses, bool(seed & 1), bool(seed & 2), seed))
    # a rank without any work beside one with two micro-batches
    alone = plan_of_groups(LENGTHS, [group(0, 1, *range(4))], [group(0, 1, *range(4, 8))])
    for lockstep in (False, True):
        sources = sources_of(len(LENGTHS), world_size, 99)
        cases.append((alone, sources, USES[2], lockstep, False, 99))
    return cases


def errors_of(rank, world_size, cases, wanted):
    """The largest relative error of loss and gradients, and the model's calls on this rank, by
    case."""
    communicator = join(TOPOLOGIES[world_size])
    found = []
    for case, one in zip(cases, wanted, strict=True):
        plan, sources, uses, lockstep, checkpointing, seed = case
        model = model_of_figures(checkpointing=checkpointing)
        step = pass_step(plan, sources, communicator, lockstep=lockstep)
        objective = RandomObjective(model, rank, uses, seed)
        loss = run_passes(step, objective)
        communicator.cpu_group.all_reduce(loss)
        errors = relative_errors(summed_gradients(model, communicator), one[1])
        found.append((max(abs(float(loss) / one[0] - 1), *errors.values()), objective.calls))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.nightly), 3, 4])
def test_gradients_of_any_loss_equal_one_process(world_size):
    cases = cases_of(world_size)
    wanted = [
        one_process(sources, world_size, uses, seed) for _, sources, uses, _, _, seed in cases
    ]
    by_rank = run_threads(errors_of, world_size, cases, wanted)
    for of_rank in by_rank:
        assert max(error for error, _ in of_rank) < 1e-10
    # m micro-batches repeat m - 1 forwards
    for index, (plan, _, _, lockstep, _, _) in enumerate(cases):
        if lockstep:
            for of_rank in by_rank:
                assert of_rank[index][1] == 2 * len(plan.micro_batches) - 1


def test_the_plans_are_of_every_kind():
    seen = set()
    for world_size in (2, 3, 4):
        for plan, sources, _, lockstep, checkpointing, _ in cases_of(world_size):
            if lockstep and checkpointing:
                seen.add("checkpointed layers in lockstep")
            if len(set(sources)) < world_size:
                seen.add("a rank that draws nothing")
            if len(plan.micro_batches) > 2:
                seen.add("three micro-batches")
            for rank in range(world_size):
                shards = PlanLayout(plan, rank).shards
                counts = [shard.tokens for shard in shards]
                if not any(counts):
                    seen.add("a rank that holds nothing")
                elif not all(counts):
                    seen.add("a rank that holds nothing of a micro-batch")
                if any(len(shard.zones) > 1 for shard in shards):
                    seen.add("zones")
    assert len(seen) == 6, seen


# ---- one pass


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
