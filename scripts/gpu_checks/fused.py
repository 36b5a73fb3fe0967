"""Triton's kernels for merging, adding, gathering and packing: GB/s of what each writes, beside
torch's operations. Plans price them by the bandwidth of memory. Their results are tests
(`pytest --device cuda tests/kernels/test_fused_operations.py`).
"""

import torch

from gpu_checks.rates import median_s
from gpu_checks.report import Section, Setting, table
from hf_flexseq.kernels.choose import reason_without_triton
from hf_flexseq.kernels.fused_operations import Fused, TorchFused
from tests.kernels.large_fused import CASES, SMALL_CASES, Case, works

TITLE = "Merging, adding, gathering and packing: GB/s written"


def fused_section(setting: Setting) -> Section:
    """Time every operation by Triton and by torch."""
    device = setting.device
    implementations: list[Fused] = [TorchFused()]
    if device.type == "cuda":
        refusal = reason_without_triton()
        if refusal is not None:
            return Section.not_run(TITLE, refusal)
        from hf_flexseq.kernels.triton_fused import TritonFused

        implementations.insert(0, TritonFused())
    rows = []
    for case in SMALL_CASES if setting.rehearse else CASES[:2]:
        for fused in implementations:
            rows.append([case.name, str(case.dtype), fused.name, *_speeds(fused, case, device)])
    names = list(works(case.sizes, device, case.dtype))
    return Section(title=TITLE, lines=table(["sizes", "dtype", "by", *names], rows))


def _speeds(fused: Fused, case: Case, device: torch.device) -> list[str]:
    """Return the GB/s of every operation."""
    cells = []
    for make in works(case.sizes, device, case.dtype).values():
        work = make()
        written = sum(x.numel() * x.element_size() for x in work.written)
        seconds = median_s(lambda work=work: work.run(fused), device)
        cells.append(f"{written / seconds / 1e9:,.0f}")
    return cells
