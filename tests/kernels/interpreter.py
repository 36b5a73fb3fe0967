"""What Triton's interpreter needs, besides a kernel, to run it as a GPU would.

Configurations: the interpreter tunes nothing, and some packages' keys of tuned kernels fail in it.
Here every tuned kernel takes its first configuration.

Scalars: a float stays a float of Python, of which some kernels ask for a tensor's methods.

bfloat16: NumPy has no such type, so Triton (3.7) keeps numbers as their 16 bits. It adds and
multiplies these bits as if they were integers, and where a GPU rounds to the nearest it cuts off.
Here such numbers are computed with in float32 and rounded to the nearest, as a GPU does it.
"""

import importlib

import numpy as np
import torch


def first_configurations(patch):
    """Let every tuned kernel take the first of its configurations. patch: a `MonkeyPatch`."""
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner

    def run_first(self, *given, **named):
        return self.fn.run(*given, **{**named, **self.configs[0].all_kwargs()})

    patch.setattr(autotuner, "run", run_first)


def scalar_tensors(patch):
    """Let kernels have float arguments as float32 tensors, as compiled ones have them."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    converted = interpreter._implicit_cvt

    def tensor_of(argument):
        if not isinstance(argument, float):
            return converted(argument)
        data = np.array([argument], dtype=np.float32)
        handle = interpreter.TensorHandle(data, language.float32)
        return language.tensor(handle, language.float32)

    patch.setattr(interpreter, "_implicit_cvt", tensor_of)


def liger(patch):
    """Let Liger's kernels run, in bfloat16, too."""
    language = importlib.import_module("triton.language")
    norms, products = (
        importlib.import_module(f"liger_kernel.ops.{name}") for name in ("rms_norm", "geglu")
    )
    scalar_tensors(patch)
    real_bfloat16(patch)
    # two functions of NVIDIA's library, which the interpreter does not have
    patch.setattr(norms, "rsqrt", lambda x: language.rsqrt(x))
    patch.setattr(products, "tanh", lambda x: 2 * language.sigmoid(2 * x) - 1)


def real_bfloat16(patch):
    """Let interpreted kernels compute with bfloat16. patch: a `MonkeyPatch`."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    builder, handle_of = interpreter.InterpreterBuilder, interpreter.TensorHandle
    bfloat16, float32 = language.bfloat16, language.float32

    def is_narrow(handle):
        return handle.dtype.scalar == bfloat16

    def wide(handle):
        if not is_narrow(handle):
            return handle
        return handle_of(floats_of(handle.data), float32)

    def rounded(handle):
        return handle_of(bits_of(handle.data), bfloat16)

    def computed_wide(name, result):
        """Replace a method of the builder. result: which argument has the type of the result."""
        own = getattr(builder, name)

        def compute(self, *arguments):
            handles = [x for x in arguments if isinstance(x, handle_of)]
            given = handles[result]
            if not any(map(is_narrow, handles)):
                return own(self, *arguments)
            found = own(self, *(wide(x) if isinstance(x, handle_of) else x for x in arguments))
            if not is_narrow(given) or found.data.dtype == bool:
                return found
            return rounded(found)

        patch.setattr(builder, name, compute)

    for name in ("unary_op", "binary_op"):
        computed_wide(name, 0)
    for name in ("ternary_op", "create_fma", "create_dot"):
        computed_wide(name, 2)

    cast = builder.cast_impl
    convert = interpreter._convert_float

    def cast_wide(self, handle, to):
        if to.scalar != bfloat16:
            return cast(self, wide(handle), to)
        return handle if is_narrow(handle) else rounded(cast(self, handle, float32))

    def converted(data, given, to, rounding):
        if (given, to) == (bfloat16, float32):
            return floats_of(data)
        if (given, to) == (float32, bfloat16):
            return bits_of(data)
        return convert(data, given, to, rounding)

    def constant(self, value):
        return rounded(self.get_fp32(value))

    sum_of = interpreter.ReduceOps.sum

    def summed(self, x):
        if x.dtype.scalar != bfloat16:
            return sum_of(self, x)
        total = np.sum(floats_of(x.handle.data), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(bits_of(total), x.dtype)

    patch.setattr(builder, "get_bf16", constant, raising=False)
    patch.setattr(interpreter.ReduceOps, "sum", summed)
    patch.setattr(builder, "cast_impl", cast_wide)
    patch.setattr(interpreter, "_convert_float", converted)


def floats_of(bits):
    """uint16 bits of bfloat16 -> float32 of the same values."""
    return torch.from_numpy(np.array(bits)).view(torch.bfloat16).float().numpy()


def bits_of(floats):
    """float32 -> uint16 bits of the nearest bfloat16."""
    return torch.from_numpy(np.array(floats)).bfloat16().view(torch.uint16).numpy()


def error(got, want):
    """The norm of what got differs by, relative to that of want; both are as often infinite."""
    finite = want.isfinite()
    assert got.shape == want.shape
    assert torch.equal(got[~finite].double(), want[~finite].double())
    got, want = got[finite].double(), want[finite].double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
