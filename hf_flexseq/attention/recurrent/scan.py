"""A recurrence through sequences that several ranks hold.

    state after a segment  =  transition (state before it)  +  end state from zero

Every rank can compute both parts of this for its own segments without the states before them: a
*summary*, whose size does not grow with the segment.

    forward     1. sum up the segments that others of their sequence follow
                2. send the summaries to the ranks of all later segments, and get the summaries
                   of all earlier ones
                3. combine these, the earliest first, to the true state before each segment
                4. scan from these states
    backward    the mirror image: the gradient of a segment's state before it is
                    transition transposed (gradient of the state after it)  +  from its own outputs
                so the summaries of later segments make the true gradient of the state after each
                segment, and the ordinary backward of the scan does the rest

Every node of a unit of rows is a separate segment, whose state all of its children begin with, on
one rank, too; the gradients that they have of it are summed (`program/summaries.py`). A plain
sequence on one rank needs none of this. Received states enter as numbers, so no summary has a
gradient. A summary is one more pass over the states of a segment; the work inside chunks, most of
it, is not repeated.

This is the state passing of flash-linear-attention's context parallelism and of Megatron's
chunkwise backend, for any segments of any sequences instead of one slice per rank. Rejected: a
prefix scan in log2(d) rounds, which gathers less only for dozens of ranks, and waits more often.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hf_flexseq.attention.recurrent.carry import Carrying
from hf_flexseq.attention.recurrent.rows import RecurrentContext, exchange
from hf_flexseq.attention.remat import Kept, Region, kept_region
from hf_flexseq.kernels.scans import Scan, Tensors, apply_transition, apply_transposed
from hf_flexseq.program.compile import SUMMARIES_AFTER, SUMMARIES_BEFORE
from hf_flexseq.program.instructions import RowsSpec
from hf_flexseq.program.summaries import Link, Neighbours, Stage


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
        """Return the state [H, K, V] as the first segment's: [segments, H, K, V]."""
        lengths = self.seq_ctx.programs.parts.segments().lengths
        states = state.new_zeros(len(lengths), *state.shape)
        states[0] = state
        return states

    def taken_before(self, inputs: Tensors) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the states that segments of this rank begin with, [n, H, K, V] (`spread`), None
        where all are zero; and the transitions [m, H, ...] of segments between others, None where
        no sequence has several segments."""
        segments = self.seq_ctx.programs.parts.segments()
        before = segments.neighbours(after=False)
        if not before.summarised and not before.takes.given.tokens:
            return None, None
        # [summarised, H, K, V], [middle, H, K, K] or less
        sums, transitions = self.scan.summarise(inputs, before.summarised, segments.middle)
        results = self._with_others(before, sums, transitions, after=False)
        if not before.takes.given.tokens:
            return None, transitions
        return results.index_select(0, self.seq_ctx.programs.index(before.taken)), transitions

    def spread(self, taken: torch.Tensor | None) -> torch.Tensor | None:
        """Return the states before all segments [segments, H, K, V], or None for zeros. taken: of
        `taken_before`; several segments may begin with the same state."""
        if taken is None:
            return None
        return self._sums(taken, self._neighbours(after=False).takes)

    def gradients_after(
        self, dout: torch.Tensor, inputs: Tensors, saved: Tensors, transitions: torch.Tensor
    ) -> torch.Tensor | None:
        """Return gradients of the states after all segments [segments, H, K, V], or None."""
        after = self._neighbours(after=True)
        sums = self.scan.summarise_backward(dout, inputs, saved, after.summarised)
        own = self._results(after.own, sums, transitions, apply_transposed)
        results = self._with_others(after, own, transitions, after=True)
        grads = None
        if after.takes_own.given.tokens:
            grads = self._sums(own, after.takes_own)
        if after.takes.given.tokens:
            taken = results.index_select(0, self.seq_ctx.programs.index(after.taken))
            of_others = self._sums(taken, after.takes)
            grads = of_others if grads is None else grads + of_others
        return grads

    def _neighbours(self, *, after: bool) -> Neighbours:
        return self.seq_ctx.programs.parts.segments().neighbours(after=after)

    def _with_others(
        self, neighbours: Neighbours, own: torch.Tensor, transitions: torch.Tensor, *, after: bool
    ) -> torch.Tensor:
        """Exchange summaries and combine them: own [summarised, H, K, V] and transitions [middle,
        H, ...] of this rank -> the results that need other ranks' summaries, too, [n, H, K, V]."""
        rows = self._sums(own, neighbours.rows)
        if neighbours.messages:
            what = SUMMARIES_AFTER if after else SUMMARIES_BEFORE
            rows, transitions = self._exchanged(what, neighbours, rows, transitions)
        apply = apply_transposed if after else apply_transition
        return self._results(neighbours.every, rows, transitions, apply)

    def _results(
        self,
        stage: Stage,
        sums: torch.Tensor,
        transitions: torch.Tensor,
        apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the results [n, H, K, V] of a stage, which may be `sums`, changed in place."""
        results = self._chosen(sums, stage.results)
        applied = self._chosen(transitions, stage.transitions)
        for level in stage.levels:
            states = self._sums(results, level.link)
            of_level = applied[level.transition : level.transition + len(states)]
            results[level.start : level.start + len(states)] += apply(of_level, states)
        return results

    def _exchanged(
        self,
        what: str,
        neighbours: Neighbours,
        sums: torch.Tensor,
        transitions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange rows: sums [rows, H, K, V] and transitions [middle, H, ...] -> both of [rows |
        received rows]. Rows without a transition have zeros."""
        # [n, numbers of a transition + of a state]
        flat = self._chosen(transitions, neighbours.middle).flatten(1)
        columns = flat.shape[1]
        rows = sums.new_zeros(len(sums), columns + sums.shape[1:].numel())
        if len(flat):
            index = self.seq_ctx.programs.index(neighbours.middle_rows)
            rows[:, :columns].index_copy_(0, index, flat)
        rows[:, columns:] = sums.flatten(1)
        rows = torch.cat((rows, exchange(what, rows, self.seq_ctx)))
        return (
            rows[:, columns:].view(-1, *sums.shape[1:]),
            rows[:, :columns].view(-1, *transitions.shape[1:]),
        )

    def _chosen(self, x: torch.Tensor, rows: RowsSpec) -> torch.Tensor:
        """Return some rows of x, [t, ...] -> [n, ...]: a view where they stand together."""
        if rows.start is not None:
            return x[rows.start : rows.start + rows.tokens]
        assert rows.array is not None, "rows of this rank have places"
        return x.index_select(0, self.seq_ctx.programs.index(rows.array))

    def _sums(self, states: torch.Tensor, link: Link) -> torch.Tensor:
        """Return the sums of states that a link names: [t, H, K, V] -> [takers, H, K, V]."""
        given = self._chosen(states, link.given)
        if link.places is None:
            return given
        sums = states.new_zeros(link.takers, *states.shape[1:])
        return sums.index_add_(0, self.seq_ctx.programs.index(link.places), given)


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
            taken, transitions = run.taken_before(inputs)
            states = run.first_state() if transitions is None else run.spread(taken)
            out, finals, saved = run.scan.forward(inputs, states)
            out = out.to(run.dtype)
            if run.carrying is not None:
                run.carrying.store(finals[0].clone())
            if run.region is not None and store is not None:
                kept = Kept.of(out, [x for x in (transitions, taken) if x is not None])
        else:
            transitions, taken = (*kept.others, None, None)[:2]
            out = kept.out
            saved = run.scan.resume(inputs, run.spread(taken))
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
