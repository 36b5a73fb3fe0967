"""steps/features.py: a tower that runs twice, in the last micro-batch or its backward, or ahead of
the step; gradients of an image that many tokens have."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from hf_flexseq.base.versions import TESTED
from hf_flexseq.plan.images import IMAGE, ImagePlan, ImageSize
from hf_flexseq.steps.early_encoding import EarlyEncoder, first_values, weights_of
from hf_flexseq.steps.feature_form import FeatureForm
from hf_flexseq.steps.features import StepImages
from hf_flexseq.steps.images import Image, UnsupportedImages
from tests.operators import Noted
from tests.ranks import join, run_threads

TOKENS, WIDTH = 6, 3


class NoisyTower:
    """A trained tower with dropout."""

    is_trained = True

    def __init__(self):
        self.weight = torch.ones(WIDTH, requires_grad=True)
        self.made = []

    def encode(self, images, calls):
        """Features of one image, other ones in every run."""
        self.made.append(torch.rand(TOKENS, WIDTH))
        return self.weight * self.made[-1]

    def agree(self, modalities, cpu_group):
        """One rank has nothing to learn."""


def step_of_one_image(rows, *, is_sharded=False, keeps_graph=False, tokens=TOKENS):
    """The images of a step of one rank. rows: of features that each micro-batch needs."""
    sizes = {"modality": IMAGE, "tokens": tokens, "patches": tokens, "pairs": 1}
    size = ImageSize(sequence=0, data_bytes=0, **sizes)
    return StepImages(
        [Image(size=size, arguments={})],
        rows,
        images=[size],
        plan=ImagePlan(owners=(0,), loads=(1,), cheapest=0, keeps_graph=keeps_graph),
        calls=1,
        communicator=join(),
        device=torch.device("cpu"),
        is_sharded=is_sharded,
    )


def features_of_two_micro_batches(rank, world_size, is_sharded):
    tower = NoisyTower()
    step = step_of_one_image(
        [torch.arange(4), torch.arange(4, TOKENS)], is_sharded=is_sharded, keeps_graph=is_sharded
    )
    step.begin(last=1)
    first = step.of_micro_batch(0, tower)
    first.sum().backward()
    torch.rand(5)  # what the rest of the model draws
    last = step.of_micro_batch(1, tower)
    last.sum().backward()
    return tower, torch.cat([first, last]).detach()


@pytest.mark.parametrize("is_sharded", [True, False])
def test_a_second_run_of_a_tower_has_the_dropout_of_the_first(is_sharded):
    ((tower, features),) = run_threads(features_of_two_micro_batches, 1, is_sharded)
    assert len(tower.made) == 2
    assert torch.equal(*tower.made)
    assert torch.equal(features, tower.made[0])
    torch.testing.assert_close(tower.weight.grad, tower.made[0].sum(dim=0))


class OfTwoTowers(NoisyTower):
    """A tower for images that is frozen, beside one for videos that is trained."""

    def encode(self, images, calls):
        """Features of one image, without a graph."""
        return torch.rand(TOKENS, WIDTH)


def exchanges_of_frozen_features(rank, world_size, keeps_graph):
    step = step_of_one_image([torch.arange(TOKENS)], keeps_graph=keeps_graph)
    step.begin(last=0)
    exchanges = []
    own = step.gradients
    step.gradients = lambda *given: exchanges.append(own(*given)) or exchanges[-1]
    step.of_micro_batch(0, OfTwoTowers()).sum().backward()
    return len(exchanges)


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_a_rank_whose_images_train_nothing_takes_part_in_the_exchange_of_gradients(keeps_graph):
    """Others, with a video, wait for it."""
    assert run_threads(exchanges_of_frozen_features, 1, keeps_graph) == [1]


def dtype_of_added_rows(operator, args, result):
    return args[0].dtype if operator is torch.ops.aten.index_add_.default else None


class OneRowTower:
    """A trained tower in bfloat16 that makes one row."""

    is_trained = True

    def __init__(self):
        self.weight = torch.ones(1, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def encode(self, images, calls):
        """The row."""
        return self.weight * 1

    def agree(self, modalities, cpu_group):
        """One rank has nothing to learn."""


def gradient_of_a_shared_row(rank, world_size):
    tower = OneRowTower()
    step = step_of_one_image([torch.zeros(600, dtype=torch.int64)], keeps_graph=True, tokens=1)
    step.begin(last=0)
    with Noted(dtype_of_added_rows) as additions:
        step.of_micro_batch(0, tower).sum().backward()
    return tower.weight.grad, additions.found


def test_gradients_of_a_row_that_many_tokens_have_are_added_in_float32():
    ((gradient, dtypes),) = run_threads(gradient_of_a_shared_row, 1)
    assert gradient.dtype == torch.bfloat16
    assert gradient.tolist() == [[600.0] * WIDTH]
    assert dtypes == [torch.float32], "in bfloat16 a GPU counts no further than 256"


class FrozenTower:
    """A frozen tower that counts its runs."""

    is_trained = False

    def __init__(self):
        self.weight = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.runs = 0

    @property
    def weights(self):
        """What tells if the weight has been changed."""
        return weights_of([self.weight])

    def first_values(self):
        """What tells the same of changes that torch does not count."""
        return first_values([self.weight])

    def encode(self, images, calls):
        """Features of one image."""
        self.runs += 1
        assert not torch.is_grad_enabled()
        return self.weight * torch.arange(TOKENS).unsqueeze(1)

    def agree(self, modalities, cpu_group):
        """One rank has nothing to learn."""


def encoded_ahead(rank, world_size, change):
    """Features of a step, and the runs of its tower, with another tower's pass before."""
    tower, other = FrozenTower(), FrozenTower()
    other.weight.mul_(2)
    step = step_of_one_image([torch.arange(TOKENS)])
    timed = []

    @contextmanager
    def timing():
        yield
        timed.append(tower.runs)

    step.encode_ahead(tower, EarlyEncoder(torch.device("cpu")), timing())
    with torch.no_grad(), step.of_other_weights():
        step.begin(last=0)
        of_other = step.of_micro_batch(0, other)
    step.begin(last=0)
    features = step.of_micro_batch(0, tower)
    assert (timed, tower.runs, other.runs) == ([1], 1, 1)

    again = step_of_one_image([torch.arange(TOKENS)])
    again.encode_ahead(tower, EarlyEncoder(torch.device("cpu")), timing())
    change(tower)
    again.begin(last=0)
    return of_other, features, again.of_micro_batch(0, tower), tower.runs


@pytest.mark.parametrize(
    "change",
    [lambda tower: tower.weight.mul_(3), lambda tower: tower.weight.data.mul_(3)],
    ids=["in place", "through data"],
)
def test_what_was_encoded_ahead_is_used_unless_weights_have_changed(change):
    ((of_other, features, changed, runs),) = run_threads(encoded_ahead, 1, change)
    rows = torch.arange(TOKENS, dtype=torch.float32).unsqueeze(1).expand(-1, WIDTH)
    assert torch.equal(of_other, 2 * rows)
    assert torch.equal(features, rows)
    assert torch.equal(changed, 3 * rows)
    assert runs == 3


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), ValueError("rows")])
def test_an_error_ahead_of_a_step_is_that_of_its_forward(error):
    def encode():
        raise error

    beside = EarlyEncoder(torch.device("cpu"))
    assert beside.encode(encode, (), nullcontext()) is None
    assert beside.encode(lambda: torch.ones(2), (), nullcontext()).take().tolist() == [1, 1]


# ---- features as a forward reads them


def test_a_field_that_is_not_sent_is_refused_with_the_tested_versions(monkeypatch):
    """Where the installed version is not among them, that is the likeliest cause."""
    monkeypatch.setattr("hf_flexseq.steps.feature_form.installed", lambda package: "5.99.0")
    given = FeatureForm("pooler_output", False, 0, (WIDTH,)).features(torch.rand(TOKENS, WIDTH))
    tested = f"with transformers 5.99.0; tested: 5.16.1 to {TESTED['transformers'][1]}"
    with pytest.raises(UnsupportedImages, match=f"reads masks of .*text alone .{tested}"):
        given.masks  # noqa: B018
