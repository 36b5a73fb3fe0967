"""A scan with flash-linear-attention's functions, for which a stand-in goes token by token."""

import sys
from importlib import metadata, util
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from hf_flexseq.kernels.scans import apply_transition, apply_transposed, choose, fla
from tests.kernels.scans.cases import KINDS
from tests.kernels.scans.test_scans import CPU, Case, close
from tests.recurrent import stepwise

LOADERS = {
    "gated delta": fla.gated_delta_rule,
    "gated delta of grouped keys": fla.gated_delta_rule,
    "kimi": fla.kimi_delta_rule,
}
CUDA = torch.device("cuda")


def stand_in(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    """A function of the package, with the arguments that it has: rows [1, tokens, ...]."""
    assert scale is None
    assert output_final_state
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert q.shape[0] == 1
    assert initial_state.shape[0] == len(cu_seqlens) - 1
    outs, finals = [], []
    for segment, rows in enumerate(pairwise(cu_seqlens)):
        taken = [x[0, slice(*rows)] for x in (q, k, v, g, beta)]
        out, final = stepwise.delta_rule_from(
            initial_state[segment], *taken, l2norm=use_qk_l2norm_in_kernel
        )
        outs.append(out)
        finals.append(final)
    return torch.cat(outs)[None], torch.stack(finals)


@pytest.fixture
def package(monkeypatch):
    """The package, as far as it is called."""
    delta, kda = ModuleType("fla.ops.gated_delta_rule"), ModuleType("fla.ops.kda")
    delta.chunk_gated_delta_rule = stand_in
    kda.chunk_kda = stand_in
    for module in (ModuleType("fla"), ModuleType("fla.ops"), delta, kda):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def case_of(kind, lengths):
    """Inputs, and a scan of the package over them."""
    case = Case(KINDS[kind], lengths)
    return case, fla.FlaScan(lengths, CPU, LOADERS[kind](), l2norm=True)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("kind", LOADERS)
def test_a_scan_of_the_package_is_the_recurrence_token_by_token(kind):
    case, scan = case_of(kind, (5, 1, 9))
    wanted = case.wanted()
    wanted_grads = torch.autograd.grad(
        wanted, (*case.layer, case.states), (case.dout, case.dfinals)
    )
    with torch.no_grad():
        out, finals, saved = scan.forward(case.layer, case.states)
        grads, dstates = scan.backward(case.dout, case.dfinals, case.layer, saved)
    close(out, wanted[0])
    close(finals, wanted[1])
    for got, want in zip((*grads, dstates), wanted_grads, strict=True):
        close(got, want)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("kind", LOADERS)
def test_its_summaries_are_those_of_chunks(kind):
    case, scan = case_of(kind, (5, 1, 9))
    inputs = tuple(x.detach() for x in case.layer)
    with torch.no_grad():
        of_chunks = case.chunk_inputs()
    states = case.states.detach()
    _, _, saved = scan.forward(inputs, states)
    assert scan.resume(inputs, states) == saved
    assert scan.resume(inputs, None) == ()
    _, _, saved_of_chunks = case.scan.forward(of_chunks, states)
    for states_of, transitions_of in (((0, 1, 2), (2, 0)), ((), ()), ((1,), ())):
        got = scan.summarise(inputs, states_of, transitions_of)
        for one, other in zip(
            got, case.scan.summarise(of_chunks, states_of, transitions_of), strict=True
        ):
            close(one, other)
        close(
            scan.summarise_backward(case.dout, inputs, saved, states_of),
            case.scan.summarise_backward(
                case.chunks_of_dout(), of_chunks, saved_of_chunks, states_of
            ),
        )
    # from states of zero, and without gradients behind
    out, finals, nothing = scan.forward(inputs, None)
    close(out, case.grid.rows(case.scan.forward(of_chunks, None)[0]))
    ends, transitions = scan.summarise(inputs, (0, 1, 2), (0, 1, 2))
    close(finals, ends)
    dstates = scan.backward(case.dout, None, inputs, nothing)[1]
    behind = scan.backward(case.dout, case.dfinals, inputs, nothing)[1]
    close(dstates + apply_transposed(transitions, case.dfinals), behind)
    close(apply_transition(transitions, states) + ends, scan.forward(inputs, states)[1])


@pytest.mark.usefixtures("package")
def test_without_tokens_the_package_is_not_called():
    case, scan = case_of("kimi", ())
    out, finals, saved = scan.forward(case.layer, None)
    grads, dstates = scan.backward(case.dout, None, case.layer, saved)
    assert out.shape == case.dout.shape
    assert finals.shape == dstates.shape == case.states.shape
    assert [x.shape for x in grads] == [x.shape for x in case.layer]


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "channels", "reason"),
    [
        (choose.GATED_DELTA, CPU, torch.bfloat16, 128, "CUDA, not on cpu"),
        (choose.MAMBA2, CUDA, torch.bfloat16, 128, "no states before packed"),
        (choose.KIMI_DELTA, CUDA, torch.float32, 128, "not in float32"),
        (choose.GATED_DELTA, CUDA, torch.float16, 512, "at most 256 channels, not 512"),
        (choose.GATED_DELTA, CUDA, torch.bfloat16, 128, 'pip install "fla-core>=0.6"'),
    ],
)
def test_what_the_package_cannot_do_is_done_in_chunks(
    kind, device, dtype, channels, reason, monkeypatch
):
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    choose._reason_not_installed.cache_clear()
    call = (kind, device, dtype, channels)
    assert reason in choose.reason_without_fla(*call)
    assert choose.choose_scan(*call) == choose.CHUNKED
    assert choose.explain(*call)[1] == "chunked: chosen"
    choose._reason_not_installed.cache_clear()


@pytest.mark.parametrize(
    ("version", "chosen"), [("0.5.1", choose.CHUNKED), ("0.6.0", choose.FLA), ("1.0", choose.FLA)]
)
def test_the_package_is_chosen_where_it_is_new_enough(version, chosen, monkeypatch):
    monkeypatch.setattr(util, "find_spec", lambda name: object())
    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setattr(choose, "reason_without_triton", lambda: None)
    choose._reason_not_installed.cache_clear()
    assert choose.choose_scan(choose.KIMI_DELTA, CUDA, torch.bfloat16, 128) == chosen
    choose._reason_not_installed.cache_clear()
