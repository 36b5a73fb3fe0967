"""The model's arguments in each micro-batch of a plan.

In lockstep a rank runs all micro-batches, with a dummy token where it has nothing to do. Otherwise
it runs those that hold work for it. Every rank takes part in the last gradient reduction, so a
rank without any work still runs one dummy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_flexseq.attention import SequenceContext
from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan import Group, MicroBatch
from hf_flexseq.plan.shard import Shard, Slice, Zone, make_shard
from hf_flexseq.steps.embedding_noise import KEYS, SIZES, TokenNoise
from hf_flexseq.steps.exchange import ROW_COUNTS, TARGET_COUNTS
from hf_flexseq.steps.images import GRID_POSITIONS
from hf_flexseq.steps.source_row import Columns
from hf_flexseq.steps.virtual_tokens import NUMBERS as VIRTUAL_NUMBERS
from hf_flexseq.steps.virtual_tokens import VirtualTokens

Inputs = dict[str, Any]

LABELS = ("labels", "shift_labels")
"""Names under which a model is given the targets of a micro-batch, one tensor under both."""

DUMMY = -1
"""Id of the sequence of a dummy token, which is in no plan: it has no images, and no blocks."""


def indices_to_run(shards: Sequence[Shard], *, lockstep: bool) -> list[int]:
    """Return the indices of the micro-batches that this rank runs, at least one."""
    if lockstep:
        return list(range(len(shards)))
    # A rank may compute for a group (zones) and hold none of its tokens, or the other way round.
    busy = [index for index, shard in enumerate(shards) if shard.zones or shard.tokens]
    return busy or [len(shards) - 1]


def inputs_of(
    shard: Shard,
    columns: Columns,
    device: torch.device,
    make_context: Callable[[Shard], SequenceContext],
) -> Inputs:
    """Return the keyword arguments of one call of the model: columns [1, tokens] of the shard, or
    a dummy token, and `seq_ctx`, which has how often tokens count, their noise, and which of them
    are virtual. columns: each [tokens] on the CPU."""
    columns = dict(columns)
    row_counts = columns.pop(ROW_COUNTS, None)
    target_counts = columns.pop(TARGET_COUNTS, None)
    if not shard.tokens:
        shard = with_dummy(shard)
        columns = _dummy_columns(columns)
        row_counts = torch.zeros(1, dtype=torch.int64)  # it is in no row
    inputs: Inputs = {}
    virtual = columns.pop(VIRTUAL_NUMBERS, None)
    noise_keys, noise_sizes = columns.pop(KEYS, None), columns.pop(SIZES, None)
    grid = columns.pop(GRID_POSITIONS, None)
    for name, value in columns.items():
        row = value.unsqueeze(0)  # [tokens] -> [1, tokens]
        inputs[name] = to_device(row, device)
    if grid is not None:
        of_axes = grid.T.unsqueeze(1)  # [tokens, axes] -> [axes, 1, tokens]
        inputs["position_ids"] = to_device(of_axes.contiguous(), device)
    inputs["shift_labels"] = inputs["labels"]  # they are shifted already
    context = make_context(shard)
    if row_counts is not None and row_counts.numel():
        context.row_counts = to_device(row_counts, device)
    if target_counts is not None and target_counts.numel():
        context.target_counts = to_device(target_counts, device)
    if noise_keys is not None and noise_sizes is not None:
        context.noise = TokenNoise(to_device(noise_keys, device), to_device(noise_sizes, device))
    if virtual is not None:
        context.virtual_tokens = VirtualTokens.of(virtual, device)
    inputs["seq_ctx"] = context
    return inputs


def without_labels(inputs: Inputs) -> Inputs:
    """Return the inputs of a micro-batch but for its labels, which ask a model for its loss."""
    return {name: value for name, value in inputs.items() if name not in LABELS}


def shard_alone(lengths: Sequence[int], rank: int) -> Shard:
    """Return the shard of a micro-batch with all sequences, of these lengths, on one rank."""
    group = Group(ranks=(rank,), sequences=tuple(range(len(lengths))), strategy="local")
    return make_shard(MicroBatch(groups=(group,)), lengths, rank)


def with_dummy(shard: Shard) -> Shard:
    """Return a shard without tokens plus one token without effect, for every collective of the
    model. The zones stay: a rank may compute for a group and hold none of it."""
    group = Group(ranks=(shard.rank,), sequences=(DUMMY,), strategy="local")
    token = Slice(sequence=DUMMY, start=0, stop=1)
    zone = Zone(group=group, index=0, lengths=(1,), slices=(token,), start=0, stop=1)
    return Shard(rank=shard.rank, zones=(*shard.zones, zone))


def _dummy_columns(like: Columns) -> Columns:
    """Return columns of one token, each [1], with the names and dtypes of `like`."""
    columns = {name: value.new_zeros(1, *value.shape[1:]) for name, value in like.items()}
    columns["labels"] = columns["labels"].new_full((1,), IGNORE_INDEX)
    return columns
