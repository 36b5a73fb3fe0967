"""The chunked loss against the twin that makes all logits, and what it leaves alone."""

import itertools
import json
import logging
import pickle
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.utils.operations import convert_outputs_to_fp32
from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from hf_flexseq.config import IGNORE_INDEX
from hf_flexseq.hf.model.head_trial import try_head
from hf_flexseq.hf.model.loss import NO_LOGITS, attach_chunked_loss
from hf_flexseq.kernels import chunked_loss
from hf_flexseq.kernels.chunked_loss import choose_backend, chunk_rows, chunked_cross_entropy_sum
from tests.ranks import run_ranks

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
needs_torch_loss = pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch >= 2.13"
)
BACKENDS = [chunked_loss.loop_sum, pytest.param(chunked_loss.torch_sum, marks=needs_torch_loss)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64; 0 when both are 0."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def operands(
    tokens: int, vocab: int, dtype: torch.dtype, *, bias: bool = True
) -> list[torch.Tensor]:
    """hidden [tokens, 12], weight [vocab, 12], bias [vocab] or None and targets [tokens], a third
    of them ignored."""
    random = torch.Generator().manual_seed(7)
    hidden, weight = (
        torch.randn(n, 12, generator=random, dtype=torch.float64) for n in (tokens, vocab)
    )
    offset = (
        torch.randn(vocab, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
        if bias
        else None
    )
    targets = torch.randint(vocab, (tokens,), generator=random)
    targets[1::3] = IGNORE_INDEX
    return [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), offset, targets]


def full_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
):
    """The twin: all logits."""
    return F.cross_entropy(
        F.linear(hidden, weight, bias), targets, reduction="sum", ignore_index=IGNORE_INDEX
    )


def loss_and_grads(function, inputs: list[torch.Tensor], scale: float = 0.3) -> list[torch.Tensor]:
    """The loss and the gradient of every input that requires one."""
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    loss = function(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


def in_chunks_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "chunk_rows", lambda *shape: rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("tokens", "vocab"), [(1, 5), (2, 5), (7, 33), (8, 33), (23, 33)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_sum_and_gradients_are_those_of_full_logits(
    backend, bias, tokens, vocab, dtype, tolerance, monkeypatch
):
    in_chunks_of(4, monkeypatch)
    inputs = operands(tokens, vocab, dtype, bias=bias)
    wide = [
        x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x
        for x in inputs
    ]
    for chunked, full in zip(
        loss_and_grads(backend, inputs), loss_and_grads(full_sum, wide), strict=True
    ):
        assert chunked.dtype == dtype
        assert difference(chunked, full) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_summed_in_float32(dtype, monkeypatch):
    in_chunks_of(4, monkeypatch)
    inputs = operands(50, 33, dtype)
    wide = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    loss, *grads = loss_and_grads(chunked_cross_entropy_sum, inputs)
    full_loss, *full_grads = loss_and_grads(full_sum, wide)
    assert loss.dtype == torch.float32
    assert difference(loss, full_loss) < 1e-6
    # A gradient is rounded twice: when it is stored, and when it is scaled.
    assert all(
        difference(a, b) < torch.finfo(dtype).eps for a, b in zip(grads, full_grads, strict=True)
    )
    assert [grad.dtype for grad in grads] == [dtype] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2), (0, 2)])
def test_only_what_requires_a_gradient_gets_one(backend, frozen, monkeypatch):
    in_chunks_of(4, monkeypatch)
    inputs = operands(9, 33, torch.float64)
    for i in frozen:
        inputs[i] = inputs[i].detach()
    for chunked, full in zip(
        loss_and_grads(backend, inputs), loss_and_grads(full_sum, inputs), strict=True
    ):
        assert difference(chunked, full) < 1e-12


def test_mixed_dtypes_raise():
    hidden, weight, bias, targets = operands(5, 33, torch.float32)
    with pytest.raises(ValueError, match="cast one"):
        chunked_cross_entropy_sum(hidden.bfloat16(), weight, bias, targets)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [0, 5])
def test_no_targets_give_zero_loss_and_zero_gradients(backend, tokens):
    inputs = operands(tokens, 33, torch.float64)
    inputs[3][:] = IGNORE_INDEX
    assert all(torch.equal(x, torch.zeros_like(x)) for x in loss_and_grads(backend, inputs))


def test_a_second_backward_raises():
    for backend in (chunked_loss.loop_sum, chunked_cross_entropy_sum):
        loss = backend(*operands(5, 33, torch.float64))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError):
            loss.backward()


def peak_bytes(run, tmp_path: Path) -> int:
    """The most bytes that were allocated at once during `run()`, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    memory = sorted(
        (event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]
    )
    return max(itertools.accumulate(event["args"]["Bytes"] for event in memory))


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_all_tokens_never_exist(backend, tmp_path, monkeypatch):
    tokens, vocab, rows = 512, 700, 16
    in_chunks_of(rows, monkeypatch)
    inputs = operands(tokens, vocab, torch.float32)
    all_logits = tokens * vocab * 4
    gradients = sum(x.numel() * 4 for x in inputs[:3])
    assert peak_bytes(lambda: loss_and_grads(full_sum, inputs), tmp_path) > all_logits
    assert (
        peak_bytes(lambda: loss_and_grads(backend, inputs), tmp_path)
        < 2 * gradients + 4 * rows * vocab * 4
    )
    assert 2 * gradients + 4 * rows * vocab * 4 < all_logits / 2


def test_evaluation_computes_no_gradients(tmp_path, monkeypatch):
    in_chunks_of(4, monkeypatch)
    inputs = operands(8, 4096, torch.bfloat16)
    widened = inputs[1].numel() * 4
    with torch.no_grad():
        assert (
            peak_bytes(lambda: chunked_cross_entropy_sum(*inputs), tmp_path)
            < widened + 3 * 4 * 4096 * 4
        )
        twin = full_sum(*(x.double() for x in inputs[:3]), inputs[3])
        assert difference(chunked_cross_entropy_sum(*inputs), twin) < 1e-6


def test_a_chunk_is_64_mebibytes_or_a_quarter_of_the_weight():
    assert chunk_rows(256, 32_000, 4) == 524
    assert chunk_rows(4096, 128_256, 4) == 1024
    assert chunk_rows(2, 10**9, 4) == 1


def test_the_backend_is_chosen_by_dtype_and_device(monkeypatch):
    wide, narrow = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16)
    assert choose_backend(wide, wide).name == "loop"
    assert choose_backend(narrow, narrow).name == "loop"
    assert "not on cpu" in choose_backend(narrow, narrow).why

    wide_on_cuda = types.SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"))
    has_torch_loss = hasattr(nn, "LinearCrossEntropyOptions")
    expected = "torch" if has_torch_loss else "loop"
    assert choose_backend(wide_on_cuda, wide_on_cuda).name == expected
    monkeypatch.delattr(nn, "LinearCrossEntropyOptions", raising=False)
    assert choose_backend(wide_on_cuda, wide_on_cuda).name == "loop"

    on_cuda = types.SimpleNamespace(
        dtype=torch.bfloat16, device=torch.device("cuda"), requires_grad=True
    )
    monkeypatch.setattr(chunked_loss, "_liger_function", lambda: None)
    assert "not installed" in choose_backend(on_cuda, on_cuda).why
    monkeypatch.setattr(chunked_loss, "_liger_function", lambda: F)
    assert choose_backend(on_cuda, on_cuda).name == "liger"
    on_cuda_frozen = types.SimpleNamespace(**vars(on_cuda) | {"requires_grad": False})
    assert choose_backend(on_cuda_frozen, on_cuda).name == "loop"
    assert choose_backend(on_cuda, on_cuda_frozen).name == "liger"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["loop", "liger"])
def test_16_bits_on_cuda(name):
    if name == "liger":
        pytest.importorskip("liger_kernel")
    inputs = [
        x.detach().cuda().requires_grad_(x.is_floating_point())
        for x in operands(50, 33, torch.bfloat16)
    ]
    wide = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    backend = {"loop": chunked_loss.loop_sum, "liger": chunked_loss.liger_sum}[name]
    for chunked, full in zip(
        loss_and_grads(backend, inputs), loss_and_grads(full_sum, wide), strict=True
    ):
        assert difference(chunked, full) < 2e-2


# ---- on models


def make_model(name: str = "Llama", dtype: torch.dtype = torch.float64, **config) -> nn.Module:
    """`<name>ForCausalLM`, two layers, the same weights on every call."""
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**SMALL | config)
    return getattr(transformers, f"{name}ForCausalLM")(settings).to(dtype)


def make_batch(length: int = 11, rows: int = 1) -> dict[str, torch.Tensor]:
    """input_ids, labels and shift_labels [rows, length], the latter two alike."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 61, (rows, length + 1), generator=random)
    labels = tokens[:, 1:].clone()
    labels[:, ::4] = IGNORE_INDEX
    return {"input_ids": tokens[:, :-1], "labels": labels, "shift_labels": labels}


def full_loss(model: nn.Module, batch: dict[str, torch.Tensor], items=None) -> torch.Tensor:
    """The twin: the loss from the logits of a call without labels."""
    logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
    targets = batch["shift_labels"].flatten()
    total = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)
    return total / ((targets != IGNORE_INDEX).sum() if items is None else items)


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    ours: dict[str, torch.Tensor], twin: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert ours.keys() == twin.keys()
    largest = max(float(grad.norm()) for grad in twin.values())
    for name in twin:
        scale = max(float(twin[name].norm()), 1e-3 * largest)
        assert float((ours[name] - twin[name]).norm()) <= tolerance * scale, name


def assert_chunked_equals_full(
    model: nn.Module, batch: dict[str, torch.Tensor], tolerance: float = 1e-12
) -> None:
    for items in (None, 29, torch.tensor(29)):
        outputs = model(**batch, num_items_in_batch=items)
        twin = full_loss(model, batch, items)
        assert outputs.logits is NO_LOGITS
        assert difference(outputs.loss, twin) < tolerance
        assert_same_gradients(gradients(model, outputs.loss), gradients(model, twin), tolerance)


# float64 has no grouped matrix product.
MIXTURE = {
    "experts_implementation": "eager",
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}
SUITABLE = ["Llama", "Qwen2", "Qwen3", "Mistral", "Olmo2", "Phi3", "Gemma", "SmolLM3", "GPTNeoX"]


@pytest.mark.parametrize("name", SUITABLE)
def test_suitable_models(name):
    extra = {"head_dim": 8} if name in ("Qwen3", "Gemma") else {}
    model = make_model(name, **extra)
    assert attach_chunked_loss(model) is not None
    assert_chunked_equals_full(model, make_batch())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_a_router_loss_is_added_to_ours(name):
    model, batch = make_model(name, **MIXTURE), make_batch()
    attach_chunked_loss(model)
    assert_chunked_equals_full(model, batch)
    outputs = model(**batch, output_router_logits=True)
    twin = full_loss(model, batch) + model.router_aux_loss_coef * outputs.aux_loss.detach()
    assert outputs.aux_loss > 0
    assert difference(outputs.loss, twin) < 1e-12


@pytest.mark.parametrize("name", ["Gemma2", "Granite", "Cohere"])
def test_models_that_change_their_logits_keep_their_loss(name, caplog):
    model, batch = make_model(name, eos_token_id=1), make_batch()
    before, keys = model(**batch).loss, set(vars(model))
    with caplog.at_level(logging.INFO):
        assert attach_chunked_loss(model) is None
    assert len(caplog.records) == 1
    assert "more with the logits" in caplog.text
    outputs = model(**batch)
    assert torch.equal(outputs.loss, before)
    assert outputs.logits.shape == (1, 11, 61)
    assert set(vars(model)) == keys


def own_loss(model: nn.Module) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()


def low_rank_head(model: nn.Module) -> None:
    get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=2))


def saved_head(model: nn.Module) -> None:
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2))


def own_forward(model: nn.Module) -> None:
    plain = model.forward
    model.forward = types.MethodType(lambda self, *args, **kwargs: plain(*args, **kwargs), model)


def hooked_head(model: nn.Module) -> None:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden)


def no_head(model: nn.Module) -> None:
    model.lm_head = nn.Identity()


def split_head(model: nn.Module) -> None:
    model._tp_size = 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (own_loss, "its loss is <lambda>"),
        (low_rank_head, "expected a plain nn.Linear"),
        (saved_head, "expected a plain nn.Linear"),
        (no_head, "expected a plain nn.Linear"),
        (hooked_head, "replaced forward"),
        (own_forward, "forward has been replaced"),
        (split_head, "tensor parallelism"),
    ],
)
def test_changed_models_keep_their_loss(change, reason, caplog):
    model = make_model()
    change(model)
    with caplog.at_level(logging.INFO):
        assert attach_chunked_loss(model) is None
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_a_forward_wrapped_by_accelerate_is_looked_through():
    model, batch = make_model(), make_batch()
    model._original_forward, model.forward = model.forward, convert_outputs_to_fp32(model.forward)
    assert attach_chunked_loss(model) is not None
    assert model(**batch).logits is NO_LOGITS
    assert difference(model(**batch).loss, full_loss(make_model(), batch)) < 1e-6


class Llama(transformers.LlamaForCausalLM):
    """A model whose parts can be changed one by one."""

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        logits = self.logits_of(hidden)
        loss = None if labels is None else self.loss_of(logits, labels, **kwargs)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    def logits_of(self, hidden):
        return self.lm_head(hidden)

    def loss_of(self, logits, labels, **kwargs):
        return self.loss_function(logits=logits, labels=labels, vocab_size=61, **kwargs)


class InPlace(Llama):
    def logits_of(self, hidden):
        return self.lm_head(hidden).mul_(2)


class Wide(Llama):
    def logits_of(self, hidden):
        return self.lm_head(hidden).float()


class Scaled(Llama):
    def logits_of(self, hidden):
        return self.lm_head(hidden) / 2


class HeadTwice(Llama):
    def logits_of(self, hidden):
        return self.lm_head(hidden + self.lm_head(hidden).sum())


class Forgetful(Llama):
    def loss_of(self, logits, labels, num_items_in_batch=None, **kwargs):
        return super().loss_of(logits, labels, **kwargs)


class Unshifted(Llama):
    def loss_of(self, logits, labels, shift_labels=None, **kwargs):
        return super().loss_of(logits, labels, **kwargs)


class Relabelling(Llama):
    def loss_of(self, logits, labels, **kwargs):
        return super().loss_of(logits, labels.flip(1), **kwargs)


class LogitsInLoss(Llama):
    def loss_of(self, logits, labels, **kwargs):
        return super().loss_of(logits, labels, **kwargs) + logits.logsumexp(-1).mean()


class SecondLoss(Llama):
    def loss_of(self, logits, labels, **kwargs):
        other = F.cross_entropy(self.model.embed_tokens.weight, labels[0, :1].expand(61))
        return super().loss_of(logits, labels, **kwargs) + other


class LossTwice(Llama):
    def loss_of(self, logits, labels, **kwargs):
        return 2 * super().loss_of(logits, labels, **kwargs) - super().loss_of(
            logits, labels, **kwargs
        )


class LossOfItsOwn(Llama):
    def loss_of(self, logits, labels, **kwargs):
        return nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten())


class NeedsNumbers(Llama):
    def loss_of(self, logits, labels, **kwargs):
        return super().loss_of(logits, labels, **kwargs) * labels.max().item()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (InPlace, r"more with the logits than to pass them on \(mul_\)"),
        (Wide, "more with the logits"),
        (Scaled, "more with the logits"),
        (HeadTwice, "calls its lm_head 2 times"),
        (Forgetful, "does not give num_items_in_batch"),
        (Unshifted, "does not give shift_labels"),
        (Relabelling, "changes the labels"),
        (LogitsInLoss, r"more with the logits than to pass them on \(logsumexp\)"),
        (SecondLoss, "loss_function just once"),
        (LossTwice, "loss_function just once"),
        (LossOfItsOwn, "loss_function just once"),
        (NeedsNumbers, "could not be tried with labels"),
    ],
)
def test_forwards_that_would_be_computed_wrongly_are_refused(cls, reason):
    model = cls(transformers.LlamaConfig(**SMALL))
    assert attach_chunked_loss(model) is None
    assert re.search(reason, try_head(model).reason)


def test_a_forward_that_passes_its_logits_on_is_not():
    model, batch = Llama(transformers.LlamaConfig(**SMALL)).double(), make_batch()
    assert try_head(model).head == "lm_head"
    assert attach_chunked_loss(model) is not None
    assert_chunked_equals_full(model, batch)


def test_something_else_than_a_transformers_model_is_refused():
    assert attach_chunked_loss(nn.Linear(2, 2)) is None


def test_labels_alone_are_shifted():
    model, batch = make_model(), make_batch(rows=2)
    attach_chunked_loss(model)
    shifted = F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
    twin = full_loss(model, batch | {"shift_labels": shifted})
    assert (
        difference(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss, twin) < 1e-12
    )
    positional = model(batch["input_ids"], None, None, None, None, batch["labels"])
    assert positional.logits is NO_LOGITS
    assert difference(positional.loss, twin) < 1e-12


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0), 29])
def test_a_batch_without_targets_has_zero_loss_and_zero_gradients(items):
    model, batch = make_model(), make_batch(length=1)
    attach_chunked_loss(model)
    batch["shift_labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
    outputs = model(**batch, num_items_in_batch=items)
    assert outputs.loss == 0
    grads = gradients(model, outputs.loss)
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all(grad.count_nonzero() == 0 for grad in grads.values())


@pytest.mark.parametrize("settings", [{"tie_word_embeddings": True}, {"attention_dropout": 0.0}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tied_embeddings_and_activation_checkpointing(settings, checkpointing):
    model = make_model(**settings).train()
    attach_chunked_loss(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_chunked_equals_full(model, make_batch(rows=2))


def test_without_gradients():
    model, batch = make_model().eval(), make_batch()
    attach_chunked_loss(model)
    with torch.no_grad():
        outputs = model(**batch)
    assert not outputs.loss.requires_grad
    assert difference(outputs.loss, full_loss(model, batch)) < 1e-12


def test_under_autocast_only_the_operands_are_rounded():
    model, seen = make_model(dtype=torch.float32), []
    attach_chunked_loss(model)
    model.lm_head.register_forward_pre_hook(
        lambda module, args: seen.append(args[0]) or args[0].retain_grad()
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**make_batch()).loss
    loss.backward()
    hidden, weight = (
        x.detach().bfloat16().requires_grad_() for x in (seen[0], model.lm_head.weight)
    )
    targets = make_batch()["labels"].flatten()
    twin = (
        chunked_cross_entropy_sum(hidden.flatten(0, 1), weight, None, targets)
        / (targets != IGNORE_INDEX).sum()
    )
    twin.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, twin)
    assert torch.equal(seen[0].grad, hidden.grad)
    assert torch.equal(model.lm_head.weight.grad, weight.grad.float())


def test_calls_without_labels_and_disabled_ones_run_as_before():
    model, batch = make_model(), make_batch()
    inputs = {"input_ids": batch["input_ids"]}
    plain, with_loss = model(**inputs).logits, model(**batch)
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    handle = attach_chunked_loss(model)
    assert torch.equal(model(**inputs).logits, plain)
    assert torch.equal(model.generate(**inputs, max_new_tokens=3, do_sample=False), generated)
    with handle.disabled():
        outputs = model(**batch)
    assert torch.equal(outputs.logits, plain)
    assert torch.equal(outputs.loss, with_loss.loss)
    assert model(**batch).logits is NO_LOGITS
    # Another ignore_index is left to the model as well.
    labels = batch["labels"].masked_fill(batch["labels"] == IGNORE_INDEX, 0)
    outputs = model(**inputs, labels=labels, shift_labels=labels, ignore_index=0)
    assert outputs.logits is not NO_LOGITS
    assert difference(outputs.loss, with_loss.loss) < 1e-6


def test_tuples_keep_their_places():
    model, batch = make_model(), make_batch()
    loss, _, cache = model(**batch, return_dict=False, use_cache=True)
    attach_chunked_loss(model)
    ours = model(**batch, return_dict=False, use_cache=True)
    assert difference(ours[0], loss) < 1e-6  # transformers' own loss is in float32
    assert ours[1] is NO_LOGITS
    assert type(ours[2]) is type(cache)
    assert list(model(**batch, use_cache=True)) == ["loss", "logits", "past_key_values"]


def test_an_exception_leaves_no_labels_behind():
    model, batch = make_model(), make_batch()
    attach_chunked_loss(model)
    hidden = torch.zeros(1, 11, 16, dtype=torch.float64)
    hook = model.model.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    hook.remove()
    assert model.lm_head(hidden).shape == (1, 11, 61)
    with pytest.raises(ValueError, match="11 hidden states but 10 labels"):
        model(batch["input_ids"], labels=batch["labels"][:, 1:])
    assert model.lm_head(hidden).shape == (1, 11, 61)


def test_attaching_twice_gives_the_same_handle_and_detaching_restores():
    model, batch = make_model(), make_batch()
    before = [set(vars(module)) for module in model.modules()]
    pickled, loss = pickle.dumps(model), model(**batch).loss
    handle = attach_chunked_loss(model)
    assert attach_chunked_loss(model) is handle
    handle.detach()
    handle.detach()
    assert [set(vars(module)) for module in model.modules()] == before
    assert len(pickle.dumps(model)) == len(pickled)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch).loss, loss)
    assert attach_chunked_loss(model) not in (None, handle)


def test_a_loss_function_set_by_hand_comes_back():
    model = make_model()
    model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
    attach_chunked_loss(model).detach()
    assert vars(model)["_loss_function"] is transformers.loss.loss_utils.ForCausalLMLoss


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_low_rank_adapters_train_and_a_frozen_head_gets_no_gradient(task):
    model, batch = make_model(), make_batch()
    config = LoraConfig(task_type=task, target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = get_peft_model(model, config).double()
    attach_chunked_loss(adapted)
    assert_chunked_equals_full(adapted, batch)
    assert model.lm_head.weight.grad is None


def test_adapters_that_call_the_model_their_own_way():
    # AdaLoRA calls the model's forward past its hooks; prompt tuning lengthens inputs and labels.
    config = AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9)
    adaptive, batch = get_peft_model(make_model(), config).double(), make_batch()
    handle = attach_chunked_loss(adaptive)
    ours = adaptive(**batch)
    with handle.disabled():
        own = adaptive(**batch)
    assert ours.logits is NO_LOGITS
    assert difference(ours.loss, own.loss) < 1e-6  # transformers' own loss is in float32
    prompted = get_peft_model(
        make_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).double()
    handle, batch = (
        attach_chunked_loss(prompted),
        {"input_ids": batch["input_ids"], "labels": batch["labels"]},
    )
    ours = prompted(**batch)
    with handle.disabled():
        own = prompted(**batch)
    assert ours.logits is NO_LOGITS
    assert own.logits.shape == (1, 14, 61)
    assert difference(ours.loss, own.loss) < 1e-6


# ---- on two ranks


def sharded_gradients(
    rank: int, world_size: int, policy: MixedPrecisionPolicy
) -> dict[str, np.ndarray]:
    """Of the ranks' batches over 29 items: in the units that accelerate makes, or with a policy
    for the head alone."""
    mesh = init_device_mesh("cpu", (world_size,))
    model, shared = make_model(), policy == MixedPrecisionPolicy()
    if shared:
        assert attach_chunked_loss(model) is not None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(
        [model.model.norm, model.lm_head] if shared else model.lm_head, mesh=mesh, mp_policy=policy
    )
    fully_shard(model, mesh=mesh)
    # the classes of model and head are other ones by now
    assert attach_chunked_loss(model) is not None
    batch = make_batch(length=5 + 3 * rank)
    outputs = model(**batch, num_items_in_batch=29)
    assert outputs.logits is NO_LOGITS
    assert difference(outputs.loss, full_loss(make_model(), batch, 29)) < 1e-12
    (outputs.loss * world_size).backward()
    return {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


def replicated_gradients(rank: int, world_size: int) -> dict[str, np.ndarray]:
    model = make_model()
    attach_chunked_loss(model)
    replica = DistributedDataParallel(model)
    loss = replica(**make_batch(length=5 + 3 * rank), num_items_in_batch=29).loss
    return {name: grad.numpy() for name, grad in gradients(model, loss * world_size).items()}


def assert_ranks_agree_with_one_process(function, *args) -> None:
    model = make_model()
    twin = gradients(
        model, sum(full_loss(model, make_batch(length=5 + 3 * rank), 29) for rank in range(2))
    )
    for grads in run_ranks(function, 2, *args):
        assert_same_gradients(
            {name: torch.from_numpy(grad) for name, grad in grads.items()}, twin, 1e-12
        )


@pytest.mark.processes
def test_sharded_by_fsdp2():
    assert_ranks_agree_with_one_process(sharded_gradients, MixedPrecisionPolicy())


@pytest.mark.processes
def test_an_output_cast_of_fsdp2_does_not_round_the_gradients():
    # 1/29 in bfloat16 is 0.3 % off, and would be so in every gradient.
    assert_ranks_agree_with_one_process(
        sharded_gradients, MixedPrecisionPolicy(output_dtype=torch.bfloat16)
    )


@pytest.mark.processes
def test_replicated_by_ddp():
    assert_ranks_agree_with_one_process(replicated_gradients)
