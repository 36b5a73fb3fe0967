"""Which kernel is chosen, and what is said about the others."""

import dataclasses
import logging
import sys
import types

import pytest
import torch
from torch.nn import attention

from hf_flexseq.kernels import KernelCall, choose, flash_attn, flash_attn3, kinds
from hf_flexseq.kernels.choose import capabilities, choose_fused, choose_kernel, explain
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.kinds import LayerCalls, choose_kernels
from hf_flexseq.kernels.reference import Reference
from hf_flexseq.kernels.segments import Segments
from hf_flexseq.kernels.torch_varlen import TorchVarlen
from tests.kernels.test_cuda_kernels import flash3_operators
from tests.kernels.test_kernels import random_inputs, run

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
REMEMBERED = (
    flash_attn.package_problem,
    flash_attn3.package_problem,
    choose._log_once,
    choose._fused_for_cuda,
)


@pytest.fixture(autouse=True)
def fresh_choices():
    for function in REMEMBERED:
        function.cache_clear()
    yield
    for function in REMEMBERED:
        function.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    """A torch that believes it has a Hopper GPU, and no package of FlashAttention."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")


@pytest.fixture
def package(monkeypatch, hopper):
    """The flash-attn package beside it, as far as choosing looks at it."""
    module = types.ModuleType("flash_attn")
    module.__version__ = "2.8.3"
    module.flash_attn_interface = types.ModuleType("flash_attn.flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.fixture
def package3(monkeypatch, hopper):
    """The FlashAttention-3 package, as far as choosing looks at it."""
    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface")
    )
    with flash3_operators() as library:
        yield library


@pytest.fixture
def activate():
    """Put an implementation of a name into torch's registry, and activate it there."""

    class Handle:
        def remove(self):
            pass

    registered = dict(attention._registry._FLASH_ATTENTION_IMPLS)

    def activate(name):
        attention.register_flash_attention_impl(name, register_fn=Handle)
        attention.activate_flash_attention_impl(name)

    yield activate
    attention.restore_flash_attention_impl(_raise_warn=False)
    attention._registry._FLASH_ATTENTION_IMPLS = registered


def said_of(name, lines):
    """What a list of lines says of a kernel."""
    (line,) = (line for line in lines if line.startswith(f"{name}: "))
    return line.removeprefix(f"{name}: ")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_cpu(dtype):
    assert choose_kernel(CPU, dtype, 13).name == "cpu_flash"


def test_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="hf_flexseq"):
        assert choose_kernel(CPU, torch.float32, 64) is choose_kernel(CPU, torch.float32, 64)
    assert [r.message for r in caplog.records] == ["attention kernel: cpu_flash: chosen"]


def test_torch_varlen_without_the_package(hopper):
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "torch_varlen"
    missing3, missing2, chosen = explain(CUDA, torch.bfloat16, 128)
    assert missing3.startswith("flash_attn3: the FlashAttention-3 package cannot be imported")
    assert missing2.startswith("flash_attn: the flash-attn package cannot be imported")
    assert chosen == "torch_varlen: chosen"


def test_the_package_comes_first(package):
    assert choose_kernel(CUDA, torch.float16, 64).name == "flash_attn"
    lines = explain(CUDA, torch.float16, 64)
    assert lines[1:] == ["flash_attn: chosen", "torch_varlen: not needed"]


def test_an_old_package_is_refused(package):
    package.__version__ = "2.6.3"
    said = said_of("flash_attn", explain(CUDA, torch.float16, 64))
    assert said == "flash-attn 2.6.3 is older than 2.7"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "advice"),
    [
        (torch.float32, 64, "bf16=True"),
        (torch.bfloat16, 12, "multiple of 8"),
        (torch.bfloat16, 264, "up to 256"),
    ],
)
def test_cuda_without_a_kernel_says_what_to_change(hopper, dtype, head_dim, advice):
    with pytest.raises(ValueError, match=advice):
        choose_kernel(CUDA, dtype, head_dim)


def test_old_gpu(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(
        ValueError, match=r"some GPU has compute capability 7\.5, not 8\.0 or newer"
    ):
        choose_kernel(CUDA, torch.float16, 64)


def test_cuda_build_without_flash_attention(hopper, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ValueError, match="build of torch has no FlashAttention"):
        choose_kernel(CUDA, torch.bfloat16, 64)


def test_cpu_without_a_kernel():
    with pytest.raises(ValueError, match="no int32, only float32"):
        choose_kernel(CPU, torch.int32, 64)


def test_unknown_device():
    with pytest.raises(ValueError, match="device type 'mps'"):
        choose_kernel(torch.device("mps"), torch.bfloat16, 64)


# ---- FlashAttention-3 and -4


def test_flash_attention_3_comes_first_on_hopper(package, package3):
    names = [line.split(":")[0] for line in explain(CUDA, torch.bfloat16, 128)]
    assert names == ["flash_attn3", "flash_attn", "torch_varlen"]
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "flash_attn3"


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_flash_attention_3_is_refused_on_other_generations(package3, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    said = said_of("flash_attn3", explain(CUDA, torch.bfloat16, 128))
    major, minor = capability
    assert said == f"some GPU has compute capability {major}.{minor}, not 9.x"
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "torch_varlen"


def test_flash_attention_3_whose_operators_lack_an_argument_is_refused(hopper, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface")
    )
    with flash3_operators(backward_lacks="bool deterministic = False, "):
        said = said_of("flash_attn3", explain(CUDA, torch.bfloat16, 128))
    assert said == "flash_attn_3::bwd has no argument deterministic; install a newer one"


def test_flash_attention_3_without_operators_is_refused(hopper, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface")
    )
    said = said_of("flash_attn3", explain(CUDA, torch.bfloat16, 128))
    assert said == "flash_attn_interface registers no operator flash_attn_3::fwd"


def test_flash_attention_3_built_without_a_backward_is_refused(package3, monkeypatch):
    config = types.ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_BACKWARD": True}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    said = said_of("flash_attn3", explain(CUDA, torch.bfloat16, 128))
    assert said == "this build has no backward; build it without FLASHATTENTION_DISABLE_BACKWARD"


def test_flash_attention_4_is_named_where_it_is_installed(hopper, monkeypatch):
    monkeypatch.setattr(choose, "_is_installed", lambda package: package == "flash-attn-4")
    said = said_of("flash-attn-4", explain(CUDA, torch.bfloat16, 128))
    assert said.startswith("not used, for the releases of FlashAttention-4 differ")


# ---- torch's registry of implementations


def test_an_implementation_in_torch_that_nobody_knows_is_refused_with_what_to_call(
    hopper, activate
):
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "torch_varlen"
    activate("MINE")
    with pytest.raises(ValueError, match=r"MINE is active .*\.restore_flash_attention_impl\(\)"):
        choose_kernel(CUDA, torch.bfloat16, 128)
    attention.restore_flash_attention_impl()
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "torch_varlen"


def test_flash_attention_4_active_in_torch_is_refused(hopper, activate):
    activate("FA4")
    said = said_of("torch_varlen", explain(CUDA, torch.bfloat16, 128))
    assert said.startswith("FA4 is active in torch, and the releases of FlashAttention-4 differ")


def test_flash_attention_3_active_in_torch_has_capabilities_of_its_own(
    hopper, activate, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "torch_varlen"
    activate("FA3")
    with pytest.raises(ValueError, match=r"FA3 is active in torch: .* capability 8\.0, not 9\.x"):
        choose_kernel(CUDA, torch.bfloat16, 128)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "torch_varlen"


def test_a_torch_without_a_registry_has_its_own_implementation(hopper, monkeypatch):
    monkeypatch.delattr(attention, "current_flash_attention_impl")
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "torch_varlen"


def test_an_implementation_activated_after_the_choice_is_not_called(hopper, activate):
    kernel = choose_kernel(CUDA, torch.bfloat16, 128)
    assert isinstance(kernel, TorchVarlen)
    activate("FA4")
    segments = Segments([3], [3], causal=True, device=CPU)
    q = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="FA4 is active in torch"):
        kernel.forward(KernelCall(q, q, q, segments, 1.0))


# ---- windows, softcaps and several kinds of layers


def test_windows_are_taken_by_all_and_softcaps_not_by_torch(hopper):
    assert choose_kernel(CUDA, torch.bfloat16, 128, window=True).name == "torch_varlen"
    with pytest.raises(ValueError, match="head size 128, a softcap on cuda:0") as refused:
        choose_kernel(CUDA, torch.bfloat16, 128, softcap=True)
    assert "torch_varlen: it has no softcap; install flash-attn" in str(refused.value)


def test_softcaps_are_what_the_package_is_chosen_for(package):
    kernel = choose_kernel(CUDA, torch.bfloat16, 256, window=True, softcap=True)
    assert kernel.name == "flash_attn"


@pytest.mark.parametrize(
    ("flag", "needs", "reason"),
    [
        ("LOCAL", {"window": True}, "this build has no sliding windows; build it without"),
        ("SOFTCAP", {"softcap": True}, "this build has no softcap; build it without"),
    ],
)
def test_a_build_of_flash_attention_3_without_a_feature_serves_layers_without_it(
    package3, monkeypatch, flag, needs, reason
):
    config = types.ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    assert choose_kernel(CUDA, torch.bfloat16, 128).name == "flash_attn3"
    said = said_of("flash_attn3", explain(CUDA, torch.bfloat16, 128, **needs))
    assert said == f"{reason} FLASHATTENTION_DISABLE_{flag}"


SLIDING = LayerCalls("layers.0.self_attn", 256, window=True)
FULL = LayerCalls("layers.5.self_attn", 256)


def test_one_kernel_that_serves_all_kinds_is_returned_as_it_is(hopper):
    assert choose_kernels(CPU, torch.float32, [SLIDING, FULL]) is choose_kernel(
        CPU, torch.float32, 256
    )
    assert choose_kernels(CUDA, torch.bfloat16, [SLIDING, FULL]).name == "torch_varlen"


def test_a_head_size_that_no_kernel_takes_is_refused_by_layer_size_and_kernels(hopper):
    wanted = [SLIDING, LayerCalls("layers.5.self_attn", 512)]
    with pytest.raises(ValueError, match=r"^layers\.5\.self_attn: no attention kernel") as refused:
        choose_kernels(CUDA, torch.bfloat16, wanted)
    said = str(refused.value)
    assert "\n" not in said
    assert "head size 512" in said
    assert "torch_varlen: a head size of 512 is not a multiple of 8 up to 256" in said


def test_a_window_that_no_kernel_has_is_refused_by_layer(monkeypatch):
    narrow = dataclasses.replace(CpuFlash.capabilities, windows=False, softcap=False)
    monkeypatch.setattr(CpuFlash, "capabilities", narrow)
    with pytest.raises(ValueError, match=r"layers\.0.*cpu_flash: it has no sliding windows"):
        choose_kernels(CPU, torch.float32, [FULL, SLIDING])


class Recorder:
    """A kernel that notes the calls it gets, and computes as the reference does."""

    def __init__(self, name, wide_gradients=False):
        self.name = name
        self.wide_gradients = wide_gradients
        self.seen = []

    def forward(self, call):
        self.seen.append(("forward", call.q.shape[2], call.segments.window, call.softcap))
        return Reference().forward(call)

    def backward(self, call, dout, out, lse):
        self.seen.append(("backward", call.q.shape[2], call.segments.window, call.softcap))
        return Reference().backward(call, dout, out, lse)


def test_every_call_goes_to_the_kernel_of_its_kind(monkeypatch):
    small = Recorder("small")
    large = Recorder("large")
    monkeypatch.setattr(
        kinds, "kernel_for", lambda calls: large if calls.head_dim == 32 else small
    )
    wanted = [LayerCalls("a", 16, window=True), LayerCalls("b", 32, softcap=True)]
    kernel = choose_kernels(CPU, torch.float64, wanted)
    assert kernel.name == "small and large"
    for head_dim, window, softcap in ((16, 3, None), (16, None, None), (32, None, 5.0)):
        segments = Segments([7, 2], [9, 2], causal=True, device=CPU, window=window)
        inputs = random_inputs(segments, (4, 2), head_dim=head_dim)
        got = run(kernel, *inputs, segments, softcap)
        want = run(Reference(), *inputs, segments, softcap)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert small.seen == [
        (way, 16, window, None) for window in (3, None) for way in ("forward", "backward")
    ]
    assert large.seen == [("forward", 32, None, 5.0), ("backward", 32, None, 5.0)]
    segments = Segments([1], [1], causal=True, device=CPU)
    q, k, v, _ = random_inputs(segments, (1, 1), head_dim=8)
    with pytest.raises(AssertionError, match="no kernel was chosen for calls of"):
        kernel.forward(KernelCall(q, k, v, segments, 1.0))


def test_kernels_whose_gradients_differ_in_dtype_do_not_go_together(monkeypatch):
    narrow = Recorder("narrow")
    wide = Recorder("wide", wide_gradients=True)
    monkeypatch.setattr(kinds, "kernel_for", lambda calls: wide if calls.softcap else narrow)
    with pytest.raises(ValueError, match="narrow and wide, which this model's layers need"):
        choose_kernels(CPU, torch.float64, [FULL, LayerCalls("b", 16, softcap=True)])


# ---- what is said of the capabilities


def test_capabilities_of_the_kernels_that_fit(package3):
    flash3, flash2 = capabilities(CUDA, torch.bfloat16, 128)
    assert flash3 == (
        "flash_attn3: bfloat16, float16; head size a multiple of 8 up to 256; compute capability "
        "9.x; lse -inf without keys; gradients in the inputs' dtype; sliding windows; "
        "softcap"
    )
    assert flash2 == (
        "torch_varlen: bfloat16, float16; head size a multiple of 8 up to 256; compute capability "
        "8.0 or newer; lse -inf without keys (mended from +inf); gradients in the inputs' dtype; "
        "sliding windows; no softcap"
    )


def test_a_kernel_that_does_not_fit_states_no_capabilities(hopper):
    assert capabilities(CUDA, torch.float32, 128) == []


def test_capabilities_of_the_cpu_kernel():
    (line,) = capabilities(CPU, torch.float32, 128)
    assert line == (
        "cpu_flash: float32, float64, bfloat16, float16; head size any number; lse -inf without "
        "keys; 16-bit inputs get float32 gradients; sliding windows; "
        "softcap"
    )


# ---- between kernel calls


def test_the_cpu_has_torch_between_kernel_calls(caplog):
    caplog.set_level(logging.INFO)
    assert choose_fused(CPU).name == "torch"
    assert not caplog.records


def test_cuda_has_triton_between_kernel_calls(caplog):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    caplog.set_level(logging.INFO)
    assert choose_fused(CUDA).name == "triton"
    choose_fused(CUDA)
    (record,) = caplog.records
    assert record.levelname == "INFO"


def test_without_triton_torch_serves_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(choose.util, "find_spec", lambda name: None)
    assert choose_fused(CUDA).name == "torch"
    choose_fused(CUDA)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("merging and packing take several launches each: triton")


@pytest.mark.parametrize(
    "lacks, advice", [("compiler", "install gcc"), ("headers", "development headers")]
)
def test_triton_that_cannot_start_is_not_chosen(monkeypatch, caplog, tmp_path, lacks, advice):
    pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    if lacks == "compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(choose.shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CC", "cc")
        monkeypatch.setattr(choose.sysconfig, "get_path", lambda name: str(tmp_path))
    assert choose_fused(CUDA).name == "torch"
    assert advice in caplog.text
