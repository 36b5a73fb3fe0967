"""A recurrence through sequences that lie on several ranks.

    state after a segment  =  transition (state before it)  +  end state from zero

Every rank can compute both parts of this for its own segments without the states before them: a
*summary*, whose size does not grow with the segment.

    forward     1. sum up the segments that others of their sequence follow
                2. send the summaries to the ranks of all later segments, and get those of all
                   earlier ones
                3. combine these, the earliest first, to the true state before each segment
                4. scan from these states
    backward    the mirror image: the gradient of a segment's state before it is
                    transition transposed (gradient of the state after it)  +  from its own outputs
                so the summaries of later segments make the true gradient of the state after each
                segment, and the ordinary backward of the scan does the rest

A sequence on one rank needs none of this. Received states enter as numbers, so no summary has a
gradient. A summary is one more pass over the states of a segment; the work inside chunks, most of
it, is not repeated.

This is the state passing of flash-linear-attention's context parallelism and of Megatron's
chunkwise backend, for any segments of any sequences instead of one slice per rank. Rejected: a
prefix scan in log2(d) rounds, which gathers less only for dozens of ranks, and waits more often.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.attention.recurrent.carry import Carrying
from hf_flexseq.attention.recurrent.rows import RecurrentContext, exchange
from hf_flexseq.attention.remat import Kept, Region, kept_region
from hf_flexseq.kernels.scans import Scan, Tensors, apply_transition, apply_transposed
from hf_flexseq.program.compile import SUMMARIES_AFTER, SUMMARIES_BEFORE
from hf_flexseq.program.segments import Neighbours


def run_scan(
    scan: Scan, inputs: Tensors, seq_ctx: RecurrentContext, *, dtype: torch.dtype
) -> torch.Tensor:
    """Run a recurrence over all sequences of this rank's shard, and return its output in `dtype`,
    as `scan.forward` shapes it. Collective over the groups of the shard.

    scan: of the segments of the shard. inputs: of this rank's segments.
    """
    region = kept_region(seq_ctx.kept)
    needs_grad = any(x is not None and x.requires_grad for x in inputs)
    carrying = seq_ctx.carrying(keeps_grad=torch.is_grad_enabled() and needs_grad)
    out: torch.Tensor = _Scan.apply(_Run(scan, seq_ctx, region, carrying, dtype), *inputs)
    return out


class _Run(NamedTuple):
    """Arguments of a scan, besides tensors."""

    scan: Scan
    seq_ctx: RecurrentContext
    region: Region | None
    carrying: Carrying | None
    dtype: torch.dtype
    """dtype of the output."""

    def first_state(self) -> torch.Tensor | None:
        """Return the states before a chunk's segments, [segments, H, K, V], or None for zeros."""
        if self.carrying is None:
            return None
        given = self.carrying.given()
        return None if given is None else self._of_first(given)

    def first_gradient(self) -> torch.Tensor | None:
        """Return the gradients of the states after all segments of a chunk; None for zeros."""
        if self.carrying is None:
            return None
        after = self.carrying.gradient_after()
        return None if after is None else self._of_first(after)

    def _of_first(self, state: torch.Tensor) -> torch.Tensor:
        """Return the state [H, K, V] as that of the first segment: [segments, H, K, V]."""
        lengths = self.seq_ctx.programs.parts.segments().lengths
        states = state.new_zeros(len(lengths), *state.shape)
        states[0] = state
        return states

    def states_before(self, inputs: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the states before all segments [segments, H, K, V], None where they are zero, and
        the transitions [m, H, ...] of those that stand between others, None where no sequence has
        several segments."""
        segments = self.seq_ctx.programs.parts.segments()
        before = self._neighbours_before
        if not before.summarised and not before.steps:
            return self.first_state(), None
        # [summarised, H, K, V], [middle, H, K, K] or less
        sums, transitions = self.scan.summarise(inputs, before.summarised, segments.middle)
        states = self._combined(before, sums, transitions, after=False)
        return states, transitions

    def to_keep(self, states: torch.Tensor | None) -> torch.Tensor | None:
        """Return the states before those segments that continue others, [n, H, K, V], of states
        before all segments; all others are zero."""
        steps = self._neighbours_before.steps
        if states is None or not steps:
            return None
        return states.index_select(0, self.seq_ctx.programs.index(steps[0][0]))

    def from_kept(self, kept: torch.Tensor | None) -> torch.Tensor | None:
        """Return the states before all segments from those that `to_keep` has returned."""
        if kept is None:
            return None
        segments = len(self.seq_ctx.programs.parts.segments().lengths)
        states = kept.new_zeros(segments, *kept.shape[1:])
        index = self.seq_ctx.programs.index(self._neighbours_before.steps[0][0])
        return states.index_copy_(0, index, kept)

    @property
    def _neighbours_before(self) -> Neighbours:
        return self.seq_ctx.programs.parts.segments().neighbours(after=False)

    def gradients_after(
        self, dout: torch.Tensor, inputs: Tensors, saved: Tensors, transitions: torch.Tensor
    ) -> torch.Tensor | None:
        """Return gradients of the states after all segments [segments, H, K, V], or None."""
        segments = self.seq_ctx.programs.parts.segments()
        after = segments.neighbours(after=True)
        sums = self.scan.summarise_backward(dout, inputs, saved, after.summarised)
        return self._combined(after, sums, transitions, after=True)

    def _combined(
        self,
        neighbours: Neighbours,
        sums: torch.Tensor,
        transitions: torch.Tensor,
        *,
        after: bool,
    ) -> torch.Tensor | None:
        """Exchange summaries and combine them: sums [summarised, H, K, V] and transitions [m, H,
        ...] -> [segments, H, K, V]; None where no segment takes any."""
        segments = self.seq_ctx.programs.parts.segments()
        index = self.seq_ctx.programs.index
        shape = sums.shape[1:]  # H, K, V
        transition_shape = transitions.shape[1:]
        # 1. one row for each summarised segment: [n, numbers of a transition + of a state]
        flat = transitions.flatten(1)
        rows = sums.new_zeros(len(sums), flat.shape[1] + shape.numel())
        if segments.middle:
            rows[:, : flat.shape[1]].index_copy_(0, index(neighbours.middle), flat)
        rows[:, flat.shape[1] :] = sums.flatten(1)

        # 2. with those of other ranks: [n + received, numbers]
        if neighbours.messages:
            what = SUMMARIES_AFTER if after else SUMMARIES_BEFORE
            rows = torch.cat((rows, exchange(what, rows, self.seq_ctx)))

        # 3. the farthest one first
        if not neighbours.steps:
            return None
        apply = apply_transposed if after else apply_transition
        states = sums.new_zeros(len(segments.lengths), *shape)
        for takers, taken in neighbours.steps:
            summaries = rows.index_select(0, index(taken))
            transition = summaries[:, : flat.shape[1]].view(-1, *transition_shape)
            state = states.index_select(0, index(takers))  # [takers, H, K, V]
            added = summaries[:, flat.shape[1] :].view(-1, *shape)
            states.index_copy_(0, index(takers), apply(transition, state) + added)
        return states


class _Scan(torch.autograd.Function):
    """A scan whose segments continue others."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the scan's output, computed in the first run and taken in a replay."""
        store = run.seq_ctx.kept
        kept = None
        if run.region is not None and store is not None:
            kept = store.take(run.region)
        if kept is None:
            states, transitions = run.states_before(inputs)
            out, finals, saved = run.scan.forward(inputs, states)
            out = out.to(run.dtype)
            if run.carrying is not None:
                run.carrying.store(finals[0].clone())
            if run.region is not None and store is not None:
                keep = (transitions, run.to_keep(states))
                kept = Kept.of(out, [x for x in keep if x is not None])
        else:
            transitions, of_some = (*kept.others(), None, None)[:2]
            out = kept.out
            saved = run.scan.resume(inputs, run.from_kept(of_some))
        if run.region is not None and store is not None and not run.region.replays:
            assert kept is not None, "a first run keeps its result"
            store.put(run.region, kept)
        ctx.run = run
        ctx.inputs = len(inputs)
        ctx.has_neighbours = transitions is not None
        ctx.save_for_backward(*inputs, *saved, transitions)
        # What is kept must not come to hold the graph.
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs, shaped as they are."""
        run: _Run = ctx.run
        *tensors, transitions = ctx.saved_tensors
        inputs = tuple(tensors[: ctx.inputs])
        saved = tuple(tensors[ctx.inputs :])
        dout = dout.to(inputs[0].dtype).contiguous()  # in which the scan computes
        if ctx.has_neighbours:
            after = run.gradients_after(dout, inputs, saved, transitions)
        else:
            after = run.first_gradient()
        grads, dstates = run.scan.backward(dout, after, inputs, saved)
        if run.carrying is not None:
            run.carrying.leave_gradient(dstates[0].clone())
        return None, *grads
