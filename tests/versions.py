"""Marks of tests that need newer versions of the libraries than the oldest ones."""

import pytest

from hf_flexseq.base.versions import installed, is_older
from tests.programs import ROOT


def since(package, version, what):
    """Skip a test where a package is older. what: the thing that the older ones lack."""
    reason = f"{package} {installed(package)} is older than {version}: {what}"
    return pytest.mark.skipif(is_older(package, version), reason=reason)


reads_log_probabilities = since("trl", "1.15", "losses of DPO, KTO, GRPO and RLOO read logits")
reads_optimizer_on_cpus = since(
    "transformers", "5.18", "the Trainer reads no optimizer.pt on several CPU processes"
)


def skip_where_the_plain_model_fails(family):
    """Skip a family of models whose forward raises in the installed transformers itself."""
    version = installed("transformers")
    if (family, version) in _FAIL:
        pytest.skip(f"{family} of transformers {version} fails: {_FAIL[family, version]}")


_FAIL = {("llama4", "5.24.0"): "its output has no image_outputs, which its forward reads"}

# For tests of tables of all models, which are those of one version.
pinned_transformers = pytest.mark.skipif(
    f"transformers=={installed('transformers')}\n"
    not in (ROOT / "scripts/constraints.txt").read_text(),
    reason="the tables are of the transformers of scripts/constraints.txt",
)
