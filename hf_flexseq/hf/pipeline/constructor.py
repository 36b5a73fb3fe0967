"""The arguments of a Trainer's constructor, where the model of a pipeline is given by its name:
every rank then loads its own stage alone.
"""

import inspect
from typing import Any

from transformers import PreTrainedModel

from hf_flexseq.config import FlexSeqArguments, arguments_on
from hf_flexseq.hf.pipeline.loading import load_stage_of
from hf_flexseq.hf.refusals.pipeline import check_divides


def with_own_stage(
    cls: type,
    mixin: type,
    flexseq_args: FlexSeqArguments | None,
    given: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of the constructor after `mixin` in `cls`, with this
    rank's stage instead of a model's name if it runs in stages."""
    arguments = arguments_by_name(cls, mixin, given, named)
    model = arguments.get("model")
    if not isinstance(model, str):
        return given, named
    training = arguments.get("args")
    options = flexseq_args or arguments_on(training)
    if options.pipeline_parallel_size > 1:
        stage = load_own_stage(model, training, options)
        if "model" in named:
            return given, named | {"model": stage}
        index = _positional_names(cls, after=mixin).index("model")
        return (*given[:index], stage, *given[index + 1 :]), named
    return given, named


def arguments_by_name(
    cls: type, mixin: type, given: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of the constructor after `mixin` in `cls`, by name."""
    names = _positional_names(cls, after=mixin)
    return dict(zip(names, given, strict=False)) | named


def load_own_stage(name: str, training: Any, args: FlexSeqArguments) -> PreTrainedModel:
    """Load this rank's stage of the model `name`. Raises ValueError unless stages divide the
    ranks."""
    stages = args.pipeline_parallel_size
    check_divides(stages, training.world_size)
    ranks_per_stage = training.world_size // stages
    index = training.process_index // ranks_per_stage
    return load_stage_of(name, index, stages, virtual=args.stages_per_rank)


def _positional_names(cls: type, *, after: type) -> list[str]:
    """Return the names of the positional parameters of the constructor that comes `after` a class
    in the MRO of `cls`.

    Positions differ from trainer to trainer: `args` is the second of Trainer and the third of
    TRL's DPOTrainer. A constructor with `*args` hands them on, so that the names of the next one
    follow its own.
    """
    names: list[str] = []
    for base in cls.__mro__[cls.__mro__.index(after) + 1 :]:
        if "__init__" not in vars(base):
            continue
        constructor = vars(base)["__init__"]
        parameters = list(inspect.signature(constructor).parameters.values())[1:]  # without self
        for parameter in parameters:
            is_positional = parameter.kind in (
                parameter.POSITIONAL_ONLY,
                parameter.POSITIONAL_OR_KEYWORD,
            )
            if is_positional and parameter.name not in names:
                names.append(parameter.name)
        if not any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
            break
    return names
