"""Which kernel is chosen, and what is said about the others."""

import contextlib
import dataclasses
import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention

from hf_flexseq.kernels import KernelCall, choose, flash_attn, flash_attn3, kinds
from hf_flexseq.kernels.capabilities import CallKind
from hf_flexseq.kernels.choose import choose_fused, choose_kernel, explain
from hf_flexseq.kernels.cpu_flash import CpuFlash
from hf_flexseq.kernels.kinds import LayerCalls, choose_kernels
from hf_flexseq.kernels.segments import Segments
from tests.kernels.test_cuda_kernels import flash3_operators

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16
FLASH3, FLASH2, TORCH = "flash_attn3", "flash_attn", "torch_varlen"
REMEMBERED = (
    flash_attn.package_problem,
    flash_attn3.package_problem,
    choose.log_once,
    choose._fused_for_cuda,
)


@pytest.fixture(autouse=True)
def fresh_choices():
    for function in REMEMBERED:
        function.cache_clear()
    yield
    for function in REMEMBERED:
        function.cache_clear()


def activate(name):
    """Put an implementation of a name into torch's registry, and activate it there."""
    handle = SimpleNamespace(remove=lambda: None)
    attention.register_flash_attention_impl(name, register_fn=lambda: handle)
    attention.activate_flash_attention_impl(name)


@pytest.fixture
def gpu(monkeypatch):
    """Make torch believe that it has a GPU."""
    registered = dict(attention._registry._FLASH_ATTENTION_IMPLS)
    with contextlib.ExitStack() as operators:

        def gpu(
            *, capability=(9, 0), flash2=None, amd=False, flash3=None, without=None, active=None
        ):
            """flash2: version of its package. amd: whether it runs its kernels for AMD. flash3:
            what the backward of its package lacks. without: what that package was built without.
            active: implementation in torch."""
            monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
            interface = SimpleNamespace(USE_TRITON_ROCM=amd)
            flags = {f"FLASHATTENTION_DISABLE_{without}": True}
            modules = {
                "flash_attn": flash2
                and {"__version__": flash2, "flash_attn_interface": interface},
                "flash_attn_interface": None if flash3 is None else {},
                "flash_attn_config": without and {"CONFIG": {"build_flags": flags}},
            }
            for name, has in modules.items():
                module = None if has is None else SimpleNamespace(**has)
                monkeypatch.setitem(sys.modules, name, module)
            if flash3 is not None and flash3 != "operators":
                operators.enter_context(flash3_operators(backward_lacks=flash3))
            if active is not None:
                activate(active)

        yield gpu
    attention.restore_flash_attention_impl(_raise_warn=False)
    attention._registry._FLASH_ATTENTION_IMPLS = registered


def chosen(device, dtype, head_dim, **needs):
    """The name of the kernel, None where all are refused; and all that is said."""
    said = "; ".join(explain(CallKind(device, dtype, head_dim, **needs)))
    try:
        return choose_kernel(device, dtype, head_dim, **needs).name, said
    except ValueError as error:
        return None, str(error)


CHOICES = [  # (machine, what is asked beside bfloat16 and heads of 128, choice, what is said)
    ({}, {}, TORCH, "^flash_attn3: the FlashAttention-3 package cannot be imported"),
    ({}, {}, TORCH, "; flash_attn: the flash-attn package .*; torch_varlen: chosen$"),
    ({"flash2": "2.7.0"}, {"dtype": torch.float16}, FLASH2, "; torch_varlen: not needed$"),
    ({"flash2": "2.6.3"}, {}, TORCH, "flash_attn: flash-attn 2.6.3 is older than 2.7;"),
    ({"flash2": "2.8.3", "amd": True}, {}, TORCH, "flash_attn: .* for AMD ignore windows and so"),
    ({}, {"dtype": torch.float32}, None, "bf16=True"),
    ({}, {"head_dim": 12}, None, "multiple of 8"),
    ({}, {"head_dim": 256}, TORCH, ""),
    ({}, {"head_dim": 264}, None, "up to 256"),
    ({"capability": (7, 5)}, {}, None, "some GPU has compute capability 7.5, not 8.0 or newer"),
    # FlashAttention-3
    ({"flash2": "2.8.3", "flash3": ""}, {}, FLASH3, "n3: chosen; .*: not needed; .*: not needed$"),
    (
        {"flash3": "", "capability": (8, 0)},
        {},
        TORCH,
        "flash_attn3: .* capability 8.0, not 9.0 to 9.x;",
    ),
    ({"flash3": "", "capability": (10, 0)}, {}, TORCH, "flash_attn3: .* 10.0, not 9.0 to 9.x;"),
    ({"flash3": ", bool deterministic = False"}, {}, TORCH, "::bwd has no argument determinis"),
    ({"flash3": "Tensor q, "}, {}, TORCH, "::bwd does not begin with the arguments dout, q,"),
    ({"flash3": "operators"}, {}, TORCH, "_interface registers no operator flash_attn_3::fwd"),
    ({"flash3": "", "without": "BACKWARD"}, {}, TORCH, "without FLASHATTENTION_DISABLE_BACKWARD"),
    ({"flash3": "", "without": "VARLEN"}, {}, TORCH, "this build has no packed sequences"),
    ({"flash3": "", "without": "LOCAL"}, {}, FLASH3, ""),
    ({"flash3": "", "without": "LOCAL"}, {"window": True}, TORCH, "has no sliding windows; buil"),
    ({"flash3": "", "without": "SOFTCAP"}, {}, FLASH3, ""),
    ({"flash3": "", "without": "SOFTCAP"}, {"softcap": True}, None, "this build has no softcap"),
    # windows and softcaps
    ({}, {"window": True}, TORCH, ""),
    ({}, {"softcap": True}, None, "size 128, a softcap on cuda:0: .* has no softcap; install fl"),
    ({"flash2": "2.8.3"}, {"window": True, "softcap": True}, FLASH2, ""),
    # torch's registry of implementations
    ({"active": "MINE"}, {}, None, r"MINE is active .*\.restore_flash_attention_impl\(\)"),
    ({"active": "FA4"}, {}, None, "FA4 is active in torch, and the releases of FlashAttention-4"),
    ({"active": "FA3"}, {}, TORCH, ""),
    (
        {"active": "FA3", "capability": (8, 0)},
        {},
        None,
        "FA3 is active in torch: .* 8.0, not 9.0 to 9.x",
    ),
]


@pytest.mark.parametrize(("machine", "asked", "choice", "words"), CHOICES)
def test_a_gpu_gets_the_first_kernel_that_serves_and_hears_of_the_others(
    gpu, machine, asked, choice, words
):
    gpu(**machine)
    asked = {"dtype": BF16, "head_dim": 128} | asked
    assert [line.partition(":")[0] for line in explain(CallKind(CUDA, **asked))] == [
        FLASH3,
        FLASH2,
        TORCH,
    ]
    name, said = chosen(CUDA, **asked)
    assert said.endswith("; ".join(explain(CallKind(CUDA, **asked))))
    assert name == choice
    assert re.search(words, said), said


@pytest.mark.parametrize(
    ("device", "dtype", "name", "words"),
    [
        *((CPU, x, "cpu_flash", "") for x in (torch.float32, torch.float64, BF16, torch.float16)),
        (CPU, torch.int32, None, "no int32, only float32"),
    ],
)
def test_the_cpu_has_one_kernel(device, dtype, name, words):
    found, said = chosen(device, dtype, 13)
    assert found == name
    assert words in said


def test_torch_without_flash_attention_and_torch_without_a_registry(gpu, monkeypatch):
    gpu()
    monkeypatch.delattr(attention, "current_flash_attention_impl")
    assert choose_kernel(CUDA, BF16, 128).name == TORCH
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ValueError, match="build of torch has no FlashAttention"):
        choose_kernel(CUDA, BF16, 64)


def test_the_package_of_flash_attention_4_is_named_where_it_is_installed(gpu, monkeypatch):
    gpu()
    monkeypatch.setattr(choose.metadata, "version", {"flash-attn-4": "4.0.0"}.__getitem__)
    *_, said = explain(CallKind(CUDA, BF16, 128))
    assert said.startswith("flash-attn-4: not used, for the releases of FlashAttention-4 differ")


def test_an_implementation_activated_after_the_choice_is_not_called(gpu):
    gpu()
    kernel = choose_kernel(CUDA, BF16, 128)
    activate("FA4")
    q = torch.zeros(3, 2, 8, dtype=BF16)
    with pytest.raises(NotImplementedError, match="FA4 is active in torch"):
        kernel.forward(KernelCall(q, q, q, Segments([3], [3], causal=True, device=CPU), 1.0))


# ---- several kinds of layers


SLIDING = LayerCalls("layers.0.self_attn", 256, window=True)
FULL = LayerCalls("layers.5.self_attn", 256)


def test_what_no_kernel_has_is_refused_by_layer_in_one_line(gpu, monkeypatch):
    gpu()
    large = LayerCalls("layers.5.self_attn", 512)
    words = (
        r"^layers\.5\.self_attn: no attention kernel.*head size 512.* not a multiple of 8 up to"
    )
    with pytest.raises(ValueError, match=words):
        choose_kernels(CUDA, BF16, [SLIDING, large])
    narrow = dataclasses.replace(CpuFlash.capabilities, softcap=False)
    monkeypatch.setattr(CpuFlash, "capabilities", narrow)
    with pytest.raises(ValueError, match=r"layers\.0.*cpu_flash: it has no softcap"):
        choose_kernels(CPU, torch.float32, [FULL, SLIDING._replace(softcap=True)])


class Recorder:
    """A kernel that notes the calls it gets."""

    def __init__(self, name, wide_gradients=False):
        self.name = name
        self.wide_gradients = wide_gradients
        self.seen = []

    def forward(self, call):
        self.seen.append(("forward", call))
        return "out", "lse"

    def backward(self, call, dout, out, lse):
        self.seen.append(("backward", call, dout, out, lse))
        return "dq", "dk", "dv"


def test_every_call_goes_to_the_kernel_of_its_kind(monkeypatch):
    small = Recorder("small")
    large = Recorder("large")
    monkeypatch.setattr(
        kinds, "choose_kernel", lambda *_, softcap, **of: large if softcap else small
    )
    wanted = [LayerCalls("a", 16, window=True), LayerCalls("b", 32, softcap=True)]
    kernel = choose_kernels(CPU, torch.float64, wanted)
    assert kernel.name == "small and large"
    for of_kind, head_dim, window, softcap in (
        (small, 16, 3, None),
        (small, 16, None, None),
        (large, 32, None, 5.0),
    ):
        q = torch.zeros(7, 2, head_dim)
        segments = Segments([7], [7], causal=True, device=CPU, window=window)
        call = KernelCall(q, q, q, segments, 1.0, softcap)
        assert kernel.forward(call) == ("out", "lse")
        assert kernel.backward(call, "dout", "out", "lse") == ("dq", "dk", "dv")
        assert of_kind.seen == [("forward", call), ("backward", call, "dout", "out", "lse")]
        of_kind.seen.clear()
    q = torch.zeros(7, 2, 8)
    with pytest.raises(AssertionError, match="no kernel was chosen for calls of"):
        kernel.forward(KernelCall(q, q, q, segments, 1.0))


def test_kernels_whose_gradients_differ_in_dtype_do_not_go_together(monkeypatch):
    narrow = Recorder("narrow")
    wide = Recorder("wide", wide_gradients=True)
    monkeypatch.setattr(
        kinds, "choose_kernel", lambda *_, softcap, **of: wide if softcap else narrow
    )
    with pytest.raises(ValueError, match="narrow and wide, which this model's layers need"):
        choose_kernels(CPU, torch.float64, [FULL, LayerCalls("b", 16, softcap=True)])


# ---- between kernel calls


def no_triton(monkeypatch):
    monkeypatch.setattr(choose.util, "find_spec", lambda name: None)


def no_compiler(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(choose.shutil, "which", lambda name: None)


def no_headers(monkeypatch):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(choose.sysconfig, "get_path", lambda name: "/nowhere")


@pytest.mark.parametrize(
    ("lack", "level", "words"),
    [
        (None, "INFO", "merging and packing: by Triton kernels"),
        (no_triton, "WARNING", "take several launches each: triton is not installed"),
        (no_compiler, "WARNING", "install gcc"),
        (no_headers, "WARNING", "development headers"),
    ],
)
def test_triton_serves_between_kernel_calls_on_cuda_where_it_can_start(
    monkeypatch, caplog, lack, level, words
):
    if lack is not no_triton:
        pytest.importorskip("triton", reason="Triton has wheels for Linux only")
    caplog.set_level(logging.INFO)
    assert choose_fused(CPU).name == "torch"
    assert not caplog.records
    if lack is not None:
        lack(monkeypatch)
    wanted = "triton" if lack is None else "torch"
    assert choose_fused(CUDA).name == choose_fused(CUDA).name == wanted
    (record,) = caplog.records  # said once
    assert record.levelname == level
    assert words in record.getMessage()
