"""Compile the Triton kernels of fla-core or Liger for a GPU that need not be there, as models
launch them, and print a record of each as JSON.

    python tests/kernels/compile_others.py 90 fla       fla, liger_kernel

The kernels of fla-core are those of our scans, forward, backward and summaries, in bfloat16.
Packages look at the GPU when they are imported, and choose tiles by it. So each architecture has a
process of its own, in which torch and Triton are told of that GPU; launches are compiled and left
out. A tuned kernel takes the first of its configurations that the GPU has the memory for.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.autotuner import Autotuner

sys.path.insert(0, str(Path(__file__).parents[2]))

NAMES = {80: "A100", 90: "H100", 100: "B200"}
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # of a block
TENSOR_COLUMNS = 512  # of Blackwell's tensor memory
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


def stand_in_gpu(architecture):
    """Tell torch and Triton that there is one GPU."""
    shared, count = SHARED_BYTES[architecture], MULTIPROCESSORS[architecture]
    properties = {"max_shared_mem": shared, "multiprocessor_count": count}
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", architecture, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
        )
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_name = lambda *device: f"NVIDIA {NAMES[architecture]}"
    torch.cuda.get_device_capability = lambda *device: divmod(architecture, 10)


class Compiler:
    """Compiles what is launched, and launches nothing."""

    def __init__(self, architecture):
        self.architecture = architecture
        self.launched = []  # compiled kernels
        own = JITFunction.run

        def compiled(function, *arguments, grid, warmup, **named):
            kernel = own(function, *arguments, grid=grid, warmup=True, **named)
            self.launched.append(kernel)
            return kernel

        def compiled_to_fit(tuner, *arguments, **named):
            tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
            for config in tuner.prune_configs(named):
                kernel = tuner.fn.run(*arguments, **named, **config.all_kwargs())
                if self.fits(kernel):
                    return kernel
                self.launched.pop()
            self.launched.append(kernel)
            return kernel

        JITFunction.run = compiled
        Autotuner.run = compiled_to_fit

    def fits(self, kernel):
        """Whether the GPU has the memory for a kernel."""
        columns = getattr(kernel.metadata, "tmem_size", None) or 0
        enough = kernel.metadata.shared <= SHARED_BYTES[self.architecture]
        return enough and columns <= TENSOR_COLUMNS

    def records(self, of):
        """A record for each kernel launched since the last call. of: whose they are."""
        kernels = {kernel.hash: kernel for kernel in self.launched}
        self.launched.clear()
        return [
            {"of": of, "kernel": kernel.metadata.name, "fits": self.fits(kernel)}
            for kernel in kernels.values()
        ]


# ---- what is launched


def scans(head_dim):
    """Scans by name: a function without arguments runs each, forward, backward and summaries."""
    from hf_flexseq.kernels.scans import fla

    heads, key_heads, values = 8, 4, head_dim
    channels = (heads, head_dim)
    return {
        "Gated DeltaNet": lambda: scan(
            fla.gated_delta_rule(l2norm=True), key_heads, heads, head_dim, values, (heads,)
        ),
        "Kimi": lambda: scan(
            fla.kimi_delta_rule(l2norm=True), heads, heads, head_dim, values, channels
        ),
        # states of so many rows, heads of 64
        "Mamba 2": lambda: scan(
            fla.gated_linear_attention(), heads, heads, head_dim, 64, (heads,), beta=False
        ),
    }


def scan(rule, key_heads, heads, keys, values, decays, *, beta=True):
    """Run a scan on rows of any content."""
    from hf_flexseq.kernels.scans.fla import FlaScan

    lengths = (80, 16, 96)
    tokens = sum(lengths)
    narrow = {"dtype": torch.bfloat16}
    q, k = (torch.zeros(tokens, key_heads, keys, **narrow) for _ in range(2))
    v = torch.zeros(tokens, heads, values, **narrow)
    inputs = [q, k, v, torch.zeros(tokens, *decays)]
    if beta:
        inputs.append(torch.zeros(tokens, heads, **narrow))
    made = FlaScan(lengths, torch.device("cpu"), rule)
    states = torch.zeros(len(lengths), heads, keys, values)
    made.summarise(tuple(inputs), range(2), range(2))
    out, finals, saved = made.forward(tuple(inputs), states)
    made.backward(torch.zeros_like(out), torch.zeros_like(finals), tuple(inputs), saved)


def loss():
    """Liger's head and loss, as `chunked_loss` calls it."""
    from hf_flexseq.kernels.chunked_loss import liger_sum

    hidden = torch.zeros(16, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(1 << 15, 64, dtype=torch.bfloat16, requires_grad=True)
    (liger_sum(hidden, weight, None, torch.zeros(16, dtype=torch.long)) * 2).backward()


def norm():
    """RMSNorm of 4,096 channels."""
    from liger_kernel.transformers import LigerRMSNorm

    LigerRMSNorm(4096).bfloat16()(bfloat16(1, 16, 4096)).sum().backward()


def gated_product():
    """The product of an MLP of 14,336 channels with gates of SiLU."""
    from liger_kernel.ops import LigerSiLUMulFunction

    LigerSiLUMulFunction.apply(bfloat16(1, 16, 14336), bfloat16(1, 16, 14336)).sum().backward()


def rotation(head_dim):
    """Rotary embeddings of 32 heads and 8 key heads."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    table = torch.zeros(1, 16, head_dim, dtype=torch.bfloat16)
    q, k = bfloat16(1, 32, 16, head_dim), bfloat16(1, 8, 16, head_dim)
    sum(x.sum() for x in liger_rotary_pos_emb(q, k, table, table)).backward()


def bfloat16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()


def all_records(architecture, package):
    """A record for each kernel that a package launches on one architecture."""
    stand_in_gpu(architecture)
    compiler = Compiler(architecture)
    records = []
    for head_dim in (64, 128, 256):
        if package == "fla":
            for name, run in scans(head_dim).items():
                run()
                records += compiler.records(name)
        else:
            rotation(head_dim)
    if package == "liger_kernel":
        for run in (loss, norm, gated_product):
            run()
        records += compiler.records("Liger")
    return records


if __name__ == "__main__":
    print(json.dumps(all_records(int(sys.argv[1]), sys.argv[2])))
