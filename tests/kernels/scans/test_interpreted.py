"""The kernels of flash-linear-attention themselves, through `FlaScan`, under Triton's interpreter
on a CPU, against the recurrence token by token in float64.

    pip install "fla-core>=0.6" && pytest -m kernels tests/kernels/scans

The interpreter runs kernels as they are written, and says nothing of registers, shared memory,
races between warps, or Triton's compiler; tests/kernels/interpreter.py says what else it lacks.
transformers takes the package for its own scans where it is installed, so that the other tests run
without it.
"""

import builtins
import importlib

import pytest
import torch

from tests.attention.recurrent import stepwise
from tests.kernels.interpreter import error, first_configurations, real_bfloat16
from tests.kernels.scans.cases import OF_PACKAGE, Case

pytestmark = pytest.mark.kernels

LENGTHS = (40, 1, 89)
# relative error of any result; bfloat16 has 8 times the rounding error of float16
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Index(int):
    """A loop variable: compiled kernels have tensors, on which they call `to`."""

    def to(self, dtype):
        return self


def interpreted_range(*bounds):
    numbers = [one.handle.data.item() if hasattr(one, "handle") else one for one in bounds]
    return (Index(number) for number in builtins.range(*numbers))


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    pytest.importorskip("fla", reason='needs pip install "fla-core>=0.6"')
    with pytest.MonkeyPatch.context() as patch:
        first_configurations(patch)
        real_bfloat16(patch)
        for name in ("chunk_h", "chunk_delta_h", "chunk_o"):
            module = importlib.import_module(f"fla.ops.common.{name}")
            patch.setattr(module, "range", interpreted_range, raising=False)
        yield


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items(), ids=str)
@pytest.mark.parametrize("kind", OF_PACKAGE.values(), ids=OF_PACKAGE)
def test_the_package_s_kernels_are_the_recurrence(kind, dtype, bound):
    case = Case(kind, LENGTHS)
    exact = [x.detach().requires_grad_() for x in case.inputs()]
    states = case.states.detach().requires_grad_()
    out, finals = stepwise_rows(kind, exact, states)
    wanted = torch.autograd.grad((out, finals), [*exact, states], (case.dout_rows, case.dfinals))

    # decays and states stay in float32, as in a layer
    inputs = tuple(x.detach().to(torch.float32 if i == 3 else dtype) for i, x in enumerate(exact))
    given = states.detach().float()
    got_out, got_finals, saved = case.scan.forward(inputs, given)
    grads, dstates = case.scan.backward(
        case.dout_rows.to(dtype), case.dfinals.float(), inputs, saved
    )
    for got, want in zip(
        (got_out, got_finals, *grads, dstates), (out, finals, *wanted), strict=True
    ):
        assert error(got, want.detach()) < bound

    ends, transitions = case.scan.summarise(inputs, range(3), range(3))
    decayed = transitions
    if transitions.dim() == 2:
        decayed = transitions[..., None, None] * torch.eye(states.shape[2])
    assert error(decayed @ given + ends, finals.detach()) < bound


def stepwise_rows(kind, rows, states):
    """The recurrence on the rows that the kernels take."""
    outs, finals = [], []
    for state, *taken in zip(states, *(x.split(LENGTHS) for x in rows), strict=True):
        if len(taken) == 4:
            out, final = stepwise.gated_linear_from(state, *taken)
        else:
            out, final = stepwise.delta_rule_from(state, *taken, l2norm=True)
        outs.append(out)
        finals.append(final)
    return torch.cat(outs), torch.stack(finals)
