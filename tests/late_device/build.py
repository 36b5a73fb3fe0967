"""Build the device's library, once for each environment."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
OPTIONS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")


def reason_unavailable() -> str | None:
    """Return why the device cannot be built here; None if it can."""
    if os.uname().sysname != "Linux":
        return "the device protects pages and catches faults as Linux does"
    if compiler() is None:
        return "there is no C++ compiler"
    if not (torch_folder() / "include/ATen/ATen.h").exists():
        return "torch is installed without its headers"
    if (torch_folder() / "lib/libtorch_cuda.so").exists():
        return "this build of torch has CUDA's own device"
    return None


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def library() -> Path:
    """Return the path of the built library, from a folder of the user's cache."""
    digest = hashlib.sha256()
    digest.update(f"{metadata.version('torch')} {compiler()} {OPTIONS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_flexseq_tests"
    target = cache / f"late_device_{digest.hexdigest()[:16]}.so"
    if not target.exists():
        _build(target)
    return target


def _build(target: Path) -> None:
    """Compile into a file of this process, and put it in place at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    include = torch_folder() / "include"
    own = target.with_suffix(f".{os.getpid()}")
    command = [str(compiler()), *OPTIONS, f"-I{include}"]
    command += [f"-I{include}/torch/csrc/api/include", str(SOURCES / "device.cpp"), "-o", str(own)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the device does not compile: {done.stderr[:2000]}")
    own.replace(target)
