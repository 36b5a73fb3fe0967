"""A GGUF file, as llama.cpp and its users exchange them, written as an ordinary checkpoint.

transformers reads such a file with the package `gguf`. What it returns can be trained, but bears
the marks of a quantized model, which are saved with it. So the file is read once, loses its marks,
and is written into the HuggingFace cache. Processes, references and adapters then load an ordinary
checkpoint by its folder.
"""

import hashlib
from pathlib import Path

import transformers
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file, is_gguf_available, quantization_config

from arguments import ModelArguments
from bpe import save_whole

# What transformers notes on a model that it has read from a GGUF file.
MARKS = ("hf_quantizer", "is_quantized", "quantization_method")


def use_checkpoint(args: ModelArguments) -> str | None:
    """Write the checkpoint of a GGUF file, unless the cache has it, and name it in `args`; return
    a line about it, None where `args` name no file.

    Raises ValueError for a file that transformers does not read, OSError for one that is not
    there.
    """
    if args.gguf_file is None:
        return None
    if not is_gguf_available():
        raise ValueError(f"gguf_file={args.gguf_file!r}: pip install gguf")
    file = Path(_find(args))
    folder = Path(HF_HOME) / "hf_flexseq" / f"gguf-{_digest(file, args.dtype)}"
    if not folder.exists():
        save_whole(lambda unfinished: _write(file, args.dtype, unfinished), folder)
    args.model_name_or_path, args.model_revision, args.gguf_file = str(folder), None, None
    return f"{file.name} has quantized weights: dequantized, they are in {folder}"


def _find(args: ModelArguments) -> str:
    """Return where the file is, in a folder or in the cache of the Hub."""
    if not Path(args.model_name_or_path).is_dir():
        return cached_file(args.model_name_or_path, args.gguf_file, revision=args.model_revision)
    file = Path(args.model_name_or_path) / args.gguf_file
    if not file.is_file():
        there = ", ".join(sorted(other.name for other in file.parent.glob("*.gguf")))
        raise ValueError(
            f"gguf_file={args.gguf_file!r}: {file.parent} has {there or 'no such file'}"
        )
    return str(file)


def _digest(file: Path, dtype: str) -> str:
    """Return a name for what this transformers reads in a file."""
    state = file.stat()
    parts = (file.resolve(), state.st_size, state.st_mtime_ns, dtype, transformers.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _write(file: Path, dtype: str, folder: Path) -> None:
    """Write model and tokenizer of a file into a folder."""
    # later versions keep the weights of some architectures in blocks, unless asked not to
    dense = {}
    if hasattr(quantization_config, "GgufConfig"):
        dense["quantization_config"] = quantization_config.GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=dtype, **dense
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"gguf_file={file.name!r}: transformers {transformers.__version__} does not read it "
            f"({error}): name the original checkpoint as model_name_or_path"
        ) from error
    for mark in MARKS:
        vars(model).pop(mark, None)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
