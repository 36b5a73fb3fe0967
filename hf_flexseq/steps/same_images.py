"""Find images with the same pixels among all ranks' images of a step, to encode each once. The two
rows of a pair share images, and so do all answers to a prompt, and an agent's calls.

1. Every rank *marks* its images by digests of some of their values, which cost next to nothing.
   Marks are gathered with the lengths.
2. Images of the same sizes and marks may be the same. Their *digests*, of all bytes, are gathered;
   a step without such images ends before. Equal sizes and digests are taken for equal pixels.
"""

from collections import Counter
from collections.abc import Sequence

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.plan.images import ImageSize
from hf_flexseq.steps.digests import digest_of
from hf_flexseq.steps.images import Image


def distinct_images(
    own: Sequence[Image],
    images: Sequence[ImageSize],
    marks: Sequence[int],
    first_own: int,
    communicator: Communicator,
) -> tuple[list[int], list[int]]:
    """Return the indices of the images of a step that are the first with their pixels, and of each
    image which of these has its pixels. Collective over the world if some may be the same.

    own: of this rank; first_own: the index of the first of them. images, marks: of all ranks.
    """
    keys: list[tuple[int | str, ...]] = []
    for image, mark in zip(images, marks, strict=True):
        sizes = (image.modality, image.tokens, image.patches, image.pairs, image.data_bytes)
        keys.append((*sizes, mark))
    counts = Counter(keys)
    candidates = [index for index, key in enumerate(keys) if counts[key] > 1]
    if candidates:
        digests: list[int] = []
        for index in candidates:
            if first_own <= index < first_own + len(own):
                digests += digest_of(own[index - first_own].arguments)
        of_ranks = communicator.cpu_group.gather_values(digests)
        gathered = [number for of_rank in of_ranks for number in of_rank]
        for place, index in enumerate(candidates):  # ranks, and the images of each, are in order
            keys[index] = (*keys[index], *gathered[2 * place : 2 * place + 2])
    first: dict[tuple[int | str, ...], int] = {}
    distinct: list[int] = []
    which = []
    for index, key in enumerate(keys):
        if counts[key] == 1 or key not in first:
            first[key] = len(distinct)
            distinct.append(index)
        which.append(first[key])
    return distinct, which
