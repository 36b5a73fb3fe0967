"""The form of the features that a model's method for images makes, and that its forward reads.

form, streams = FeatureForm.of(outputs, modality)     rows [rows, width] of each stream
form.features(rows)                                   the forward's input, made of other rows
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from hf_flexseq.base.versions import TESTED, installed
from hf_flexseq.steps.images import UnsupportedImages

OF_LAYERS = "deepstack_features"
"""Field of features that has rows for several layers."""


class GivenFeatures(dict[str, Any]):
    """Features of one modality as a model's forward reads them. It refuses fields that it does
    not have. From transformers 5.24 on outputs hold them, and libraries look into a dict."""

    def __getattr__(self, name: str) -> Any:
        """Return a field. Raises UnsupportedImages for those that were not given."""
        if name in self:
            return self[name]
        raise UnsupportedImages(
            f"a model's forward reads {name} of the features of its images, which hf_flexseq does "
            "not send to other ranks: train it on text alone (with transformers "
            f"{installed('transformers')}; tested: {' to '.join(TESTED['transformers'])})"
        )

    def to_tuple(self) -> tuple["GivenFeatures"]:
        """Return the features as one value of a tuple, since features as the method made them
        have other fields. Called where an output that holds them is read by number."""
        return (self,)


@dataclass(frozen=True, slots=True)
class FeatureForm:
    """The form of the features that a model's forward reads."""

    field: str
    """Name of the field that has the rows of the embedding."""
    is_list: bool
    """True if they are a tensor for each image, instead of one for all."""
    leading: int
    """Dimensions of such a tensor before its rows."""
    widths: tuple[int, ...]
    """Values of a row: of the embedding, then of each layer that gets features of its own."""

    @classmethod
    def of(cls, outputs: Any, field: str) -> tuple["FeatureForm", list[torch.Tensor]]:
        """Return the form of a method's outputs, and its streams of rows, [rows, width] each."""
        embedded = getattr(outputs, field)
        of_layers = getattr(outputs, OF_LAYERS, None) or ()
        streams = [_rows(value) for value in (embedded, *of_layers)]
        widths = tuple(stream.shape[1] for stream in streams)
        is_list = not isinstance(embedded, torch.Tensor)
        first = embedded[0] if is_list else embedded
        return cls(field, is_list, first.dim() - 2, widths), streams

    def features(self, rows: torch.Tensor) -> GivenFeatures:
        """Return rows [rows, width] as the forward reads them."""
        streams = []
        for stream in rows.split(self.widths, dim=1):
            stream = stream[(None,) * self.leading]
            streams.append((stream,) if self.is_list else stream)
        fields: dict[str, Any] = {self.field: streams[0], OF_LAYERS: None}
        if len(streams) > 1:
            fields[OF_LAYERS] = streams[1:]
        return GivenFeatures(fields)


def _rows(value: Any) -> torch.Tensor:
    """Return features of one image or of several as rows, [rows, width]."""
    parts = [value] if isinstance(value, torch.Tensor) else list(value)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def fits(embedded: Any, counts: Sequence[int]) -> bool:
    """Tell if features have so many rows for each image. embedded: [..., rows, width], or a list
    with a tensor for each image or part of one."""
    if isinstance(embedded, torch.Tensor):
        parts = embedded.reshape(-1, *embedded.shape[-2:])  # [parts, rows, width]
    else:
        parts = [part.reshape(-1, part.shape[-1]) for part in embedded]
    ends = list(accumulate(len(part) for part in parts))
    wanted = list(accumulate(counts))
    if wanted[-1] != ends[-1]:
        return False
    # One tensor of [rows, width] does not tell where an image ends.
    return len(ends) == 1 or set(wanted) <= set(ends)
