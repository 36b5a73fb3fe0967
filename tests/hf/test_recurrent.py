"""The functions that recurrent layers call are replaced once, and only for calls with `seq_ctx`;
models whose recurrent layers cannot be computed are refused by name."""

import types
from unittest import mock

import pytest
import torch
from transformers.models.bamba import modeling_bamba
from transformers.models.bamba.modeling_bamba import causal_conv1d_fn, mamba2_chunk_scan
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_flexseq.attention import SequenceContext
from hf_flexseq.hf.model import trial
from hf_flexseq.hf.model.attachments import on_micro_batches
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import model_shape
from hf_flexseq.hf.model.recurrent import attach_recurrent, without_dispatcher
from hf_flexseq.hf.model.rehearsal import code_of_model
from hf_flexseq.kernels.choose import choose_kernel
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_checks import fresh_accelerate, make_trainer, meta_model  # noqa: F401
from tests.hf.tiny import refused
from tests.plans import shards_of
from tests.ranks import join, run_threads

CPU = torch.device("cpu")


# ---- attaching


def test_functions_are_replaced_once(monkeypatch):
    """So the trial finds the same model whenever it is attached."""
    tried = mock.Mock(wraps=trial._run)
    monkeypatch.setattr(trial, "_run", tried)
    function = modeling_qwen3_next.torch_chunk_gated_delta_rule
    monkeypatch.setattr(
        modeling_qwen3_next, "torch_chunk_gated_delta_rule", without_dispatcher(function)
    )
    model = make_hybrid("Qwen3Next", vocab_size=67)
    check_model(model)
    replaced = modeling_qwen3_next.torch_chunk_gated_delta_rule
    assert without_dispatcher(replaced) is without_dispatcher(function)
    assert replaced is not without_dispatcher(function)
    for _ in range(2):
        with on_micro_batches(model):
            assert modeling_qwen3_next.torch_chunk_gated_delta_rule is replaced
    assert tried.call_count == 1


def test_a_function_of_the_users_is_found_behind_its_dispatcher(monkeypatch):
    def own(*args, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", own)
    model = make_hybrid("Qwen3Next")
    attach_recurrent(model)
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is not own
    assert code_of_model(model) == ["torch_chunk_gated_delta_rule"]


def test_calls_without_a_context_are_those_of_transformers(monkeypatch):
    model = make_hybrid("Bamba")
    tokens = torch.randint(1, 61, (2, 70))
    with monkeypatch.context() as patch:
        for name, function in list(vars(modeling_bamba).items()):
            patch.setattr(modeling_bamba, name, without_dispatcher(function))
        before = model(tokens, use_cache=True)
    attach_recurrent(model)
    after = model(tokens, use_cache=True)
    generated = model.eval().generate(tokens[:1, :5], max_new_tokens=3, do_sample=False)
    assert torch.equal(before.logits, after.logits)
    assert generated.shape == (1, 8)


# ---- what is computed


def in_context(family, compute, tokens, autocast=False):
    """What `compute(seq_ctx)` returns on one rank that holds sequences of these lengths, where a
    model of this family is attached."""

    def run(rank, world_size):
        (shard,) = shards_of("local", 1, tokens)
        context = SequenceContext(shard, join(), choose_kernel(CPU, torch.float32, 8), CPU)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return compute(context)

    attach_recurrent(make_hybrid(family))
    (out,) = run_threads(run, 1)
    return out


@pytest.mark.parametrize(
    ("dtype", "autocast", "activation"),
    [
        (torch.float32, False, "silu"),
        (torch.float32, True, None),
        (torch.bfloat16, False, None),
        (torch.bfloat16, True, "silu"),
    ],
)
def test_a_convolution_has_the_layout_the_activation_and_the_dtypes_of_transformers(
    dtype, autocast, activation
):
    x = torch.randn(1, 9, 6).transpose(1, 2).to(dtype)  # [1, channels, tokens], from rows
    weight, bias = torch.randn(6, 4), torch.randn(6)

    def convolve(x, **context):
        return modeling_bamba.causal_conv1d_fn(x, weight, bias, activation=activation, **context)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        wanted = torch.cat([convolve(part) for part in x.split([4, 5], dim=-1)], dim=-1)
    found = in_context(
        "Bamba", lambda seq_ctx: convolve(x, seq_ctx=seq_ctx, use_cache=False), (4, 5), autocast
    )
    assert found.dtype == wanted.dtype == dtype
    assert found.shape == wanted.shape
    tolerance = 2e-2 if autocast or dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_scans_are_in_float32_under_autocast():
    q, k = torch.randn(2, 1, 70, 2, 8).bfloat16()
    v = torch.randn(1, 70, 4, 6).bfloat16()
    g, beta = -0.1 * torch.rand(1, 70, 4), torch.rand(1, 70, 4)

    def scan(q, k, v, **context):
        scanned = modeling_qwen3_next.torch_chunk_gated_delta_rule
        return scanned(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **context)

    wanted, _ = scan(q.float(), k.float(), v.float())
    found, state = in_context(
        "Qwen3Next",
        lambda seq_ctx: scan(q, k, v, initial_state=None, seq_ctx=seq_ctx),
        (70,),
        autocast=True,
    )
    assert state is None
    assert found.dtype == torch.bfloat16
    error = (found.float() - wanted).norm() / wanted.norm()
    assert error < 3e-3  # one rounding


# ---- kinds, and what is refused


KNOWN = "hf_flexseq knows full, .*the recurrent layers Gated DeltaNet, .* short convolutions"
MAMBA_1 = {"mamba_d_state": 4, "mamba_dt_rank": 2}
NO_HEADS = {"attention_hidden_size": 32, "num_attention_heads": None}


@pytest.mark.parametrize(
    "name, config, message",
    [
        ("Jamba", MAMBA_1, f"kinds linear_attention, in a form that is not known; {KNOWN}"),
        ("Mamba", {}, f"kinds linear_attention, .*{KNOWN}"),
        ("MiniMax", {"layer_types": ["linear_attention"] * 2}, KNOWN),
        pytest.param(
            "Zamba",
            {"num_hidden_layers": 76, "mamba_d_state": 4},
            f"kinds hybrid, .*{KNOWN}",
            marks=pytest.mark.slow,
        ),
        ("Rwkv", NO_HEADS, f"has no num_attention_heads; {KNOWN}"),
        ("Mamba2", {"num_heads": 8, "head_dim": 8}, "Mamba2Mixer of layer 0 is not given the key"),
        (
            "Bamba",
            HYBRIDS["Bamba"] | {"z_loss_coefficient": 1e-4},
            "z_loss_coefficient=0.0001: .* set config.z_loss_coefficient=0.0",
        ),
    ],
)
def test_models_whose_recurrent_layers_are_refused(name, config, message):
    with refused(f"{name}ForCausalLM: .*{message}"):
        check_model(meta_model(name, **config))


MIXER = modeling_bamba.BambaMixer


def with_a_wider_convolution(self, config, layer_idx, original=MIXER.__init__):
    original(self, config, layer_idx)
    self.conv1d = torch.nn.Conv1d(96, 96, kernel_size=6, groups=96, padding=5)


def test_sizes_of_recurrent_layers_are_those_of_their_calls(monkeypatch):
    monkeypatch.setattr(MIXER, "__init__", with_a_wider_convolution)
    model = meta_model("Bamba", **HYBRIDS["Bamba"])
    check_model(model)
    ((layers, shape),) = model_shape(model).recurrent
    assert (layers, shape.kind, shape.width, shape.channels) == (1, "mamba2", 6, 96)


def test_a_model_with_unknown_recurrent_layers_has_no_cost():
    with refused("kinds linear_attention, in a form that is not known"):
        model_shape(meta_model("Mamba"))


def hides_its_functions(self, hidden_states, **kwargs):
    return hidden_states


def hides_its_context(self, hidden_states, **kwargs):
    causal_conv1d_fn(hidden_states.mT, self.conv1d.weight.squeeze(1))
    return mamba2_chunk_scan(hidden_states)


def skips_its_scan(self, hidden_states, seq_ctx=None, **kwargs):
    causal_conv1d_fn(hidden_states.mT, self.conv1d.weight.squeeze(1), seq_ctx=seq_ctx)
    return hidden_states if hidden_states.numel() else mamba2_chunk_scan(hidden_states)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (hides_its_functions, "kinds linear_attention, in a form that is not known"),
        (hides_its_context, "layer 0 is not given the keyword arguments of the model"),
        (skips_its_scan, "layer 0 computes a convolution, but its .* says linear_attention"),
    ],
)
def test_mixers_that_contradict_the_configuration(monkeypatch, forward, message):
    monkeypatch.setattr(modeling_bamba, "causal_conv1d_fn", lambda x, weight: x)
    monkeypatch.setattr(modeling_bamba, "mamba2_chunk_scan", lambda x: x)
    of_bamba = types.FunctionType(forward.__code__, vars(modeling_bamba), None, (None,))
    monkeypatch.setattr(MIXER, "forward", of_bamba)
    with refused(message):
        check_model(meta_model("Bamba", **HYBRIDS["Bamba"]))


SHARED_BY_TWO = {"planner": "static", "sp_degree": 2}


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("Lfm2", SHARED_BY_TWO, "leave sp_degree out"),
        ("Qwen3_5", SHARED_BY_TWO, "sp_degree=2 for the recurrent layers"),
        ("Zamba2", {}, "whose layers share one attention"),
    ],
)
def test_pipelines_that_could_not_carry_what_layers_need(tmp_path, family, options, message):
    with refused(message):
        make_trainer(tmp_path, model=make_hybrid(family), pipeline_parallel_size=2, **options)
