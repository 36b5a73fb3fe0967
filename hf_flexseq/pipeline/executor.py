"""The executor obeys the list of actions that a plan has for this rank, and knows no schedule.

    F   take the hidden states of the previous stage (the first stage: token ids), run the layers,
        send the result (the last stage: the loss, which goes backward at once, as far as the
        head's input)
    B   take the gradient of the result, go backward, send the gradient of the input
    I   B, but the weight gradients of the layers are left in the store
    W   add those

Losses are sums over a chunk's targets divided by the targets of the whole step, so the gradients
of all chunks only add up. Chunks differ in shape, and every shape is known from the plan: only
tensors are sent.

The head goes backward in F because a loss that is computed without logits for all tokens has its
gradients then: kept until B, every chunk in flight would hold a gradient of the whole head. Only
the gradient of the head's input is kept.

Rejected: torch.distributed.pipelining. Its stages hold one shape for all micro-batches or exchange
it every time, its schedules are lowered in up to a second per step, and it cannot carry keys and
values.

In shapes, `tokens` counts this rank's part of a chunk.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_flexseq.attention.recurrent.carry import Carry
from hf_flexseq.distributed.links import Neighbours
from hf_flexseq.kernels import Kernel, lse_dtype
from hf_flexseq.pipeline.context import ChunkContext
from hf_flexseq.pipeline.mailbox import WINDOW, Inbox, Item, Outbox, post_receives
from hf_flexseq.pipeline.planning.plan import Action, PipelinePlan
from hf_flexseq.pipeline.planning.walk import walk
from hf_flexseq.pipeline.stages import Stage, VirtualStage
from hf_flexseq.pipeline.ulysses import Sharing, own_columns
from hf_flexseq.pipeline.weights import WeightGradients

Columns = Mapping[str, torch.Tensor]  # by name, [1, tokens] each
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(slots=True)
class _Flight:
    """A chunk between its forward and its backward."""

    source: torch.Tensor
    """[1, tokens] token ids on the first stage, [1, tokens, hidden_size] elsewhere."""
    result: torch.Tensor
    """[1, tokens, hidden_size] the stage's hidden states."""
    gradient: torch.Tensor | None
    """[1, tokens, hidden_size] of `result`, which only the last stage has already."""


class PipelineExecutor:
    """A rank at work. `train` runs an optimizer step, `evaluate` forwards alone."""

    def __init__(
        self,
        stage: Stage,
        neighbours: Neighbours,
        kernel: Kernel,
        *,
        sharing: Sharing | None = None,
    ) -> None:
        """Take over the layers' forwards, until `detach`. sharing: the ranks of this stage that
        share every chunk's tokens; None for one rank."""
        self.stage = stage
        self.neighbours = neighbours
        self.sharing = sharing
        self.kernel = kernel
        self.carry = Carry()
        self.weights = WeightGradients(stage.own_layers.values())
        for index, layer in stage.own_layers.items():
            # A partial, not a function: a copy of the model has a layer of its own in it.
            layer.forward = partial(_checkpointable, layer, layer.forward, index)

    def detach(self) -> None:
        """Detach from the stage's layers."""
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
        """Run all actions of one step and return the loss, a scalar: sum over targets / `targets`
        on the last stage, 0 elsewhere.

        columns: [chunk] tensors [1, tokens of the chunk] on the stage's device: input_ids, labels,
            position_ids
        targets: target tokens of the whole step

        Gradients are added to existing ones. A tied tensor's gradient covers only this stage's
        copy.
        """
        with self.weights.casting_once():
            step = _ChunkRun(self, plan, columns, targets, autocast)
            for action in plan.actions[self.stage.index]:
                step.obey(action)
            step.close()
        return step.loss

    def evaluate(self, plan: PipelinePlan, *step: Any) -> torch.Tensor:
        """Run the forwards of one step in the plan's order, without gradients, and return the
        loss, a scalar. step: further arguments of `train`, columns [1, tokens] included."""
        with torch.no_grad():
            return self.train(_forwards(plan), *step)


class _ChunkRun:
    """An optimizer step of one rank."""

    def __init__(
        self,
        executor: PipelineExecutor,
        plan: PipelinePlan,
        columns: Sequence[Columns],
        targets: int,
        autocast: Context,
    ) -> None:
        """Arguments as in `train`; columns: [chunk] of [1, tokens of the chunk]."""
        self.executor = executor
        self.stage = executor.stage
        self.plan = plan
        self.targets = targets
        self.autocast = autocast
        stages = len(self.stage.spans)
        ranks = self.stage.count
        assert (plan.stages, plan.ranks) == (stages, ranks), (
            f"a plan for {plan.stages} stages on {plan.ranks} ranks, not {stages} on {ranks}"
        )
        # [1, tokens of the chunk] -> [1, tokens of this rank]
        self.columns = [own_columns(of_chunk, executor.sharing) for of_chunk in columns]
        self.chunk_numbers = plan.places()  # (unit, index) -> index in the plan's chunks
        # The number of each action in the order in which the messages of all ranks are posted.
        self.order = {action: number for number, (_, action) in enumerate(walk(plan))}
        self.flights: dict[Item, _Flight] = {}

        parameter = next(self.stage.stack.model.parameters())
        self.dtype = parameter.dtype
        self.device = parameter.device
        self.loss = torch.zeros((), dtype=lse_dtype(self.dtype), device=self.device)

        # None at the ends of the pipeline
        self.sources: Inbox | None = None  # hidden states of the stage before
        self.results: Outbox | None = None
        self.gradients: Inbox | None = None  # of the stage after
        self.gradients_out: Outbox | None = None
        self.inboxes: list[Inbox] = []
        self._open(executor.neighbours)

    # ---- neighbours

    def _open(self, links: Neighbours) -> None:
        """Make the boxes of this rank's links."""
        if links.from_before is not None:
            rank_before = (self.stage.index - 1) % self.stage.count
            sent = self._sent(rank_before, "F", 1)
            self.sources = Inbox(links.from_before, sent, self._empty)
            self.inboxes.append(self.sources)
        if links.to_after is not None:
            # In training the gradient of a result tells that the result has arrived.
            window = None if torch.is_grad_enabled() else WINDOW
            self.results = Outbox(links.to_after, window=window)
        if links.from_after is not None:
            rank_after = (self.stage.index + 1) % self.stage.count
            sent = self._sent(rank_after, "BI", -1)
            self.gradients = Inbox(links.from_after, sent, self._empty)
            self.inboxes.append(self.gradients)
        if links.to_before is not None:
            self.gradients_out = Outbox(links.to_before, window=WINDOW)

    def _sent(self, rank: int, kinds: str, distance: int) -> list[tuple[int, Item]]:
        """Return a neighbour's sends to this rank's stages, in order, with their actions' numbers.
        kinds: of the sending actions. distance: stages from the sender's on."""
        sent = []
        for action in self.plan.actions[rank]:
            receiver = action.stage + distance
            if action.kind in kinds and receiver in self.stage.virtual:
                chunk = self.chunk_numbers[action.unit, action.chunk]
                sent.append((self.order[action], Item(receiver, chunk)))
        return sent

    def _empty(self, chunk: int) -> torch.Tensor:
        """Return a tensor [1, tokens, hidden_size] to receive a chunk in."""
        tokens = self.columns[chunk]["input_ids"].shape[1]
        return torch.empty(1, tokens, self.stage.width, dtype=self.dtype, device=self.device)

    # ---- actions

    def obey(self, action: Action) -> None:
        """Run one action of the plan, after posting all receives due before it."""
        post_receives(self.inboxes, before=self.order[action])
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
        """Run an F."""
        item, stage = self._find(action)
        assert item not in self.flights, f"{action} comes twice"
        # 1. take the source: token ids [1, tokens] or hidden states [1, tokens, hidden_size]
        columns: dict[str, Any] = dict(self.columns[item.chunk])
        token_ids = columns.pop("input_ids")
        labels = columns.pop("labels")
        source = token_ids
        if not stage.is_first:
            assert self.sources is not None, "a stage that is not the first has one before it"
            source = self.sources.take(item)
            if torch.is_grad_enabled():
                source.requires_grad_()
        columns["seq_ctx"] = self._context(item, stage)

        # 2. run the layers -> [1, tokens, hidden_size]; 3. send the result
        gradient = None
        if stage.is_last:
            result, gradient = self._loss(stage, source, labels, columns)
        else:
            with self.autocast():
                result = stage.hidden(source, **columns)
            assert result.dtype == self.dtype, (
                f"hidden states are {result.dtype}, expected {self.dtype}"
            )
            assert self.results is not None, "a stage that is not the last has one after it"
            self.results.put(item, result)
        if torch.is_grad_enabled():
            self.flights[item] = _Flight(source, result, gradient)

    def _find(self, action: Action) -> tuple[Item, VirtualStage]:
        """Return an action's chunk, and the stage that works on it."""
        item = Item(action.stage, self.chunk_numbers[action.unit, action.chunk])
        return item, self.stage.virtual[action.stage]

    def _loss(
        self,
        stage: VirtualStage,
        source: torch.Tensor,
        labels: torch.Tensor,
        columns: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's input [1, tokens, hidden_size] and its gradient; add loss and
        gradients. source: [1, tokens] or [1, tokens, hidden_size]; labels: [1, tokens]"""
        with self.autocast():
            loss, hidden, entry = stage.loss(
                source,
                **columns,
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=self.targets,
            )
        self.loss += loss.detach()
        if loss.requires_grad:
            loss.backward()
        return hidden, entry.grad

    def backward(self, action: Action) -> None:
        """Run a B, or an I where the store defers weight gradients."""
        item, stage = self._find(action)
        assert item in self.flights, f"{action} comes before its forward, or twice"
        flight = self.flights.pop(item)
        # 1. take the gradient of the result: [1, tokens, hidden_size]
        gradient = flight.gradient
        if not stage.is_last:
            assert self.gradients is not None, "a stage that is not the last has one after it"
            assert self.results is not None, "a stage that is not the last has one after it"
            gradient = self.gradients.take(item)
            self.results.arrived(item)  # long ago, since its gradient is here
        # 2. go backward
        if flight.result.requires_grad:
            flight.result.backward(gradient)
        # 3. send the gradient of the source: [1, tokens, hidden_size]
        if not stage.is_first:
            assert self.gradients_out is not None, "a stage that is not the first has one before"
            self.gradients_out.put(item, flight.source.grad)

    def _context(self, item: Item, stage: VirtualStage) -> ChunkContext:
        """Return the chunk's context for attention and layers."""
        start, stop = stage.layers
        count = self.plan.layers_checkpointed(item.stage, item.chunk)
        checkpointed = range(start, min(start + count, stop))
        return ChunkContext(
            self.plan.chunks[item.chunk],
            self.plan.lengths,
            self.executor.carry,
            self.device,
            kernel=self.executor.kernel,
            sharing=self.executor.sharing,
            checkpointed=frozenset(checkpointed),
        )

    def close(self) -> None:
        """Wait for pending sends, and make sure that nothing is left."""
        for outbox in (self.gradients_out, self.results):
            if outbox is not None:
                outbox.close()
        self.executor.carry.check_empty()
        self.executor.weights.check_empty()
        assert not self.flights, (
            f"the step is over without a backward of chunks {sorted(self.flights)}"
        )


def _forwards(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with its forwards alone."""
    lists = []
    for actions in plan.actions:
        lists.append(tuple(action for action in actions if action.kind == "F"))
    return replace(plan, actions=tuple(lists))


def _checkpointable(
    layer: nn.Module,
    own_forward: Callable[..., torch.Tensor],
    index: int,
    hidden: torch.Tensor,
    /,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a layer's own forward, [1, tokens, hidden_size] -> the same, and keep its input alone if
    the chunk's context says so. index: of the layer in the model."""
    chunk: ChunkContext | None = kwargs.get("seq_ctx")
    if chunk is None:  # attention will say what to do
        return own_forward(hidden, *args, **kwargs)

    def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Recurrent calls are counted by layer.
        return own_forward(hidden, *args, **{**kwargs, "seq_ctx": chunk.in_layer(index)})

    # A model may checkpoint all its layers itself.
    checkpoints_itself = getattr(layer, "gradient_checkpointing", False)
    if not torch.is_grad_enabled() or checkpoints_itself:
        return run(hidden, *args, **kwargs)
    if index not in chunk.checkpointed:
        return run(hidden, *args, **kwargs)
    return checkpoint(run, hidden, *args, use_reentrant=False, **kwargs)
