"""Run the forward of an empty copy of a model on stand-ins for images, and note two things.

call    What the forward calls its method for features with: which tensors of an example become
        which arguments, and the values of other arguments, such as the layer of the tower that a
        configuration names. Features of the same call are what the forward would have made.
reads   Which fields of the features the forward reads, when it is given them. Rows of features
        travel to the ranks that need them. A field that is something else would be missing there.

A trial may end before a forward has read everything. So the features that a model is given in
training refuse every other field as well (`feature_form.GivenFeatures`).
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_flexseq.base.versions import IMAGES_FROM, is_older, needs
from hf_flexseq.hf.model.rehearsal import FAULTS, Rehearsal, class_copy, row_of
from hf_flexseq.plan.images import MODALITIES
from hf_flexseq.steps.feature_form import OF_LAYERS, GivenFeatures
from hf_flexseq.steps.images import TYPES, UnsupportedImages

FEATURES = "mm_encoder_outputs"
"""Argument of a model's forward that takes features, by modality."""

ROWS = ("pooler_output", "last_hidden_state")
"""Fields of features that may have a row for each token of an image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Modality:
    """How a model takes images, or videos."""

    name: str
    placeholder: int
    """Token that stands for a part of one."""
    method: str
    """Name of the method that encodes them."""
    arguments: Mapping[str, str]
    """Name of the method's argument by that of the tensor which examples bring."""
    casts: frozenset[str]
    """Tensors that the forward casts to the dtype of its embedding."""
    options: Mapping[str, Any]
    """Other arguments of the method, as the forward gives them."""
    rows: str
    """Field of the features that the forward reads, of ROWS."""
    takes_embedding: bool
    """True if the features are rows of the text's embedding, as of a tower that makes tokens."""
    parts: frozenset[str]
    """Names of the modules that the method calls, as it is written."""


def try_features(base: PreTrainedModel) -> list[Modality]:
    """Return the modalities that a model takes. Raises UnsupportedImages without any, and for
    features that ranks cannot share."""
    name = type(base).__name__
    inner = base.base_model
    if FEATURES not in inspect.signature(inner.forward).parameters:
        reason = f"{name} does not take {FEATURES}"
        reads_images = any(_placeholder(base.config, modality) for modality in MODALITIES)
        if reads_images and is_older("transformers", IMAGES_FROM):
            reason += f"; {needs('transformers', IMAGES_FROM)}"
        raise UnsupportedImages(reason)
    asked = {}
    for modality in MODALITIES:
        placeholder = _placeholder(base.config, modality)
        if hasattr(inner, f"get_{modality}_features") and placeholder is not None:
            asked[modality] = placeholder
    if not asked:
        raise UnsupportedImages(f"{name} has no method for features of images, or no token")
    tried = class_copy(base, attention="eager")
    return [_try(tried, modality, placeholder) for modality, placeholder in asked.items()]


def _placeholder(config: Any, modality: str) -> int | None:
    for option in (f"{modality}_token_id", f"{modality}_token_index"):
        token: int | None = getattr(config, option, None)
        if token is not None:
            return token
    return None


def _try(tried: PreTrainedModel, modality: str, placeholder: int) -> Modality:
    """Return how an empty model takes a modality."""
    call = _try_call(tried, modality)
    inner = tried.base_model
    names = inspect.unwrap(getattr(type(inner), call.method)).__code__.co_names
    return Modality(
        name=modality,
        placeholder=placeholder,
        method=call.method,
        arguments=call.arguments,
        casts=frozenset(call.casts),
        options=call.options,
        rows=_try_reads(tried, modality),
        takes_embedding="get_input_embeddings" in names,
        parts=frozenset(n for n in names if isinstance(getattr(inner, n, None), nn.Module)),
    )


# ---- what the method is called with


class _Called(Exception):
    """The forward has called its method for features."""


@dataclass(slots=True)
class _Call:
    """The call of a method for features."""

    method: str
    arguments: dict[str, str] = field(default_factory=dict)
    casts: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """See `Modality`."""


def _try_call(tried: PreTrainedModel, modality: str) -> _Call:
    """Return how the forward of an empty model calls its method for features."""
    inner: Any = tried.base_model
    call = _Call(f"get_{modality}_features")
    signature = inspect.signature(getattr(inner, call.method))
    given = _stand_ins(tried, signature)

    def note(*args: Any, **kwargs: Any) -> NoReturn:
        bound = signature.bind(*args, **kwargs).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD and parameter.name in bound:
                _note_argument(call, parameter.name, bound[parameter.name], given)
        raise _Called

    name = type(tried).__name__
    with _replaced(inner, call.method, note):
        try:
            _run(tried, given)
        except _Called:
            if any(tensor.startswith("pixel_values") for tensor in call.arguments):
                return call
            raise UnsupportedImages(
                f"the forward of {name} gives {call.method} something else than the tensors of an "
                "example"
            ) from None
        except FAULTS as error:
            reason = " ".join(str(error).split())
            raise UnsupportedImages(
                f"{name} could not be tried on {modality}s ({reason})"
            ) from error
    raise UnsupportedImages(f"the forward of {name} does not call {call.method}")


def _stand_ins(tried: PreTrainedModel, signature: inspect.Signature) -> dict[str, torch.Tensor]:
    """Return an empty tensor for each argument of a forward that its method for features may take,
    of a shape by which it is known."""
    names: set[str] = set()
    for forward in (type(tried).forward, type(tried.base_model).forward):
        names |= set(inspect.signature(forward).parameters)
    own = {one.name for one in signature.parameters.values() if "Tensor" in str(one.annotation)}
    given = {}
    for index, name in enumerate(sorted(own & names)):
        given[name] = torch.empty(1, 3, 1009 + index, 4, dtype=torch.float32, device="meta")
    return given


def _note_argument(
    call: _Call, argument: str, value: Any, given: Mapping[str, torch.Tensor]
) -> None:
    """Note one argument of a call of a method for features."""
    if argument == "return_dict":
        return
    if not isinstance(value, torch.Tensor):
        call.options[argument] = value
        return
    for name, tensor in given.items():
        if value.shape == tensor.shape:
            call.arguments[name] = argument
            if value.dtype != tensor.dtype:
                call.casts.append(name)


# ---- what is read


class _Noting(GivenFeatures):
    """Features whose fields are noted when they are read."""

    def __init__(self, is_list: bool, width: int) -> None:
        super().__init__(noted=True)  # forwards ask whether there are any
        rows = torch.empty(0, width, device="meta")
        self._value = (rows,) if is_list else rows.unsqueeze(0)
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.read.append(name)
        return [self._value] if name == OF_LAYERS else self._value


def _try_reads(tried: PreTrainedModel, modality: str) -> str:
    """Return which of ROWS the forward of an empty model reads of features. Raises
    UnsupportedImages if it reads others than those that can be sent."""
    read = []
    end = ""
    for is_list in (False, True):
        noting = _Noting(is_list, tried.config.get_text_config().hidden_size)
        try:
            _run(tried, {FEATURES: {modality: noting}})
        except FAULTS as error:  # It counts rows, and an empty model has no numbers.
            end = f"; the trial ended with {type(error).__name__}: {' '.join(str(error).split())}"
        read += noting.read
    others = sorted(set(read) - {*ROWS, OF_LAYERS})
    rows = sorted(set(read) & set(ROWS))
    name = type(tried).__name__
    if others:
        raise UnsupportedImages(
            f"the forward of {name} reads {', '.join(others)} of the features of {modality}s, "
            "which is more than a row for each token"
        )
    if len(rows) != 1:
        raise UnsupportedImages(
            f"the forward of {name} reads {' and '.join(rows) or 'none'} of {' and '.join(ROWS)}, "
            f"the rows of features of {modality}s; it must read one{end}"
        )
    return rows[0]


def _run(tried: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Run the forward of an empty model on a short sequence."""
    taken = inspect.signature(type(tried).forward).parameters
    types = [name for name in TYPES if name in taken]
    Rehearsal(tried).run({**row_of("input_ids", "position_ids", *types), **given})


@contextmanager
def _replaced(owner: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Give a module another method inside the block."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
