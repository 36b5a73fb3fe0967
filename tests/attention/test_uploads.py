"""What is copied to the device at once."""

import numpy as np
import pytest
import torch

from hf_flexseq.attention import uploads
from hf_flexseq.program.tables import Tables


@pytest.mark.parametrize("sizes", [(1, 3, 2), (4,), (0, 5)])
def test_every_array_begins_at_a_multiple_of_16_bytes_and_has_its_numbers(sizes, monkeypatch):
    monkeypatch.setattr(uploads, "to_device", lambda host, device: host)
    tables = Tables()
    arrays = [np.arange(size, dtype=np.int64) + 100 * size for size in sizes]
    tables.indices += arrays
    calls = [tables.call((3,), (5,), causal=True), tables.call((4, 0, 9), (4, 1, 9), causal=True)]
    on_gpu = uploads.Uploads(tables, torch.device("cuda"))
    on_gpu.bring()
    brought = [on_gpu.indices[number] for number in range(len(sizes))]
    assert [index.tolist() for index in brought] == [array.tolist() for array in arrays]
    for number in calls:
        segments = on_gpu.segments[number]
        brought += [segments.cu_seqlens_q, segments.cu_seqlens_k]
    assert [lengths.tolist() for lengths in brought[-2:]] == [[0, 4, 4, 13], [0, 4, 5, 14]]
    assert all(array.data_ptr() % 16 == 0 for array in brought if array.numel())
