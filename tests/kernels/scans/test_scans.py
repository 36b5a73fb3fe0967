"""Scans, in chunks and by flash-linear-attention's functions, give what a recurrence gives token
by token: outputs, states and gradients. A stand-in for the package goes token by token."""

import itertools
from importlib import metadata, util
from unittest import mock

import pytest
import torch
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_flexseq.attention.recurrent import layers
from hf_flexseq.kernels.scans import apply_transition, apply_transposed, choose
from tests.kernels.scans.cases import KINDS, OF_PACKAGE, STATE_SHAPE, Case, package
from tests.random_runs import MOST_ERROR, AttentionRun, draw, run_attention

assert package, "a fixture"

MANY = (5, 70, 1, 1, 129, 12, 64, 3, 8, 66, 2, 30)
LENGTHS = [(1,), (64,), (63, 65, 2), (131, 17), MANY]
ALL = KINDS | OF_PACKAGE

of_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
of_all = pytest.mark.parametrize("kind", ALL.values(), ids=ALL)
with_package = pytest.mark.usefixtures("package")


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@with_package
@of_all
def test_a_scan_is_the_recurrence_token_by_token(kind):
    for lengths in LENGTHS if kind.rule is None else [(5, 1, 9)]:
        case = Case(kind, lengths)
        leaves = (*case.layer, case.states)
        wanted = case.wanted()
        wanted_grads = torch.autograd.grad(wanted, leaves, (case.dout_rows, case.dfinals))

        inputs = case.inputs()
        alone = tuple(None if x is None else x.detach() for x in inputs)
        with torch.no_grad():
            out, finals, saved = case.scan.forward(alone, case.states.detach())
            grads, dstates = case.scan.backward(case.dout, case.dfinals, alone, saved)
        through = [(x, dx) for x, dx in zip(inputs, grads, strict=True) if x is not None]
        layer_grads = torch.autograd.grad(
            [x for x, _ in through], case.layer, [dx for _, dx in through]
        )

        close(case.rows(out), wanted[0])
        close(finals, wanted[1])
        for got, want in zip((*layer_grads, dstates), wanted_grads, strict=True):
            close(got, want)


@pytest.mark.slow
@with_package
@of_all
def test_summaries_say_what_a_segment_does_to_any_state(kind):
    case = Case(kind, MANY)
    scan, dout, dfinals, states = case.scan, case.dout, case.dfinals, case.states.detach()
    inputs = tuple(None if x is None else x.detach() for x in case.inputs())
    _, finals, saved = scan.forward(inputs, states)
    everywhere = range(len(case.lengths))

    ends, transitions = scan.summarise(inputs, everywhere, everywhere)
    close(apply_transition(transitions, states) + ends, finals)
    # of states before and behind, transition and transposed are the same product
    close(
        (apply_transition(transitions, states) * dfinals).sum((1, 2, 3)),
        (states * apply_transposed(transitions, dfinals)).sum((1, 2, 3)),
    )
    for states_of, transitions_of in (((4, 0, 9), (0, 11)), ((), (5,)), ((2,), ()), ((), ())):
        some_ends, some = scan.summarise(inputs, states_of, transitions_of)
        close(some_ends, ends[list(states_of)])
        close(some, transitions[list(transitions_of)])

    of_outputs = scan.backward(dout, None, inputs, saved)[1]
    dstates = scan.backward(dout, dfinals, inputs, saved)[1]
    close(of_outputs + apply_transposed(transitions, dfinals), dstates)
    for chosen in ((4, 0, 9), (11,), (), tuple(everywhere)):
        got = scan.summarise_backward(dout, inputs, saved, chosen)
        close(got, of_outputs[list(chosen)])

    for resumed, kept in zip(scan.resume(inputs, states), saved, strict=True):
        assert torch.equal(resumed, kept)
    from_zeros = scan.forward(inputs, torch.zeros_like(states))
    from_nothing = scan.forward(inputs, None)
    assert torch.equal(from_nothing[0], from_zeros[0])
    close(from_nothing[1], ends)
    of_zeros = scan.backward(dout, dfinals, inputs, from_zeros[2])
    of_nothing = scan.backward(dout, dfinals, inputs, from_nothing[2])
    close(of_nothing, of_zeros)


@of_kinds
def test_decays_that_leave_nothing_are_exact(kind):
    # A product of decays over a chunk is far below the smallest number: e ** -5000 and less.
    case = Case(kind, (150,), stronger=1000)
    wanted, inputs = case.wanted(), case.inputs()
    out, finals, _ = case.scan.forward(inputs, case.states)
    close(case.rows(out), wanted[0])
    close(finals, wanted[1])
    grads = torch.autograd.grad([x.sum() for x in inputs if x is not None], case.layer)
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("name", ["gated delta", "kimi"])
def test_small_gradients_of_strong_decays_are_exact(name):
    # A decay of e ** -17 has gradients of about 1e-8 of the others; float32 would lose them.
    case = Case(KINDS[name], (70, 5))
    decays = case.layer[3]
    with torch.no_grad():
        decays.fill_(-17.0)
    (wanted,) = torch.autograd.grad(case.wanted(), decays, (case.dout_rows, case.dfinals))
    inputs = case.inputs()
    alone = tuple(None if x is None else x.detach() for x in inputs)
    _, _, saved = case.scan.forward(alone, case.states.detach())
    grads, _ = case.scan.backward(case.dout, case.dfinals, alone, saved)
    through = [(x, dx) for x, dx in zip(inputs, grads, strict=True) if x is not None]
    (got,) = torch.autograd.grad([x for x, _ in through], decays, [dx for _, dx in through])
    assert 0 < wanted.norm() < 1e-6
    assert (got - wanted).norm() < 1e-6 * wanted.norm()


@with_package
@of_all
def test_a_rank_without_tokens_scans_nothing(kind):
    case = Case(kind, ())
    inputs = case.inputs()
    out, finals, saved = case.scan.forward(inputs, None)
    assert case.rows(out).shape == case.dout_rows.shape
    grads, dstates = case.scan.backward(case.dout, None, inputs, saved)
    assert finals.shape == dstates.shape == (0, *STATE_SHAPE)
    for x, grad in zip(inputs, grads, strict=True):
        assert x is None or grad.shape == x.shape


# ---- as in transformers

TOKENS = 150  # of one sequence


def of_transformers(kind, layer):
    """Their output and final state of one sequence: [tokens, H, V], [H, K, V]."""
    options = KINDS[kind].options
    if kind == "mamba2":
        x, dt, A, B, C, dt_bias = layer
        out, state = modeling_bamba.mamba2_chunk_scan(
            x[None],
            dt[None],
            A,
            B[None],
            C[None],
            chunk_size=64,
            dt_bias=dt_bias,
            return_final_states=True,
            **options,
        )
        return out[0], state[0].transpose(-1, -2)  # theirs is [H, V, K]
    function = modeling_qwen3_next.torch_chunk_gated_delta_rule
    if kind == "kimi":
        function = modeling_kimi_linear.chunk_kimi_delta_attention
    q, k, v, g, beta = (x[None] for x in layer)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": options["l2norm"]}
    out, state = function(q, k, v, g=g, beta=beta, **options)
    return out[0], state[0]


def ours(kind, layer):
    """Our output and final state of one sequence: [tokens, H, V], [H, K, V]."""
    case = Case(KINDS[kind], (TOKENS,))
    case.layer = layer
    out, finals, _ = case.scan.forward(case.inputs(), None)
    return case.rows(out), finals[0]


@pytest.mark.parametrize("kind", KINDS)
def test_scans_are_the_functions_of_transformers_that_they_stand_in_for(kind):
    layer = KINDS[kind].make(TOKENS, torch.Generator().manual_seed(0), 1)
    # They compute in float32 whatever comes.
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        wanted = of_transformers(kind, layer)
    assert wanted[0].dtype == torch.float64
    for got, want in zip(ours(kind, layer), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16):
        lower = tuple(x.to(dtype) for x in layer)
        got = ours(kind, lower)
        assert got[0].dtype == got[1].dtype == torch.float32
        for one, want in zip(got, of_transformers(kind, lower), strict=True):
            # A decay between two tokens is a difference of sums, here of up to some hundred.
            rounding = max(torch.finfo(want.dtype).eps, 32 * torch.finfo(torch.float32).eps)
            far = rounding * want.abs().max().item()
            torch.testing.assert_close(one.to(want.dtype), want, rtol=0, atol=far)


# ---- on ranks


def run_over_three_ranks(kind):
    """The first random run with a kind of recurrent layer and a group of three ranks or more."""
    for number in itertools.count():
        run = draw(number)
        if isinstance(run, AttentionRun) and kind in [one.recurrent for one in run.kinds]:
            groups = [g for micro_batch in run.plan.micro_batches for g in micro_batch.groups]
            if max(group.degree for group in groups) > 2:
                return run


@with_package
@pytest.mark.parametrize("kind", ["gated delta", "kimi delta", "mamba2"])
def test_scans_of_the_package_on_ranks_have_the_gradients_of_one_process(monkeypatch, kind):
    monkeypatch.setattr(layers, "choose_scan", lambda *call: choose.FLA)
    assert run_attention(run_over_three_ranks(kind)) <= MOST_ERROR


# ---- which scan is chosen


@pytest.fixture
def installed(monkeypatch):
    """Makes believe that the package is installed in a version, or is not, beside a Triton, on a
    GPU of some capability."""

    def installed(version, triton="3.7.1", capability=(9, 0)):
        monkeypatch.setattr(util, "find_spec", lambda name: version and object())
        versions = {choose.PACKAGE: version, "triton": triton}
        monkeypatch.setattr(metadata, "version", versions.get)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(choose, "reason_without_triton", lambda: None)
        choose._reason_not_installed.cache_clear()

    yield installed
    choose._reason_not_installed.cache_clear()


HALF = torch.bfloat16
DELTA, KIMI = choose.GATED_DELTA, choose.KIMI_DELTA


@pytest.mark.parametrize(
    ("version", "kind", "device", "dtype", "channels", "reason"),
    [
        ("1.0", DELTA, "cpu", HALF, 128, "CUDA, not on cpu"),
        ("1.0", KIMI, "cuda", torch.float32, 128, "not in float32"),
        ("1.0", DELTA, "cuda", torch.float16, 257, "at most 256 channels, not 257"),
        (None, DELTA, "cuda", HALF, 128, 'not installed; install it with pip install "fla-core>='),
        ("0.5.1", KIMI, "cuda", HALF, 128, "fla-core 0.5.1 is too old"),
        ("0.6.0", KIMI, "cuda", HALF, 256, None),
        ("0.6.0", choose.MAMBA2, "cuda", HALF, 128, None),
        ("1.0", DELTA, "cuda", torch.float16, 128, None),
    ],
)
def test_what_the_package_cannot_do_is_done_in_chunks(
    version, kind, device, dtype, channels, reason, installed
):
    installed(version)
    call = (kind, torch.device(device), dtype, channels)
    if reason is None:
        assert choose.choose_scan(*call) == choose.FLA
        assert choose.explain(*call) == ["fla: chosen", "chunked: not needed"]
    else:
        assert reason in choose.reason_without_fla(*call)
        assert choose.choose_scan(*call) == choose.CHUNKED
        assert choose.explain(*call)[1] == "chunked: chosen"


@pytest.mark.parametrize(
    ("triton", "capability", "is_wrong"),
    [
        ("3.3.1", (9, 0), False),
        ("3.4.0", (9, 0), True),
        ("3.7.0+git1", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.5.0", (8, 0), False),
        ("3.5.0", (10, 0), False),
    ],
)
def test_compilers_with_wrong_gradients_on_hopper_are_named(
    triton, capability, is_wrong, installed
):
    installed("0.6.0", triton, capability)
    call = (DELTA, torch.device("cuda"), HALF, 128)
    assert choose.choose_scan(*call) == (choose.CHUNKED if is_wrong else choose.FLA)
    if is_wrong:
        assert "install Triton 3.7.1 or newer" in choose.reason_without_fla(*call)
