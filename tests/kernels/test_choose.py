"""Which kernel is chosen, and what is said about the others."""

import logging
import sys
import types

import pytest
import torch

from hf_flexseq.kernels import flash_attn
from hf_flexseq.kernels.choose import choose_kernel, explain

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_choices():
    for function in (choose_kernel, flash_attn.package_problem):
        function.cache_clear()
    yield
    for function in (choose_kernel, flash_attn.package_problem):
        function.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    """A torch that believes it has a Hopper GPU, and no flash-attn package."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
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
    missing, chosen = explain(CUDA, torch.bfloat16, 128)
    assert missing.startswith("flash_attn: the flash-attn package cannot be imported")
    assert chosen == "torch_varlen: chosen"


def test_the_package_comes_first(package):
    assert choose_kernel(CUDA, torch.float16, 64).name == "flash_attn"
    assert explain(CUDA, torch.float16, 64) == ["flash_attn: chosen", "torch_varlen: not needed"]


def test_an_old_package_is_refused(package):
    package.__version__ = "2.6.3"
    assert explain(CUDA, torch.float16, 64)[0] == "flash_attn: flash-attn 2.6.3 is older than 2.7"


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
    with pytest.raises(ValueError, match="some GPU is older than Ampere"):
        choose_kernel(CUDA, torch.float16, 64)


def test_cuda_build_without_flash_attention(hopper, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    with pytest.raises(ValueError, match="build of torch has no FlashAttention"):
        choose_kernel(CUDA, torch.bfloat16, 64)


def test_cpu_without_a_kernel():
    with pytest.raises(ValueError, match=r"no torch\.int32; use one of torch\.float32"):
        choose_kernel(CPU, torch.int32, 64)


def test_unknown_device():
    with pytest.raises(ValueError, match="device type 'mps'"):
        choose_kernel(torch.device("mps"), torch.bfloat16, 64)
