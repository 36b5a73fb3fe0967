"""Features of the images of a step: from the ranks that encode images to those that hold their
tokens, and gradients back.

    encoded      in the first micro-batch's forward, every rank runs the tower on its images; a
                 frozen one runs when a step is dispatched before its turn (`early_encoding.py`)
    sent         one exchange over all ranks brings each row to the ranks that need it in the step
    used         every micro-batch takes its rows
    returned     in the last backward of a micro-batch, one exchange brings the gradients of all
                 micro-batches back, and the tower's own backward follows

So tower and exchanges are a part of the autograd graph of one micro-batch, the last, and DDP,
FSDP2 and ZeRO reduce the tower's gradients together with all others. The tower's graph is kept
from the first to the last micro-batch, also where a pass without gradients comes first
(`figure_passes.py`), or, where the plan says so, made again in the last backward, as by activation
checkpointing. The graph of a sharded tower, whose parameters are gathered anew in every
micro-batch, is kept only if the step has a single micro-batch. A second run draws the random
numbers of the first.

A pass with other weights, such as a reference model's, has separate features (`of_other_weights`).

Rejected: an exchange for every micro-batch. A micro-batch has too few images to balance, and ranks
without any of them would have to take part.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.distributed.transport import CpuGroup
from hf_flexseq.kernels.upload import to_device
from hf_flexseq.plan.images import MODALITIES, ImagePlan, ImageSize
from hf_flexseq.steps.early_encoding import EarlyEncoder, EarlyFeatures, Weights
from hf_flexseq.steps.images import (
    GRID_POSITIONS,
    IMAGE_ROWS,
    NO_ROW,
    Image,
    image_rows,
    row_starts,
    send_images,
)
from hf_flexseq.steps.random_numbers import random_numbers_of, random_states
from hf_flexseq.steps.route import Route
from hf_flexseq.steps.source_row import Columns, DrawnStep, SourceRow

Ints = NDArray[np.int64]


class Tower(Protocol):
    """Encodes images."""

    @property
    def is_trained(self) -> bool:
        """True if a parameter of it gets gradients; alike on all ranks."""

    @property
    def weights(self) -> Weights:
        """State of its parameters, by which changes are noticed; see `weights_of`."""

    def first_values(self) -> torch.Tensor:
        """Return the first value of each of its parameters, [parameters]."""

    def calls(self, images: Sequence[Image]) -> int:
        """Return how often the tower is called for `images`."""

    def encode(self, images: Sequence[Image], calls: int) -> torch.Tensor:
        """Return the features of all tokens of `images`, [tokens, width], one image after the
        other. Collective over the world where the tower is sharded.

        calls: of the tower, at least `calls(images)`; those beyond are without effect.
        """

    def agree(self, modalities: Collection[str], cpu_group: CpuGroup) -> None:
        """Learn of other ranks how the features of `modalities` look, after `encode`. Collective
        over the world."""


@dataclass(frozen=True, slots=True)
class MicroBatchImages:
    """The images of one micro-batch, on their way to the model in its context."""

    step: "StepImages"
    index: int
    counts: Mapping[str, int]
    """Rows of features of each modality that the step has."""

    def features(self, tower: Tower) -> dict[str, torch.Tensor]:
        """Return the features of its tokens by modality, [rows, width] each. See
        `StepImages.of_micro_batch`."""
        rows = self.step.of_micro_batch(self.index, tower)
        parts = rows.split(list(self.counts.values()))
        return dict(zip(self.counts, parts, strict=True))

    def beside(self) -> "MicroBatchImages":
        """Return the same images for another model, which runs on the same micro-batches with
        features of a tower of its own."""
        return replace(self, step=self.step.beside)


def with_image_rows(row: SourceRow, drawn: DrawnStep) -> SourceRow:
    """Return a rank's row with a column that says which part of which image a token stands for."""
    rows = image_rows(row.columns["input_ids"], row.images, drawn.own_images, drawn.images)
    return replace(row, columns=row.columns | {IMAGE_ROWS: rows})


def with_image_columns(row: SourceRow, drawn: DrawnStep) -> SourceRow:
    """Return a rank's row with the columns that tokens have in a step with images: IMAGE_ROWS,
    [tokens], and for models that have them GRID_POSITIONS, [tokens, axes]."""
    row, own = with_image_rows(row, drawn), row.images
    if not own.axes:
        return row
    positions = own.positions
    if positions is None:
        numbers = row.columns["position_ids"].to(own.positions_dtype)
        positions = numbers.unsqueeze(1).expand(-1, own.axes)
    return replace(row, columns=row.columns | {GRID_POSITIONS: positions})


def images_of_step(
    drawn: DrawnStep,
    columns: Sequence[Columns],
    *,
    tower: Tower,
    communicator: Communicator,
    device: torch.device,
    is_sharded: bool,
) -> list[MicroBatchImages]:
    """Send images to the ranks that encode them, and return the images of every micro-batch.
    Collective over the world.

    columns: of each micro-batch, [tokens, ...]; IMAGE_ROWS is taken out of them.
    tower: its calls are counted. device, is_sharded: see `StepImages`.
    """
    images = drawn.images
    own = drawn.row.images
    plan = drawn.image_plan
    assert plan is not None, "a step with images has a plan of them"
    encoded = send_images(own, drawn.own_images, images, plan, drawn.sources, communicator)
    starts = row_starts(images)
    kinds = np.array([MODALITIES.index(one.modality) for one in images])  # [images]
    kinds_of_step = sorted(set(kinds.tolist()))
    rows: list[torch.Tensor] = []
    counts = []
    for of_batch in columns:
        numbers = of_batch.pop(IMAGE_ROWS)
        numbers = numbers[numbers != NO_ROW]
        image = np.searchsorted(starts, numbers.numpy(), side="right") - 1
        parts = {}
        for kind in kinds_of_step:
            parts[MODALITIES[kind]] = numbers[torch.from_numpy(kinds[image] == kind)]
        rows.append(torch.cat(list(parts.values())))
        counts.append({name: len(part) for name, part in parts.items()})
    step = StepImages(
        encoded,
        rows,
        images=images,
        plan=plan,
        calls=tower.calls(encoded),
        communicator=communicator,
        device=device,
        is_sharded=is_sharded,
    )
    return [MicroBatchImages(step, index, own) for index, own in enumerate(counts)]


class StepImages:
    """The images that this rank encodes in a step, and the rows that its micro-batches need."""

    def __init__(
        self,
        own: Sequence[Image],
        rows: Sequence[torch.Tensor],
        *,
        images: Sequence[ImageSize],
        plan: ImagePlan,
        calls: int,
        communicator: Communicator,
        device: torch.device,
        is_sharded: bool,
    ) -> None:
        """Tell every rank which rows of features it has to send. Collective over the world.

        own: the images that this rank encodes, by `plan`.
        rows: numbers of the rows that each micro-batch needs, in the order of their use, [rows].
        images: of all ranks. plan: how they are encoded.
        calls: of the tower, for this rank's images.
        is_sharded: True if the parameters of the tower are gathered in every micro-batch: its
            graph does not outlive one, and all ranks call it equally often.
        """
        self.plan = plan
        self._own = own
        self._communicator = communicator
        self._is_sharded = is_sharded
        self._sizes = [len(numbers) for numbers in rows]
        self._modalities = {image.modality for image in images}

        # 1. from which rank this one gets each row
        starts = row_starts(images)
        wanted = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).numpy()
        image = np.searchsorted(starts, wanted, side="right") - 1  # of each row
        owners = np.array(plan.owners, dtype=np.int64)[image]
        by_owner = np.argsort(owners, kind="stable")
        order = np.empty_like(by_owner)
        order[by_owner] = np.arange(len(owners))
        received_counts = np.bincount(owners, minlength=communicator.world_size).tolist()

        # 2. which rows of its own it sends to each rank
        cpu_group = communicator.cpu_group
        of_ranks = cpu_group.gather_values([*received_counts, calls])
        counts = [of_rank[communicator.rank] for of_rank in of_ranks]
        self._calls = max(of_rank[-1] for of_rank in of_ranks) if is_sharded else calls
        asked = cpu_group.exchange_rows(
            torch.from_numpy(wanted[by_owner]).unsqueeze(1), received_counts, counts
        ).squeeze(1)
        places = np.zeros(len(images) + 1, dtype=np.int64)  # of each image among this rank's rows
        held = plan.by_rank()[communicator.rank]
        places[held] = np.cumsum([0, *(images[i].tokens for i in held)])[:-1]
        of_image = np.searchsorted(starts, asked.numpy(), side="right") - 1
        served = asked.numpy() - starts[of_image] + places[of_image]
        self._route = Route(
            to_device(torch.from_numpy(served), device),
            counts,
            received_counts,
            to_device(torch.from_numpy(order), device),
        )

        self._begin_features()

    def _begin_features(self) -> None:
        """Have encoded nothing yet."""
        self.runs = 0
        """Runs of the tower so far."""
        self._last: int | None = None  # the micro-batch that is the last to run backward
        self._follows = False  # a pass with gradients follows on one without
        self._random: list[torch.Tensor] | None = None  # states before the tower's first run
        # what was encoded before the step, and the tower's first values then
        self._ahead: tuple[EarlyFeatures, torch.Tensor] | None = None
        self._features: list[torch.Tensor] | None = None  # of each micro-batch, [rows, width]
        self._encoded: torch.Tensor | None = None  # by this rank, [rows, width], with its graph
        self._leaves: dict[int, torch.Tensor] = {}  # features of micro-batches before the last

    @cached_property
    def beside(self) -> "StepImages":
        """The images for another model; see `MicroBatchImages.beside`."""
        others = copy.copy(self)
        others._begin_features()
        return others

    def begin(self, last: int, *, follows: bool = False) -> None:
        """Begin passes over the micro-batches. last: index of the one that is the last to run
        backward. follows: True if most micro-batches run without gradients before."""
        self._last = last
        self._follows = follows

    @contextmanager
    def of_other_weights(self) -> Iterator[None]:
        """Surround a pass without gradients, of another model or with other adapters: features are
        encoded anew in it, and forgotten after it."""
        former = self._features, self._encoded, self._ahead
        self._features = self._encoded = self._ahead = None
        try:
            yield
        finally:
            self._features, self._encoded, self._ahead = former

    def encode_ahead(
        self, tower: Tower, encoder: EarlyEncoder, timing: AbstractContextManager[None]
    ) -> None:
        """Encode this rank's images before the step begins, with a frozen tower that draws no
        random numbers and has whole parameters. timing: surrounds the work on the device."""
        ahead = encoder.encode(partial(self._encode, tower), tower.weights, timing)
        if ahead is not None:
            self._ahead = ahead, tower.first_values()

    def of_micro_batch(self, index: int, tower: Tower) -> torch.Tensor:
        """Return the features of a micro-batch's tokens, [rows, width]. Called in the forward of
        every micro-batch; collective over the world in the first of a pass."""
        trains = torch.is_grad_enabled() and tower.is_trained
        is_last = index == self._last
        if self._features is None:
            if trains or (self._follows and tower.is_trained):
                with torch.enable_grad():
                    encoded = self._encode_with_graph(tower, ends=trains and is_last)
                if not encoded.requires_grad:
                    # This rank's images need what is frozen alone. It still takes part in the
                    # exchange of gradients.
                    encoded.requires_grad_()
                self._encoded = encoded
            else:
                encoded = self._encode_without_graph(tower)
            tower.agree(self._modalities, self._communicator.cpu_group)
            self._features = self._send(encoded.detach())
        own = self._features[index]
        if not trains:
            return own
        if is_last:
            features: torch.Tensor = _LastFeatures.apply(self._encoded, own, self, index)
            return features
        leaf = own.detach().requires_grad_()
        self._leaves[index] = leaf
        return leaf

    def _encode_with_graph(self, tower: Tower, *, ends: bool) -> torch.Tensor:
        """Return this rank's rows, [rows, width], with a graph that is kept or made again in the
        backward. ends: True if it ends with this micro-batch."""
        if self.plan.keeps_graph and (ends or not self._is_sharded):
            return self._encode(tower)
        # A second run sets the random numbers itself.
        encoded: torch.Tensor = checkpoint(
            self._encode, tower, use_reentrant=False, preserve_rng_state=False
        )
        return encoded

    def _encode_without_graph(self, tower: Tower) -> torch.Tensor:
        """Return this rank's rows, [rows, width], encoded ahead or now."""
        before, self._ahead = self._ahead, None
        if before is not None:
            ahead, values = before
            if ahead.weights == tower.weights and torch.equal(values, tower.first_values()):
                return ahead.take()
        with torch.no_grad():
            return self._encode(tower)

    def _encode(self, tower: Tower) -> torch.Tensor:
        """Run the tower on this rank's images: return their rows, [rows, width]. A second run
        has the dropout of the first one, of which the features are."""
        self.runs += 1
        if self._random is None:
            self._random = random_states()
        # Layers after it draw the same numbers, whether it runs with them or not.
        with random_numbers_of(self._random):
            return tower.encode(self._own, self._calls)

    def _send(self, encoded: torch.Tensor) -> list[torch.Tensor]:
        """Exchange rows: this rank's own [rows, width] -> each micro-batch's [rows, width]."""
        return list(self._route.bring(encoded, self._exchanged).split(self._sizes))

    def gradients(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the rows that this rank has encoded, [rows, width]. Collective
        over the world. gradient: of the features of the last micro-batch, `index`."""
        assert self._features is not None, "the features were made in the forward"
        assert self._encoded is not None, "the tower ran in this pass"
        parts = []
        for number, own in enumerate(self._features):
            leaf = self._leaves.get(number)
            if number == index:
                parts.append(gradient)
            elif leaf is None or leaf.grad is None:
                parts.append(torch.zeros_like(own))
            else:
                parts.append(leaf.grad)
        returned = self._route.give_back(torch.cat(parts), self._exchanged)
        # Rows of an image that many sequences have get many gradients, and GPUs add them up in the
        # dtype of the sum.
        dtype = self._encoded.dtype
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros_like(self._encoded, dtype=wide)
        total.index_add_(0, self._route.sent, returned.to(wide))
        self._leaves.clear()
        self._encoded = None
        return total.to(dtype)

    def _exchanged(
        self, rows: torch.Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]
    ) -> torch.Tensor:
        """Exchange rows [sent, width] by rank -> [received, width] by rank."""
        everyone = self._communicator.open_world()
        if everyone is None:
            return rows
        width = rows.shape[1]
        received = rows.new_empty(sum(received_counts), width)
        everyone.all_to_all(
            received.view(-1),
            rows.contiguous().view(-1),
            [count * width for count in received_counts],
            [count * width for count in sent_counts],
            label=_label,
        ).wait()
        return received


def _label(peer: int, sent: bool) -> str:
    return "the features of images, or their gradients"


class _LastFeatures(torch.autograd.Function):
    """Features of the last micro-batch, as a function of the rows that this rank has encoded."""

    @staticmethod
    def forward(
        ctx: Any, encoded: torch.Tensor, features: torch.Tensor, step: StepImages, index: int
    ) -> torch.Tensor:
        """Return `features` [rows, width], which have been exchanged before."""
        ctx.step = step
        ctx.index = index
        return features.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of `encoded`, from the micro-batches' gradients on all ranks."""
        return ctx.step.gradients(ctx.index, gradient.contiguous()), None, None, None
