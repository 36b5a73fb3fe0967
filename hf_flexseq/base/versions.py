"""The versions of transformers, accelerate, TRL and PEFT that are tested, and where they differ.

Code asks here, and nowhere else, for features that only some of these versions have:

    what                                               from     in older versions
    Trainer.is_distributed_loading_by_transformers     5.19     no trainer knows of such models
    Trainer._defer_fsdp_gradient_reduction             5.23     models sharded at load are refused
    TrainingArguments.activation_checkpointing         5.23     the name is gradient_checkpointing
    "offload" among the options of checkpointing       5.17     refused
    mm_encoder_outputs of a model's forward            5.18     examples with images are refused
    Trainer._save on all ranks, and not on the writer  5.23     `saves_on_writers`
    cache among the arguments of layers                5.24     the name is past_key_values
    fused_lm_head of DPO, KTO, GRPO and RLOO           TRL 1.15 refused: losses read logits
    fused_lm_head of SFT                               TRL 1.15 with 'chunked_nll' alone, and rows
                                                                share no prefixes
    DistillationTrainer outside of trl.experimental    TRL 1.16 refused
    get_peft_model_state_dict of parts on ranks        PEFT     refused on experts over ranks
                                                       0.21.1

Versions without a name mean transformers. Others than the tested ones are not refused.
`warn_untested` names them once.
"""

import functools
import logging
import re
from importlib import metadata
from typing import Any

logger = logging.getLogger(__name__)

TESTED: dict[str, tuple[str, str]] = {
    "transformers": ("5.16.1", "5.24.0"),
    "accelerate": ("1.13.0", "1.15.0"),
    "trl": ("1.9.0", "1.16.0"),
    "peft": ("0.18.0", "0.21.2"),
}
"""The oldest and the newest version of each package that the tests run with."""

SHARDED_LOAD_FROM = "5.23"
OFFLOAD_FROM = "5.17"
IMAGES_FROM = "5.18"
FUSED_HEAD_FROM = "1.15"  # of TRL
SPREAD_ADAPTERS_FROM = "0.21.1"  # of PEFT


# ---- versions


@functools.cache
def installed(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_older(package: str, version: str) -> bool:
    """Tell whether an installed package is older than a version, by as many numbers as that
    has."""
    found = installed(package)
    wanted = _numbers(version)
    return found is not None and _numbers(found)[: len(wanted)] < wanted


def needs(package: str, version: str) -> str:
    """Return a part of an error: which version of a package is needed, and which is installed."""
    return f"it needs {package} {version}, and {installed(package)} is installed"


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: patches change no interface."""
    return _numbers(version)[:2]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


# ---- the warning


def untested(package: str) -> str | None:
    """Return the tested versions of a package, if the installed one is outside of them."""
    found = installed(package)
    if found is None or package not in TESTED:
        return None
    oldest, newest = TESTED[package]
    if _release(oldest) <= _release(found) <= _release(newest):
        return None
    return f"{oldest} to {newest}"


@functools.cache
def warn_untested(*unused: str) -> None:
    """Log one warning, in the process's first call, that names all packages outside of the tested
    versions. unused: packages that the run does not use, which are not named."""
    outside = []
    for package in TESTED:
        tested = untested(package)
        if tested is not None and package not in unused:
            outside.append(f"{package} {installed(package)} (tested: {tested})")
    if outside:
        logger.warning(
            "hf_flexseq is not tested with %s: compare a short run with `flexseq prove MODEL`",
            ", ".join(outside),
        )


# ---- names


def is_sharded_at_load(holder: Any) -> bool:
    """Tell whether transformers has sharded a model, or the model of a trainer, while it was
    loaded (`DistributedConfig`)."""
    return bool(getattr(holder, "is_distributed_loading_by_transformers", False))


def saves_on_writers() -> bool:
    """Tell whether the Trainer calls `_save` on the ranks that write alone: a pipeline, of which
    every rank has a stage, then has to call the others' itself."""
    return is_older("transformers", "5.23")


def checkpointing_name(training: Any) -> str:
    """Return the name of activation checkpointing among training arguments: before 5.23
    gradient_checkpointing, which is accepted ever since."""
    if hasattr(training, "activation_checkpointing"):
        return "activation_checkpointing"
    return "gradient_checkpointing"


def checkpointing_options(training: Any) -> dict[str, Any]:
    """Return the options that the user gives to activation checkpointing, by either name."""
    given = (
        getattr(training, "activation_checkpointing_kwargs", None)
        or getattr(training, "gradient_checkpointing_kwargs", None)
        or {}
    )
    return dict(given)
