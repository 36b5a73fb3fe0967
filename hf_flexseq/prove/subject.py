"""The model that is proven: small, of random weights, with the layers of the one that is named.

A name is a folder or a name on the Hub with a configuration, a config.json, or a class of
transformers, with its default configuration.
"""

import copy
import inspect
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from hf_flexseq.hf.model.facts import is_classifier
from hf_flexseq.hf.model.router import OPTION, RouterFacts, UnknownRouterLoss, router_facts
from hf_flexseq.hf.model.small import plain_options, small_model
from hf_flexseq.hf.trainer.synthetic_models import class_of, config_of

# What transformers raises for configurations that no model can be built from.
_BUILDING_FAILS = (
    *(ImportError, AttributeError, KeyError, TypeError, ValueError, RuntimeError),
    StrictDataclassError,  # of options that do not fit each other
)
_WANTED = (
    "give the folder or the name of a model, a config.json, or a class such as LlamaForCausalLM"
)
COEFFICIENT = "router_aux_loss_coef"


def model_of(name: str, *, whole: bool) -> tuple[PreTrainedModel, str]:
    """Return the model to prove, on the CPU in float32, and its origin in words.

    Raises OSError, ValueError or NotImplementedError for a name without a model, and for a model
    that cannot be built or made small.
    """
    named = getattr(transformers, name, None) if name.isidentifier() else None
    if isinstance(named, type) and issubclass(named, PreTrainedModel):
        if whole:
            raise ValueError(
                f"{name} is a class, which has no weights: give --whole the folder or the name of "
                "a model"
            )
        return _small(named, {}), f"the default configuration of {name}"
    if isinstance(named, type):
        raise ValueError(f"{name} is not a class of models: {_WANTED}")
    config = _config_of(name)
    kind = class_of(config)
    if whole:
        return kind.from_pretrained(name, dtype=torch.float32), name
    return _small(kind, plain_options(config.to_diff_dict())), name


def _config_of(name: str) -> PreTrainedConfig:
    try:
        return config_of(name)
    except (OSError, *_BUILDING_FAILS) as error:
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise ValueError(
            f"{name} has no configuration that transformers {transformers.__version__} can read "
            f"({reason}): {_WANTED}"
        ) from error


def _small(kind: type[PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
    try:
        model = small_model(kind, options)
    except NotImplementedError as error:  # layers of an unknown kind
        raise NotImplementedError(f"{kind.__name__}: {error}") from error
    except _BUILDING_FAILS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{kind.__name__} cannot be made small ({reason}): give the folder or config.json of "
            "a model that can be built, or prove the model itself with --whole"
        ) from error
    has_head = "labels" in inspect.signature(kind.forward).parameters
    if is_classifier(model) or not has_head:
        raise ValueError(
            f"{kind.__name__} has no head that predicts tokens: name the ...ForCausalLM, or "
            "...ForConditionalGeneration, of the same model"
        )
    return model


# ---- with and without its router loss


class Routed(NamedTuple):
    """A mixture of experts that adds a router loss to its own."""

    model: PreTrainedModel
    facts: RouterFacts


def without_router_loss(model: PreTrainedModel) -> None:
    """Have a model leave out its router loss, if it has one."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, OPTION):
            setattr(config, OPTION, False)


def has_experts(model: PreTrainedModel) -> bool:
    """Return True for a mixture of experts."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def with_router_loss(model: PreTrainedModel) -> Routed:
    """Return a copy of a model that adds its router loss, with a coefficient of 1, so that its
    gradients are as large as others. Raises UnknownRouterLoss for a model without a known one."""
    twin = copy.deepcopy(model)
    for owner in (twin, twin.config, twin.config.get_text_config()):
        if hasattr(owner, COEFFICIENT):
            setattr(owner, COEFFICIENT, 1.0)
    facts = router_facts(twin)
    if not facts.coefficient:
        raise UnknownRouterLoss(f"its {COEFFICIENT} is 0")
    for config in (twin.config, twin.config.get_text_config()):
        setattr(config, OPTION, True)
    return Routed(twin, facts)
