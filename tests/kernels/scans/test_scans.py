"""Scans in chunks give what a recurrence gives token by token: outputs, states and gradients."""

from collections.abc import Sequence

import pytest
import torch

from hf_flexseq.kernels.scans import apply_transition, apply_transposed
from hf_flexseq.kernels.scans.chunked import ChunkedScan
from hf_flexseq.kernels.scans.grid import ChunkGrid
from tests.kernels.scans.cases import KINDS, Kind

CPU = torch.device("cpu")
LENGTHS = {
    "one token": (1,),
    "a chunk": (64,),
    "around a chunk": (63, 65, 2),
    "prime": (131, 17),
    "many": (5, 70, 1, 1, 129, 12, 64, 3, 8, 66, 2, 30),
}


class Case:
    """Random inputs of a kind of layer over segments, and gradients of what it gives."""

    def __init__(self, kind: Kind, lengths: Sequence[int], stronger: float = 1) -> None:
        random = torch.Generator().manual_seed(1)
        self.kind = kind
        self.lengths = tuple(lengths)
        self.layer = kind.make(sum(lengths), random, stronger)
        shape = (len(lengths), *kind.state_shape)
        self.states = torch.randn(shape, dtype=torch.float64, generator=random)
        self.dfinals = torch.randn(shape, dtype=torch.float64, generator=random)
        heads, _, values = kind.state_shape
        of_out = (sum(lengths), heads, values)
        self.dout = torch.randn(of_out, dtype=torch.float64, generator=random)
        for x in (*self.layer, self.states):
            x.requires_grad_()
        self.grid = ChunkGrid(lengths, CPU)
        self.scan = ChunkedScan(self.grid)

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out [tokens, H, V] and the states behind the segments [segments, H, K, V], token by
        token."""
        outs, finals = [], []
        start = 0
        for segment, length in enumerate(self.lengths):
            rows = slice(start, start + length)
            start += length
            taken = [
                x[rows] if of_token else x
                for x, of_token in zip(self.layer, self.kind.is_of_token, strict=True)
            ]
            out, final = self.kind.stepwise(self.states[segment], *taken, **self.kind.options)
            outs.append(out)
            finals.append(final)
        return torch.cat(outs), torch.stack(finals)

    def chunk_inputs(self) -> tuple[torch.Tensor, ...]:
        return self.kind.chunk_inputs(*self.layer, self.grid, **self.kind.options)

    def chunks_of_dout(self) -> torch.Tensor:
        return self.grid.to_chunks(self.dout).contiguous()


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_scan_in_chunks_is_the_recurrence_token_by_token(kind, lengths):
    case = Case(kind, lengths)
    wanted = case.wanted()
    wanted_grads = torch.autograd.grad(
        wanted, (*case.layer, case.states), (case.dout, case.dfinals)
    )

    inputs = case.chunk_inputs()
    alone = tuple(None if x is None else x.detach() for x in inputs)
    out, finals, saved = case.scan.forward(alone, case.states.detach())
    grads, dstates = case.scan.backward(case.chunks_of_dout(), case.dfinals, alone, saved)
    through = [(x, dx) for x, dx in zip(inputs, grads, strict=True) if x is not None]
    layer_grads = torch.autograd.grad([x for x, _ in through], case.layer, [d for _, d in through])

    close(case.grid.rows(out), wanted[0])
    close(finals, wanted[1])
    for got, want in zip((*layer_grads, dstates), wanted_grads, strict=True):
        close(got, want)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_summaries_say_what_a_segment_does_to_any_state(kind):
    case = Case(kind, LENGTHS["many"])
    with torch.no_grad():
        inputs = case.chunk_inputs()
    _, finals, saved = case.scan.forward(inputs, case.states.detach())
    everywhere = range(len(case.lengths))

    ends, transitions = case.scan.summarise(inputs, everywhere, everywhere)
    close(apply_transition(transitions, case.states.detach()) + ends, finals)
    # of states before and behind, transition and transposed are the same product
    close(
        (apply_transition(transitions, case.states.detach()) * case.dfinals).sum((1, 2, 3)),
        (case.states.detach() * apply_transposed(transitions, case.dfinals)).sum((1, 2, 3)),
    )
    for states_of, transitions_of in (((4, 0, 9), (0, 11)), ((), (5,)), ((2,), ()), ((), ())):
        some_ends, some = case.scan.summarise(inputs, states_of, transitions_of)
        close(some_ends, ends[list(states_of)])
        close(some, transitions[list(transitions_of)])

    of_outputs = case.scan.backward(case.chunks_of_dout(), None, inputs, saved)[1]
    dstates = case.scan.backward(case.chunks_of_dout(), case.dfinals, inputs, saved)[1]
    close(of_outputs + apply_transposed(transitions, case.dfinals), dstates)
    for chosen in ((4, 0, 9), (11,), (), tuple(everywhere)):
        got = case.scan.summarise_backward(case.chunks_of_dout(), inputs, saved, chosen)
        close(got, of_outputs[list(chosen)])

    for resumed, kept in zip(case.scan.resume(inputs, case.states.detach()), saved, strict=True):
        assert torch.equal(resumed, kept)
    from_zeros = case.scan.forward(inputs, torch.zeros_like(case.states))
    from_nothing = case.scan.forward(inputs, None)
    assert torch.equal(from_nothing[0], from_zeros[0])
    assert torch.equal(from_nothing[1], ends) or torch.allclose(from_nothing[1], ends, 1e-12)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_decays_that_leave_nothing_are_exact(kind):
    # A product of decays over a chunk is far below the smallest number: e ** -5000 and less.
    case = Case(kind, (150,), stronger=1000)
    wanted, got = case.wanted(), case.chunk_inputs()
    out, finals, _ = case.scan.forward(got, case.states)
    close(case.grid.rows(out), wanted[0])
    close(finals, wanted[1])
    grads = torch.autograd.grad([x.sum() for x in got if x is not None], case.layer)
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_rank_without_tokens_scans_nothing(kind):
    case = Case(kind, ())
    inputs = case.chunk_inputs()
    out, finals, saved = case.scan.forward(inputs, None)
    assert case.grid.rows(out).shape == case.dout.shape
    grads, dstates = case.scan.backward(case.chunks_of_dout(), None, inputs, saved)
    assert finals.shape == dstates.shape == case.states.shape
    for x, grad in zip(inputs, grads, strict=True):
        assert x is None or grad.shape == x.shape


@pytest.mark.parametrize("lengths", [*LENGTHS.values(), (64, 128), ()])
def test_rows_become_chunks_and_rows_again(lengths):
    grid = ChunkGrid(lengths, CPU)
    rows = torch.randn(sum(lengths), 3, 2)
    chunks = grid.to_chunks(rows)
    assert chunks.shape == (grid.chunks, 3, 64, 2)
    assert torch.equal(grid.rows(chunks), rows)
    assert chunks.count_nonzero() == rows.count_nonzero()
