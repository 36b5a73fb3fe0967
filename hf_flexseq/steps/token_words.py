"""Tokens as words: all of their columns side by side, so that one tensor carries them."""

import math

import torch

from hf_flexseq.steps.source_row import Columns

# Columns of any dtype travel side by side in words of one of these types, by bytes of a word: the
# largest one of which each column's values are made up.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOST_BYTES = 8


class TokenWords:
    """Tokens as words, which hold all of their columns side by side."""

    def __init__(self, columns: Columns) -> None:
        """columns: each [tokens, ...], of any dtype."""
        self._names = sorted(columns)  # ranks may have them in other orders
        self._like = columns
        word = WORDS[math.gcd(MOST_BYTES, *(value.element_size() for value in columns.values()))]
        parts = [_as_words(columns[name], word) for name in self._names]
        self._widths = [part.shape[1] for part in parts]
        self.joined = torch.cat(parts, dim=1)  # [tokens, words of a token]

    def columns_of(self, words: torch.Tensor) -> Columns:
        """Return the columns, each [other tokens, ...], of words [other tokens, words]."""
        columns = {}
        parts = words.split(self._widths, dim=1)
        for name, part in zip(self._names, parts, strict=True):
            like = self._like[name]
            # a copy: memory between other words need not be aligned for the dtype
            values = part.clone(memory_format=torch.contiguous_format).view(-1).view(like.dtype)
            columns[name] = values.view(words.shape[0], *like.shape[1:])
        return columns


def _as_words(column: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """Return the same memory in words: [tokens, ...] -> [tokens, words of all its values]."""
    values = math.prod(column.shape[1:])
    words = values * column.element_size() // word.itemsize
    return column.contiguous().view(-1).view(word).view(column.shape[0], words)
