"""Images with the same pixels are found over all ranks, and others never taken for the same."""

import pytest
import torch

from hf_flexseq.plan.images import ImageSize
from hf_flexseq.steps.digests import digest_of, mark_of
from hf_flexseq.steps.images import Image, RowImages, data_bytes_of
from hf_flexseq.steps.row_facts import RowFacts
from hf_flexseq.steps.same_images import distinct_images
from hf_flexseq.steps.source_row import SourceRow
from tests.ranks import host_exchanges, join, run_threads


def image_of(pixels, sequence=0, tokens=4):
    grid = torch.tensor([[1, 2, 2]])
    arguments = {"pixel_values": pixels, "image_grid_thw": grid}
    size = ImageSize(
        sequence=sequence,
        modality="image",
        tokens=tokens,
        patches=16,
        pairs=256,
        data_bytes=data_bytes_of(arguments),
    )
    return Image(size=size, arguments=arguments)


def random_pixels(seed, size=5000, dtype=torch.float32):
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def found_by(rank, world_size, by_rank):
    """What a rank finds where ranks have drawn these images, and its exchanges meanwhile."""
    communicator = join()
    own = RowImages(images=tuple(by_rank[rank]), placeholders={"image": 9})
    row = SourceRow(columns={}, lengths=(1,) * len(own.images), images=own)
    gathered = communicator.cpu_group.gather_values(RowFacts.of(row, marks=()))
    of_ranks = [RowFacts(*one) for one in gathered]
    everyone = RowFacts.joined(of_ranks, "a test")
    before = host_exchanges(communicator)
    found = distinct_images(
        own.images,
        [ImageSize(**size) for size in everyone.images],
        everyone.image_marks,
        sum(len(one.images) for one in of_ranks[:rank]),
        communicator,
    )
    return found, host_exchanges(communicator) - before


def test_the_same_pixels_are_found_on_all_ranks():
    a, b = random_pixels(1), random_pixels(2)
    by_rank = [
        [image_of(a), image_of(b, sequence=1)],
        [],
        [image_of(b.clone()), image_of(a.clone(), sequence=1), image_of(random_pixels(3))],
    ]
    for (distinct, which), exchanges in run_threads(found_by, 3, by_rank):
        assert distinct == [0, 1, 4]
        assert which == [0, 1, 1, 0, 2]
        assert exchanges == 1


def test_without_the_same_marks_nothing_is_exchanged():
    by_rank = [[image_of(random_pixels(1))], [image_of(random_pixels(2))]]
    for (distinct, which), exchanges in run_threads(found_by, 2, by_rank):
        assert (distinct, which, exchanges) == ([0, 1], [0, 1], 0)


def test_one_value_that_no_mark_reads_makes_another_image():
    pixels = random_pixels(1, size=40_000)
    others = []
    for place in range(0, 64):
        other = pixels.clone()
        other[place] += 1e-3
        others.append(other)
    unmarked = [one for one in others if mark_of({"x": one}) == mark_of({"x": pixels})]
    assert len(unmarked) > 30, "a mark reads few of the values"
    by_rank = [[image_of(pixels)], [image_of(unmarked[0])]]
    for (distinct, which), exchanges in run_threads(found_by, 2, by_rank):
        assert (distinct, which, exchanges) == ([0, 1], [0, 1], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_digests_tell_single_values_and_their_places_apart(dtype):
    pixels = random_pixels(1, size=999).mul(200).to(dtype)
    swapped = pixels.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    changed = pixels.clone()
    changed[-1] += 1
    digests = {digest_of({"x": one}) for one in (pixels, swapped, changed)}
    assert len(digests) == 3
    assert digest_of({"x": pixels.clone()}) in digests
    shifted = torch.cat([pixels[:1], pixels])[1:]  # the same values at another address
    assert digest_of({"x": shifted}) == digest_of({"x": pixels})


def test_black_and_white_pixels_are_told_apart():
    """They may be -1 and 1, which differ in one bit, the highest of a word in each second one."""
    white = torch.ones(3, 8, 8)
    digests = {digest_of({"x": white})}
    for place in range(8):
        for count in (1, 2):
            changed = white.clone()
            changed[:count, 0, place] = -1.0
            digests.add(digest_of({"x": changed}))
    assert len(digests) == 1 + 8 * 2
