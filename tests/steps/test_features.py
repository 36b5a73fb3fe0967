"""steps/features.py: a sharded tower, which runs once more in the last micro-batch."""

import torch

from hf_flexseq.plan.images import IMAGE, ImagePlacement, ImageSize
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
        self.made.append(self.weight * torch.rand(TOKENS, WIDTH))
        return self.made[-1]

    def agree(self, modalities, cpu_group):
        """One rank has nothing to learn."""


def features_of_two_micro_batches(rank, world_size):
    tower = NoisyTower()
    sizes = {"modality": IMAGE, "tokens": TOKENS, "patches": TOKENS, "pairs": 1}
    step = StepImages(
        [Image(sequence=0, arguments={}, **sizes)],
        [torch.arange(4), torch.arange(4, TOKENS)],
        images=[ImageSize(sequence=0, data_bytes=0, **sizes)],
        placement=ImagePlacement(owners=(0,), stand_ins=(), loads=(1,), cheapest=0),
        calls=1,
        communicator=join(),
        device=torch.device("cpu"),
        is_sharded=True,
    )
    step.begin(last=1)
    first = step.of_micro_batch(0, tower)
    first.sum().backward()
    torch.rand(5)  # what the rest of the model draws
    last = step.of_micro_batch(1, tower)
    last.sum().backward()
    return tower, torch.cat([first, last]).detach()


def test_a_second_run_of_a_tower_has_the_dropout_of_the_first():
    ((tower, features),) = run_threads(features_of_two_micro_batches, 1)
    assert len(tower.made) == 2
    assert torch.equal(*tower.made)
    assert torch.equal(features, tower.made[0])
    torch.testing.assert_close(tower.weight.grad, tower.made[0].sum(dim=0).detach())
