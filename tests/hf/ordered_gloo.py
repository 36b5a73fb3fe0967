"""gloo that claims to carry out transfers in order, so that a CPU takes the way of NCCL."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from hf_flexseq.distributed.gloo import GlooTransport


@contextmanager
def ordered_gloo(is_ordered=True):
    """Surround a run whose transport is said to be ordered."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        capabilities = replace(GlooTransport.capabilities, ordered=is_ordered)
        monkeypatch.setattr(GlooTransport, "capabilities", capabilities)
        yield
