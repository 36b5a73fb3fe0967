"""Random plans whose delta rules run by flash-linear-attention's functions, for which a stand-in
goes token by token."""

import pytest

from hf_flexseq.attention.recurrent import layers
from hf_flexseq.kernels.scans.choose import FLA
from tests.kernels.scans.test_fla import package  # noqa: F401
from tests.random_runs import MOST_ERROR, AttentionRun, draw, run_attention

DELTA = {"gated delta", "kimi delta"}


def runs(count):
    """Numbers of runs with a delta rule over at least three ranks."""
    number = 0
    while count:
        run = draw(number)
        if isinstance(run, AttentionRun) and DELTA & {kind.recurrent for kind in run.kinds}:
            groups = [g for micro_batch in run.plan.micro_batches for g in micro_batch.groups]
            if max(group.degree for group in groups) > 2:
                yield number
                count -= 1
        number += 1


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("number", list(runs(2)))
def test_delta_rules_of_the_package_end_with_the_gradients_of_one_process(number, monkeypatch):
    monkeypatch.setattr(layers, "choose_scan", lambda *call: FLA)
    assert run_attention(draw(number)) <= MOST_ERROR
