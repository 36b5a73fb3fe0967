"""Obeys the list of actions that a plan has for this rank, and knows no schedule.

    F   take the hidden states of the stage before (the first stage: token ids), run the layers,
        hand on what comes
        out (the last stage: the loss, which goes backward at once, as far as the head's input)
    B   take the gradient of what was handed on, go backward, hand on the gradient of what was
        taken
    I   B, but the weight gradients of the layers are left in the store
    W   add those

Losses are sums over a chunk's targets divided by the targets of the whole step, so that gradients
of all chunks only add up. Chunks differ in shape, and every shape is known from the plan: nothing
but tensors is sent.

The head goes backward in F because a loss that is computed without logits for all tokens has its
gradients then: were they kept until B, every chunk in flight would hold a gradient of the whole
head. Only that of its input is kept.

Rejected: torch.distributed.pipelining, whose stages hold one shape for all micro-batches or
exchange it every time, whose schedules are lowered in up to a second per step, and which has no
keys and values to carry.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.pipeline.carry import KVCarry
from hf_flexseq.pipeline.context import ChunkContext
from hf_flexseq.pipeline.mailbox import WINDOW, Inbox, Item, Outbox
from hf_flexseq.pipeline.stages import Stage, VirtualStage
from hf_flexseq.pipeline.ulysses import Sharing, own_columns
from hf_flexseq.pipeline.weights import WeightGradients
from hf_flexseq.plan.pipeline import Action, PipelinePlan
from hf_flexseq.schedule.pipeline.walk import walk

Columns = Mapping[str, torch.Tensor]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class _Flight:
    """A chunk between its forward and its backward: the hidden states it came with, what it
    became, and the gradient of that, which only the last stage has already."""

    source: torch.Tensor
    result: torch.Tensor
    gradient: torch.Tensor | None


class PipelineExecutor:
    """One rank at work. Make it once; `train` runs an optimizer step, `evaluate` forwards
    alone."""

    def __init__(
        self,
        stage: Stage,
        neighbours: Neighbours | None,
        kernel: Kernel,
        *,
        sharing: Sharing | None = None,
    ) -> None:
        """neighbours: None for the only stage of a pipeline of one. sharing: the ranks of this
        stage that share every chunk's tokens; None for one rank."""
        self.stage, self.neighbours, self.sharing = stage, neighbours, sharing
        self.carry = KVCarry(kernel)
        self.weights = WeightGradients(stage.own_layers.values())
        for index, layer in stage.own_layers.items():
            layer.forward = _checkpointable(layer, index)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Leave nothing on the stage's layers."""
        self.weights.detach()
        for layer in self.stage.own_layers.values():
            layer.__dict__.pop("forward", None)

    def train(
        self,
        plan: PipelinePlan,
        columns: Sequence[Columns],
        targets: int,
        autocast: Context = nullcontext,
    ) -> torch.Tensor:
        """All actions of one step. Returns the loss: sum over targets / `targets` on the last
        stage, 0 elsewhere.

        columns: of each chunk, by its place in the plan, tensors [1, t] on the stage's device:
        input_ids, labels, position_ids. Gradients are added to those that are there; of a tied
        tensor, only those of this stage's copy.
        """
        step = _Step(self, plan, columns, targets, autocast)
        for action in plan.actions[self.stage.index]:
            step.obey(action)
        step.close()
        return step.loss

    def evaluate(
        self,
        plan: PipelinePlan,
        columns: Sequence[Columns],
        targets: int,
        autocast: Context = nullcontext,
    ) -> torch.Tensor:
        """The loss of one step, without gradients: the forwards of the plan, in its order."""
        with torch.no_grad():
            step = _Step(self, _forwards(plan), columns, targets, autocast)
            for action in step.plan.actions[self.stage.index]:
                step.forward(action)
            step.close()
        return step.loss


class _Step:
    """One optimizer step of one rank."""

    def __init__(
        self,
        executor: PipelineExecutor,
        plan: PipelinePlan,
        columns: Sequence[Columns],
        targets: int,
        autocast: Context,
    ) -> None:
        self.executor, self.stage, self.plan = executor, executor.stage, plan
        stages, ranks = len(self.stage.spans), self.stage.count
        fits = (plan.stages, plan.ranks) == (stages, ranks)
        assert fits, (
            f"a plan for {plan.stages} stages on {plan.ranks} ranks, not {stages} on {ranks}"
        )
        self.columns = [own_columns(of_chunk, executor.sharing) for of_chunk in columns]
        self.targets, self.autocast = targets, autocast
        self.places = plan.places()
        self.flights: dict[Item, _Flight] = {}
        parameter = next(self.stage.stack.model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.loss = torch.zeros((), dtype=lse_dtype(self.dtype), device=self.device)
        self._open()

    def _open(self) -> None:
        links, index, ranks = self.executor.neighbours, self.stage.index, self.stage.count
        training = torch.is_grad_enabled()
        self.outboxes: list[Outbox] = []
        if links is None:
            return
        if links.from_before is not None:
            self.sources = Inbox(
                links.from_before, self._sent((index - 1) % ranks, "F", 1), self._empty
            )
            self.gradients_out = Outbox(
                links.to_before, window=WINDOW, taken_before=self._taken_before("B", -1)
            )
            self.outboxes.append(self.gradients_out)
        if links.from_after is not None:
            window = None if training else WINDOW
            self.gradients = Inbox(
                links.from_after, self._sent((index + 1) % ranks, "BI", -1), self._empty
            )
            self.results = Outbox(
                links.to_after, window=window, taken_before=self._taken_before("F", 1)
            )
            self.outboxes.append(self.results)

    def _sent(self, rank: int, kinds: str, step: int) -> list[Item]:
        """What a neighbour sends to this rank's stages, `step` from its own, in its order."""
        own = self.stage.virtual
        return [
            Item(a.stage + step, self.places[a.unit, a.chunk])
            for a in self.plan.actions[rank]
            if a.kind in kinds and a.stage + step in own
        ]

    def _taken_before(self, way: str, step: int) -> Callable[[Item, Item], bool]:
        """See `Outbox`; for what goes `step` stages on. Where ranks have one stage each nothing is
        in doubt."""
        if len(self.stage.virtual) == 1:
            return lambda one, other: True
        order = self.order
        return lambda one, other: (
            order[way, one.stage + step, one.place] < order[way, other.stage, other.place]
        )

    @cached_property
    def order(self) -> dict[tuple[str, int, int], int]:
        """One order in which all forwards and backwards can happen: the number of each (way,
        stage, place)."""
        actions = (action for _, action in walk(self.plan) if action.kind != "W")
        return {
            ("F" if a.kind == "F" else "B", a.stage, self.places[a.unit, a.chunk]): number
            for number, a in enumerate(actions)
        }

    def _empty(self, place: int) -> torch.Tensor:
        tokens = self.columns[place]["input_ids"].shape[1]
        return torch.empty(1, tokens, self.stage.width, dtype=self.dtype, device=self.device)

    # ---- actions

    def obey(self, action: Action) -> None:
        match action.kind:
            case "F":
                self.forward(action)
            case "B":
                self.backward(action)
            case "I":
                with self.executor.weights.deferred((action.stage, action.unit, action.chunk)):
                    self.backward(action)
            case "W":
                self.executor.weights.run((action.stage, action.unit, action.chunk))

    def forward(self, action: Action) -> None:
        item, stage = self._find(action)
        assert item not in self.flights, f"{action} comes twice"
        columns = dict(self.columns[item.place])
        tokens, labels = columns.pop("input_ids"), columns.pop("labels")
        source = tokens if stage.is_first else self.sources.take(item)
        if source.is_floating_point() and torch.is_grad_enabled():
            source.requires_grad_()
        columns |= {"seq_ctx": self._context(item, stage)}
        gradient = None
        if stage.is_last:
            result, gradient = self._loss(stage, source, labels, columns)
        else:
            with self.autocast():
                result = stage.hidden(source, **columns)
            assert result.dtype == self.dtype, (
                f"hidden states are {result.dtype}, expected {self.dtype}"
            )
            self.results.put(item, result)
        if torch.is_grad_enabled():
            self.flights[item] = _Flight(source, result, gradient)

    def _find(self, action: Action) -> tuple[Item, VirtualStage]:
        return Item(action.stage, self.places[action.unit, action.chunk]), self.stage.virtual[
            action.stage
        ]

    def _loss(
        self,
        stage: VirtualStage,
        source: torch.Tensor,
        labels: torch.Tensor,
        columns: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's input and its gradient; the loss and the head's gradients are added to what
        is there."""
        with self.autocast():
            of_loss = {
                "labels": labels,
                "shift_labels": labels,
                "num_items_in_batch": self.targets,
            }
            loss, hidden, entry = stage.loss(source, **columns, **of_loss)
        self.loss += loss.detach()
        if loss.requires_grad:
            loss.backward()
        return hidden, entry.grad

    def backward(self, action: Action) -> None:
        item, stage = self._find(action)
        assert item in self.flights, f"{action} comes before its forward, or twice"
        flight = self.flights.pop(item)
        gradient = flight.gradient
        if not stage.is_last:
            gradient = self.gradients.take(item)
            self.results.arrived(item)  # long ago, since its gradient is here
        if flight.result.requires_grad:
            flight.result.backward(gradient)
        if not stage.is_first:
            self.gradients_out.put(item, flight.source.grad)

    def _context(self, item: Item, stage: VirtualStage) -> ChunkContext:
        first, stop = stage.layers
        count = self.plan.layers_checkpointed(item.stage, item.place)
        return ChunkContext(
            self.plan.chunks[item.place],
            self.plan.lengths,
            self.executor.carry,
            self.device,
            checkpointed=frozenset(range(first, min(first + count, stop))),
            sharing=self.executor.sharing,
        )

    def close(self) -> None:
        """Wait for what is under way, and make sure that nothing is left."""
        for outbox in self.outboxes:
            outbox.close()
        self.executor.carry.check_empty()
        self.executor.weights.check_empty()
        assert not self.flights, (
            f"the step is over without a backward of chunks {sorted(self.flights)}"
        )


def _forwards(plan: PipelinePlan) -> PipelinePlan:
    """The plan's chunks, forward alone."""
    return replace(
        plan, actions=tuple(tuple(a for a in actions if a.kind == "F") for actions in plan.actions)
    )


def _checkpointable(layer: nn.Module, index: int) -> Callable[..., torch.Tensor]:
    """The layer's forward, which keeps its input alone where the context of the chunk says so."""
    own_forward = layer.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A model that checkpoints all its layers anyway does so inside own_forward.
        own = getattr(layer, "gradient_checkpointing", False)
        if torch.is_grad_enabled() and not own and index in kwargs["seq_ctx"].checkpointed:
            return checkpoint(own_forward, hidden, *args, use_reentrant=False, **kwargs)
        return own_forward(hidden, *args, **kwargs)

    return forward
