"""Noise on the embeddings of training steps, for NEFTune (arXiv 2310.05914), that no plan changes.

NEFTune adds uniform noise between -m and m to every element of an embedded token, where
m = alpha / sqrt(length x hidden size). The length is the sequence's, without its virtual tokens,
which get no noise.

Here the noise is a function of the run's seed, the number of the optimizer step, the tokens of the
sequence, the token's place in it, and the channel:

    key of a sequence    the first 8 bytes of BLAKE2b of seed, step and tokens, on the source rank
    key of a token       SplitMix64 of the key of its sequence, and its place
    noise of a channel   SplitMix64 of the key of the token, and the channel

The key of each token, and its m but for the hidden size, travel with it as two columns. So
wherever a plan puts a token, in whichever part of its sequence, in however many passes, it gets
the same noise. This does not depend on the number of ranks either, nor on gradient accumulation,
nor on whether a run was resumed. Equal sequences of one step get equal noise.

Rejected: a generator for each sequence. A part of a sequence would have to draw the noise of all
that is before it.
"""

import hashlib

import torch

from hf_flexseq.steps.source_row import SourceRow

KEYS = "noise_keys"
SIZES = "noise_sizes"
"""Columns: the key and alpha / sqrt(length) of each token, [tokens] of int64 and float32."""

# SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHIFTS = (30, 27, 31)
_BITS = 24  # of a number between -1 and 1

# Numbers that are made at once, of 8 bytes.
_PIECE = 2**23


class NoiseColumns:
    """Makes the columns of NEFTune's noise."""

    def __init__(self, alpha: float, seed: int) -> None:
        """alpha: NEFTune's. seed: of the run."""
        self._alpha = alpha
        self._seed = seed

    def of(self, row: SourceRow, step: int) -> SourceRow:
        """Return the row of a step with the columns KEYS and SIZES. step: its number. Raises
        ValueError if the dataset has such a column."""
        ids = row.columns["input_ids"].numpy()
        start = hashlib.blake2b(f"{self._seed} {step} ".encode(), digest_size=8)
        keys = []
        sizes = []
        begin = 0
        for length in row.lengths:
            end = begin + length
            digest = start.copy()
            digest.update(ids[begin:end].astype("<i8").tobytes())
            keys.append(int.from_bytes(digest.digest(), "little", signed=True))
            sizes.append(self._alpha / (length - row.virtual_tokens) ** 0.5)
            begin = end
        lengths = torch.tensor(row.lengths, dtype=torch.int64)  # [sequences]
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)  # [tokens]
        places = torch.arange(1, len(starts) + 1) - starts  # from 1
        of_sequences = torch.tensor(keys, dtype=torch.int64).repeat_interleave(lengths)
        columns = {
            KEYS: _mixed(of_sequences + places * _signed(_STEP)),
            SIZES: torch.tensor(sizes, dtype=torch.float32).repeat_interleave(lengths),
        }
        return row.with_new(columns, "neftune_noise_alpha needs")


class TokenNoise:
    """The noise of the tokens that a rank holds in one micro-batch."""

    def __init__(self, keys: torch.Tensor, sizes: torch.Tensor) -> None:
        """keys, sizes: [tokens] of int64 and of float32, on the device of the embeddings."""
        self._keys = keys
        self._sizes = sizes

    def added_to(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return embedded tokens with their noise: [1, tokens, hidden] -> the same shape."""
        noise = torch.empty_like(embedded[0])  # [tokens, hidden]
        tokens, hidden = noise.shape
        rows = max(1, _PIECE // hidden)
        for start in range(0, tokens, rows):
            stop = start + rows
            unit = uniform(self._keys[start:stop], hidden)  # [rows, hidden]
            noise[start:stop] = unit * (self._sizes[start:stop, None] / hidden**0.5)
        return embedded + noise


def uniform(keys: torch.Tensor, hidden: int) -> torch.Tensor:
    """Return numbers from -1 up to 1: [tokens] of int64 -> [tokens, hidden] of float32."""
    channels = torch.arange(1, hidden + 1, dtype=torch.int64, device=keys.device)
    mixed = _mixed(keys[:, None] + channels * _signed(_STEP))
    bits = _shifted(mixed, 64 - _BITS)  # of 0 up to 2^24, which float32 has exactly
    return bits.to(torch.float32) / 2 ** (_BITS - 1) - 1


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's mixture of each number, int64 of any shape. Sums and products of such
    numbers wrap around, as those of unsigned ones do."""
    z = (z ^ _shifted(z, _SHIFTS[0])) * _signed(_FIRST)
    z = (z ^ _shifted(z, _SHIFTS[1])) * _signed(_SECOND)
    return z ^ _shifted(z, _SHIFTS[2])


def _signed(value: int) -> int:
    """Return the signed number of 64 bits that has the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Return z shifted right, with zeros from the left."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
