"""steps/features.py: a tower that runs twice, in the last micro-batch or its backward, and
gradients of an image that many tokens have."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_flexseq.plan.images import IMAGE, ImagePlacement, ImagePlan, ImageSize
from hf_flexseq.steps.features import StepImages
from hf_flexseq.steps.images import Image
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


def features_of_two_micro_batches(rank, world_size, is_sharded):
    tower = NoisyTower()
    sizes = {"modality": IMAGE, "tokens": TOKENS, "patches": TOKENS, "pairs": 1}
    step = StepImages(
        [Image(sequence=0, arguments={}, **sizes)],
        [torch.arange(4), torch.arange(4, TOKENS)],
        images=[ImageSize(sequence=0, data_bytes=0, **sizes)],
        plan=ImagePlan(
            placement=ImagePlacement(owners=(0,), stand_ins=(), loads=(1,), cheapest=0),
            keeps_graph=is_sharded,
            held_bytes=0.0,
        ),
        calls=1,
        communicator=join(),
        device=torch.device("cpu"),
        is_sharded=is_sharded,
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


class Additions(TorchDispatchMode):
    """Notes the dtypes in which rows are added to others."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Called for every operator inside of the block."""
        if function is torch.ops.aten.index_add_.default:
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


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
    sizes = {"modality": IMAGE, "tokens": 1, "patches": 1, "pairs": 1}
    step = StepImages(
        [Image(sequence=0, arguments={}, **sizes)],
        [torch.zeros(600, dtype=torch.int64)],
        images=[ImageSize(sequence=0, data_bytes=0, **sizes)],
        plan=ImagePlan(
            placement=ImagePlacement(owners=(0,), stand_ins=(), loads=(1,), cheapest=0),
            keeps_graph=True,
            held_bytes=0.0,
        ),
        calls=1,
        communicator=join(),
        device=torch.device("cpu"),
        is_sharded=False,
    )
    step.begin(last=0)
    with Additions() as additions:
        step.of_micro_batch(0, tower).sum().backward()
    return tower.weight.grad, additions.dtypes


def test_gradients_of_a_row_that_many_tokens_have_are_added_in_float32():
    ((gradient, dtypes),) = run_threads(gradient_of_a_shared_row, 1)
    assert gradient.dtype == torch.bfloat16
    assert gradient.tolist() == [[600.0] * WIDTH]
    assert dtypes == [torch.float32], "in bfloat16 a GPU counts no further than 256"
