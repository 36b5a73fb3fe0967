"""The functions that recurrent layers call are replaced while a model is attached, and only for
calls with `seq_ctx`; models whose recurrent layers cannot be computed are refused by name."""

import sys
import types
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from transformers.models.bamba import modeling_bamba
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_flexseq import FlexSeqEngine
from hf_flexseq.attention import SequenceContext
from hf_flexseq.hf.model import recurrent
from hf_flexseq.hf.model.checks import check_model
from hf_flexseq.hf.model.facts import attention_shape, layer_calls, model_shape
from hf_flexseq.hf.model.layer_kinds import layers_of
from hf_flexseq.hf.model.recurrent import (
    UnsupportedRecurrence,
    attach_recurrent,
    mixers,
)
from hf_flexseq.hf.model.trial import try_model
from hf_flexseq.kernels.choose import choose_kernel
from tests.hf.hybrids import HYBRIDS, make_hybrid
from tests.hf.test_checks import fresh_accelerate, make_trainer, meta_model  # noqa: F401
from tests.hf.tiny import refused, tiny_arguments
from tests.plans import shards_of
from tests.ranks import join, run_threads

CPU = torch.device("cpu")
FUNCTIONS = [
    (modeling_qwen3_next, "causal_conv1d_fn"),
    (modeling_qwen3_next, "torch_chunk_gated_delta_rule"),
]


def functions():
    return [getattr(module, name) for module, name in FUNCTIONS]


# ---- attaching


def test_functions_are_those_of_transformers_again_when_the_last_model_is_detached():
    before = functions()
    first, second = (attach_recurrent(make_hybrid("Qwen3Next")) for _ in range(2))
    replaced = functions()
    assert not set(replaced) & set(before)
    first.close()
    first.close()  # has no effect
    assert functions() == replaced
    second.close()
    assert functions() == before


def test_models_of_other_modules_are_left_alone():
    before = modeling_bamba.causal_conv1d_fn
    with attach_recurrent(make_hybrid("Qwen3Next")):
        assert modeling_bamba.causal_conv1d_fn is before
    names = [mixer.name for mixer in mixers(make_hybrid("FalconH1"))]
    assert names == ["model.layers.0.mamba", "model.layers.1.mamba"]


def test_somebody_elses_function_stays(monkeypatch):
    # Last of all, this puts back what is there now.
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", modeling_lfm2.causal_conv1d_fn)
    attached = attach_recurrent(make_hybrid("Lfm2"))
    ours = modeling_lfm2.causal_conv1d_fn

    def around(*args, **kwargs):
        return ours(*args, **kwargs)

    modeling_lfm2.causal_conv1d_fn = around
    attached.close()
    assert modeling_lfm2.causal_conv1d_fn is around
    model = make_hybrid("Lfm2")
    assert model(torch.tensor([[3, 4, 5]]), use_cache=False).logits.isfinite().all()


def test_calls_without_a_context_are_those_of_transformers():
    model = make_hybrid("Bamba")
    tokens = torch.randint(1, 61, (2, 70))
    before = model(tokens, use_cache=True)
    with attach_recurrent(model):
        after = model(tokens, use_cache=True)
        generated = model.eval().generate(tokens[:1, :5], max_new_tokens=3, do_sample=False)
    assert torch.equal(before.logits, after.logits)
    assert generated.shape == (1, 8)


@pytest.mark.slow
def test_an_engine_and_a_trial_give_the_functions_back():
    before = functions()
    engine = FlexSeqEngine(Accelerator(cpu=True), tiny_arguments())
    with engine.attached(make_hybrid("Qwen3Next")):
        assert functions() != before
    assert functions() == before
    seen = try_model(make_hybrid("Qwen3Next"))
    assert functions() == before
    assert [(run.module, run.layer) for run in seen.mixers] == [("Qwen3NextGatedDeltaNet", 0)]
    assert [call.kind for call in seen.mixers[0].calls] == ["convolution", "gated_delta"]


# ---- what is computed


def in_context(family, compute, tokens, autocast=False):
    """What `compute(seq_ctx)` returns on one rank that holds sequences of these lengths, where a
    model of this family is attached."""

    def run(rank, world_size):
        (shard,) = shards_of("local", 1, tokens)
        context = SequenceContext(shard, join(), choose_kernel(CPU, torch.float32, 8), CPU)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return compute(context)

    with attach_recurrent(make_hybrid(family)):
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


@pytest.fixture
def causal_conv1d(monkeypatch):
    """The package's module, without its CUDA library, and for this test alone."""
    monkeypatch.setitem(sys.modules, "causal_conv1d_cuda", types.ModuleType("causal_conv1d_cuda"))
    yield pytest.importorskip("causal_conv1d.causal_conv1d_interface")
    for name in list(sys.modules):
        if name.partition(".")[0] == "causal_conv1d":
            del sys.modules[name]


@pytest.mark.kernels
def test_a_convolution_of_a_pack_is_that_of_causal_conv1d(causal_conv1d):
    """CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE CAUSAL_CONV1D_FORCE_BUILD=TRUE pip install \
    "causal-conv1d>=1.7" --no-build-isolation --no-deps

    Its kernels are in CUDA; this is its reference, for packs that `seq_idx` describes."""
    lengths = (4, 1, 9, 2)
    x = torch.randn(1, sum(lengths), 6, dtype=torch.float64).transpose(1, 2)
    weight, bias = torch.randn(6, 4).double(), torch.randn(6).double()
    sequences = torch.arange(4).repeat_interleave(torch.tensor(lengths))[None].int()

    def of_a_model(*given, **named):
        def convolve(seq_ctx):
            return modeling_bamba.causal_conv1d_fn(*given, **named, seq_ctx=seq_ctx)

        return in_context("Bamba", convolve, lengths)

    for activation in (None, "silu"):
        results = []
        for convolve in (partial(causal_conv1d.causal_conv1d_ref, seq_idx=sequences), of_a_model):
            leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
            out = convolve(*leaves, activation=activation)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


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


def test_mamba_2_in_bfloat16_is_that_of_transformers_up_to_one_rounding():
    x = torch.randn(1, 300, 4, 16).bfloat16()
    dt, A = torch.randn(1, 300, 4).bfloat16(), -torch.rand(4)
    B, C = torch.randn(2, 1, 300, 2, 8).bfloat16()
    D, dt_bias = torch.randn(2, 4).bfloat16()

    def scan(**context):
        options = {"chunk_size": 16, "D": D, "dt_bias": dt_bias, "dt_softplus": True}
        return modeling_bamba.mamba2_chunk_scan(x, dt, A, B, C, **options, **context)

    wanted = scan()
    assert wanted.dtype == torch.float32
    found = in_context("Bamba", lambda seq_ctx: scan(seq_ctx=seq_ctx), (300,))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=1e-4)


def test_states_from_outside_are_refused():
    given = {
        "initial_state": torch.zeros(1),
        "output_final_state": True,
        "cu_seqlens": torch.ones(2),
    }
    with attach_recurrent(make_hybrid("Qwen3Next")):
        scan = modeling_qwen3_next.torch_chunk_gated_delta_rule
        for name, value in given.items():
            with refused(f"gated delta with {name}", UnsupportedRecurrence):
                scan(None, None, None, None, None, **{name: value}, seq_ctx=object())


# ---- kinds, and what is refused


def test_layers_have_what_their_configuration_says():
    kinds = {
        family: [
            (str(layer.attention.reach) if layer.attention else None, str(layer.recurrent))
            for layer in layers_of(make_hybrid(family).config)
        ]
        for family in HYBRIDS
    }
    assert kinds["Qwen3_5"] == [(None, "gated delta"), ("full", "None")]
    assert kinds["BailingHybrid"] == [(None, "kimi delta"), ("full", "None")]
    assert kinds["Bamba without attention"] == [(None, "mamba2")] * 2
    assert kinds["FalconH1"] == [("full", "mamba2")] * 2
    assert kinds["Zamba2"] == [("full", "mamba2"), (None, "mamba2"), ("full", "mamba2")]
    assert kinds["Lfm3"] == [(None, "convolution"), ("window 7", "None")]
    nothing = (None, "None")
    assert kinds["NemotronH"] == [(None, "mamba2"), nothing, ("full", "None"), nothing]


def test_sizes_of_a_model_have_its_recurrent_layers():
    shape = model_shape(make_hybrid("NemotronH"))
    assert (shape.layers, shape.full_layers, shape.without_attention) == (4, 1, 3)
    ((count, mamba2),) = shape.recurrent
    assert (count, mamba2.kind, mamba2.width, mamba2.channels) == (1, "mamba2", 4, 96)
    without = make_hybrid("Bamba without attention")
    assert model_shape(without).full_layers == 0
    assert len(layer_calls(without.config)) == 1
    assert attention_shape(without.config).heads == 1


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


def with_a_wider_convolution(self, config, layer_idx, original=modeling_bamba.BambaMixer.__init__):
    original(self, config, layer_idx)
    self.conv1d = torch.nn.Conv1d(96, 96, kernel_size=6, groups=96, padding=5)


def hides_its_scan(self, hidden_states, **kwargs):
    return hidden_states


def without_the_scan(kind, known=recurrent._functions_of):
    return tuple(one for one in known(kind) if one[1] == "causal_conv1d_fn")


MIXER = modeling_bamba.BambaMixer


@pytest.mark.parametrize(
    ("cls", "name", "planted", "message"),
    [
        (MIXER, "__init__", with_a_wider_convolution, "layer 0 computes width=6, but .* width=4"),
        (MIXER, "forward", hides_its_scan, "layer 0 does not call .* of a mamba2 layer"),
        (recurrent, "_functions_of", without_the_scan, "layer 0 computes kind=convolution, b"),
    ],
)
def test_mixers_that_contradict_the_configuration(monkeypatch, cls, name, planted, message):
    def scans(x, *args, seq_ctx=None, **kwargs):
        return x

    monkeypatch.setattr(cls, name, planted)
    if cls is recurrent:
        monkeypatch.setattr(modeling_bamba, "mamba2_chunk_scan", scans)
    with refused(message):
        check_model(meta_model("Bamba", **HYBRIDS["Bamba"]))


def test_a_mixer_with_the_forward_of_another():
    model = make_hybrid("Lfm2")
    mixer = model.model.layers[0].conv
    mixer.forward = types.MethodType(hides_its_scan, mixer)
    with refused(r"layers\.0\.conv runs hides_its_scan of tests"):
        check_model(model)
    mixer.forward = types.MethodType(type(mixer).forward, mixer)
    check_model(model)


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("Lfm2", {"planner": "static", "sp_degree": 2}, "leave sp_degree out"),
        ("Zamba2", {}, "whose layers share one attention"),
    ],
)
def test_pipelines_that_could_not_carry_what_layers_need(tmp_path, family, options, message):
    with refused(message):
        make_trainer(tmp_path, model=make_hybrid(family), pipeline_parallel_size=2, **options)


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_hybrid_is_taken(family):
    check_model(meta_model(family.split()[0], **HYBRIDS[family]))
