"""Chunks of one layout share the programs of their attention."""

import torch

from hf_flexseq.kernels.reference import Reference
from hf_flexseq.pipeline.carry import KVCarry
from hf_flexseq.pipeline.context import ChunkContext, programs_of_layouts
from hf_flexseq.plan.pipeline import Chunk
from hf_flexseq.plan.shard import Slice

LENGTHS = (12, 12, 3, 3, 5)


def programs_of(find_programs, kernel, *slices):
    parts = tuple(Slice(sequence=one, start=start, stop=stop) for one, start, stop in slices)
    chunk = Chunk(unit=0, index=0, slices=parts)
    device = torch.device("cpu")
    return ChunkContext(
        chunk, LENGTHS, KVCarry(kernel), device, find_programs=find_programs
    ).programs


def test_chunks_of_one_layout_share_programs_and_no_others_do():
    kernel = Reference()
    find = programs_of_layouts(kernel, None)
    first = programs_of(find, kernel, (0, 0, 4), (2, 0, 3))
    # a later part, of another sequence, beside another sequence of the same length
    assert programs_of(find, kernel, (1, 4, 8), (3, 0, 3)) is first
    others = [
        programs_of(find, kernel, (0, 0, 5), (2, 0, 3)),  # a longer part
        programs_of(find, kernel, (0, 0, 4), (4, 0, 5)),  # a longer sequence beside it
        programs_of(find, kernel, (0, 0, 7)),  # as many tokens in one part
        programs_of(find, kernel, (2, 0, 3)),  # whole, not a part
        programs_of(find, kernel, (0, 0, 3)),  # a part, not whole
    ]
    assert len({id(programs) for programs in (first, *others)}) == 6
