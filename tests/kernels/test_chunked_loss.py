"""Head and cross-entropy in chunks against a reference that makes all logits."""

import itertools
import json
import types

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.kernels import chunked_loss, token_outputs
from hf_flexseq.kernels.chunked_loss import chunked_cross_entropy_sum, reason_without_liger
from hf_flexseq.kernels.token_outputs import chunk_rows
from tests.kernels import interpreter


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64; 0 when both are 0."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def operands(tokens, vocab, dtype, *, bias=True):
    """hidden [tokens, 12], weight [vocab, 12], bias [vocab] or None and targets [tokens], a third
    of them ignored."""
    random = torch.Generator().manual_seed(7)
    found = []
    for shape in ((tokens, 12), (vocab, 12), (vocab,)):
        values = torch.randn(shape, generator=random, dtype=torch.float64)
        found.append(values.to(dtype).requires_grad_())
    targets = torch.randint(vocab, (tokens,), generator=random)
    targets[1::3] = IGNORE_INDEX
    return [*found[:2], found[2] if bias else None, targets]


def wide(inputs):
    """The same operands in float64."""
    return [
        x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in inputs
    ]


def full_sum(hidden, weight, bias, targets):
    """The reference: all logits."""
    logits = F.linear(hidden, weight, bias)
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)


def loss_and_grads(function, inputs):
    """The loss and the gradient of every input that requires one."""
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    loss = function(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss * 0.3, leaves)]


def apart(backend, inputs, twins):
    """How far the loss and each gradient are from those of all logits, of the inputs `twins`."""
    pairs = zip(loss_and_grads(backend, inputs), loss_and_grads(full_sum, twins), strict=True)
    return [difference(chunked, full) for chunked, full in pairs]


@pytest.fixture
def four_rows(monkeypatch):
    """Chunks of four rows."""
    monkeypatch.setattr(token_outputs, "chunk_rows", lambda *shape: 4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_sum_and_gradients_are_those_of_full_logits(bias, dtype, tolerance, four_rows):
    for tokens, vocab in ((1, 5), (2, 5), (7, 33), (8, 33), (23, 33)):
        inputs = operands(tokens, vocab, dtype, bias=bias)
        assert {x.dtype for x in loss_and_grads(chunked_cross_entropy_sum, inputs)} == {dtype}
        assert max(apart(chunked_cross_entropy_sum, inputs, wide(inputs))) < tolerance


@pytest.mark.parametrize("counted", [False, True])
def test_labels_are_smoothed_as_by_torch(counted, four_rows):
    inputs = operands(23, 33, torch.float64)
    counts = torch.arange(23.0, dtype=torch.float64) % 4 if counted else None

    def smoothed(*given):
        return chunked_cross_entropy_sum(*given, counts, smoothing=0.3)

    def of_all_logits(hidden, weight, bias, targets):
        logits = F.linear(hidden, weight, bias)
        options = {"ignore_index": IGNORE_INDEX, "label_smoothing": 0.3}
        losses = F.cross_entropy(logits, targets, reduction="none", **options)
        return (losses if counts is None else losses * counts).sum()

    found, wanted = (loss_and_grads(f, inputs) for f in (smoothed, of_all_logits))
    assert max(map(difference, found, wanted)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_summed_in_float32(dtype, four_rows):
    inputs = operands(50, 33, dtype)
    loss, *grads = loss_and_grads(chunked_cross_entropy_sum, inputs)
    assert loss.dtype == torch.float32
    assert [grad.dtype for grad in grads] == [dtype] * 3
    of_loss, *of_grads = apart(chunked_cross_entropy_sum, inputs, wide(inputs))
    assert of_loss < 1e-6
    # a gradient is rounded twice: when it is stored, and when it is scaled
    assert max(of_grads) < torch.finfo(dtype).eps


def test_only_what_requires_a_gradient_gets_one(four_rows):
    for frozen in ((0,), (1,), (1, 2), (0, 2)):
        inputs = operands(9, 33, torch.float64)
        for i in frozen:
            inputs[i] = inputs[i].detach()
        assert max(apart(chunked_cross_entropy_sum, inputs, inputs)) < 1e-12


def test_mixed_dtypes_raise():
    hidden, weight, bias, targets = operands(5, 33, torch.float32)
    with pytest.raises(ValueError, match="cast one"):
        chunked_cross_entropy_sum(hidden.bfloat16(), weight, bias, targets)


def test_no_targets_give_zero_loss_and_zero_gradients():
    for tokens in (0, 5):
        inputs = operands(tokens, 33, torch.float64)
        inputs[3][:] = IGNORE_INDEX
        assert all(not x.any() for x in loss_and_grads(chunked_cross_entropy_sum, inputs))


def peak_bytes(run, folder):
    """The most bytes that were allocated at once during `run()`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    return max(itertools.accumulate(event["args"]["Bytes"] for event in memory))


def test_logits_of_all_tokens_never_exist(tmp_path, four_rows):
    tokens, vocab = 512, 700
    inputs = operands(tokens, vocab, torch.float32)
    all_logits = tokens * vocab * 4
    enough = 2 * sum(x.numel() * 4 for x in inputs[:3]) + 4 * 4 * vocab * 4
    assert enough < all_logits / 2
    assert peak_bytes(lambda: loss_and_grads(full_sum, inputs), tmp_path) > all_logits
    assert peak_bytes(lambda: loss_and_grads(chunked_cross_entropy_sum, inputs), tmp_path) < enough


def test_evaluation_computes_no_gradients(tmp_path, four_rows):
    inputs = operands(8, 4096, torch.bfloat16)
    enough = inputs[1].numel() * 4 + 3 * 4 * 4096 * 4  # the widened weight, and three chunks
    with torch.no_grad():
        assert peak_bytes(lambda: chunked_cross_entropy_sum(*inputs), tmp_path) < enough
        found = chunked_cross_entropy_sum(*inputs)
        assert difference(found, full_sum(*wide(inputs))) < 1e-6


def test_a_chunk_is_64_mebibytes_or_a_quarter_of_the_weight():
    assert chunk_rows(256, 32_000, 4) == 524
    assert chunk_rows(4096, 128_256, 4) == 1024
    assert chunk_rows(2, 10**9, 4) == 1


def test_liger_serves_16_bits_on_cuda(monkeypatch):
    def operand(dtype=torch.bfloat16, device="cuda", requires_grad=True):
        return types.SimpleNamespace(
            dtype=dtype, device=torch.device(device), requires_grad=requires_grad
        )

    def reason(hidden, weight=None):
        return reason_without_liger(hidden, weight or hidden)

    assert "not for torch.float32" in reason(operand(torch.float32))
    assert "not on cpu" in reason(operand(device="cpu"))
    narrow, frozen = operand(), operand(requires_grad=False)
    monkeypatch.setattr(chunked_loss, "_liger_function", lambda: None)
    assert "not installed" in reason(narrow)
    monkeypatch.setattr(chunked_loss, "_liger_function", lambda: F)
    assert reason(narrow) is None
    assert "drops" in reason(frozen, narrow)
    assert reason(narrow, frozen) is None


@pytest.mark.kernels
@pytest.mark.parametrize("bias", [True, False])
def test_liger_s_kernels_under_tritons_interpreter(bias, monkeypatch):
    pytest.importorskip("liger_kernel", reason='needs pip install "liger-kernel>=0.6.2"')
    interpreter.liger(monkeypatch)
    inputs = operands(20, 61, torch.float32, bias=bias)
    assert max(apart(chunked_loss.liger_sum, inputs, wide(inputs))) < 2e-6
    inputs = operands(20, 61, torch.bfloat16, bias=bias)
    errors = apart(chunked_loss.liger_sum, inputs, wide(inputs))
    plain = apart(full_sum, inputs, wide(inputs))
    assert all(error <= 1.3 * bound for error, bound in zip(errors, plain, strict=True))
