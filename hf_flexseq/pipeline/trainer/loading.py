"""Load one stage of a model from a folder or the Hub, so that no rank ever holds the whole.

transformers' own `from_pretrained` does it, on a subclass whose constructor cuts the model: it
makes the model without memory, cuts it, and then reads only those tensors that are left. The head
of a tied model is on the last stage and the embedding, under whose name the checkpoint has the
tensor, is not: there the name is mapped.
"""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.model.sharding import unsharded_class
from hf_flexseq.hf.trainer.checkpoint_forms import load_weights
from hf_flexseq.pipeline.stages import Stage, cut

STAGE = "_flexseq_stage"  # where a model that was cut keeps its Stage


def load_stage_of(
    name: str, index: int, count: int, *, virtual: int = 1, **options: Any
) -> PreTrainedModel:
    """Load the stages of rank `index` of `count` of the causal language model `name`.

    virtual: stages per rank.
    options: as for `from_pretrained`.
    Raises ValueError for more stages than layers + 1 and for a checkpoint that lacks a tensor,
    NotImplementedError for a model without a plain decoder stack.
    """
    config = AutoConfig.from_pretrained(name)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    loader = _cutting(kind, index, count, virtual)
    if index == count - 1 and config.tie_word_embeddings:
        options["key_mapping"] = {**options.get("key_mapping", {}), **_tied_names(kind)}
    model, info = loader.from_pretrained(name, config=config, output_loading_info=True, **options)
    if info["missing_keys"]:
        raise ValueError(f"{name} has no {', '.join(sorted(info['missing_keys']))}")
    # The model was made by a subclass that cuts, because `from_pretrained` offers nothing between
    # the making of a model and the reading of its tensors. Cut, it is of its own class again.
    model.__class__ = kind
    stage = stage_of(model)
    assert stage is not None, "the constructor of a cutting class keeps the stage"
    stage.stack.check_identity()
    return model


def load_stage_weights(stage: Stage, folder: str, communicator: Communicator) -> None:
    """Read the weights of a checkpoint into a stage. Collective over the world.

    Raises ValueError, on all ranks, when they are not the weights of this model.
    """
    model = stage.stack.model
    kind = unsharded_class(model)
    names = {}
    if stage.second_copy is not None:
        names = _tied_names(kind)
    virtual = len(stage.spans) // stage.count
    loader = _cutting(kind, stage.index, stage.count, virtual)
    load_weights(model, folder, communicator, loader=loader, key_mapping=names)


def stage_of(model: PreTrainedModel) -> Stage | None:
    """Return the stage that a model was cut into; None for a whole model."""
    stage: Stage | None = vars(model).get(STAGE)
    return stage


def _cutting(
    kind: type[PreTrainedModel], index: int, count: int, virtual: int
) -> type[PreTrainedModel]:
    """Return a subclass of `kind` whose constructor cuts and ties nothing."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        vars(self)[STAGE] = cut(self, index, count, virtual=virtual, check=False)
        self.all_tied_weights_keys = {}

    members = {
        "__init__": __init__,
        "_tied_weights_keys": None,
        "_keys_to_ignore_on_load_unexpected": [".*"],
    }
    return type(kind.__name__, (kind,), members)


def _tied_names(kind: type[PreTrainedModel]) -> dict[str, str]:
    """Return patterns that map the tied tensor's name in the checkpoint to the head's name."""
    tied = kind._tied_weights_keys or {}
    return {f"^{source}$": head for head, source in tied.items()}
