"""GGUF files: ordinary checkpoints that come of them, and files that nothing can come of."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dequantize
from arguments import ModelArguments
from dequantize import use_checkpoint
from model import load_base, load_tokenizer

gguf = pytest.importorskip("gguf", reason="GGUF files are read with the package gguf")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(dequantize, "HF_HOME", tmp_path / "cache")


def write_gguf(path, tokenizer, architecture="llama"):
    """A file of a small Llama with a quantized embedding; the model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(300)
    words = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        kind = gguf.GGMLQuantizationType.Q4_1 if "embed" in name else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(in_llama_cpp(name, tensor.numpy()), kind)
        named = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(named, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def in_llama_cpp(name, weight):
    """A weight as llama.cpp has it: the halves of rotated features alternate."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def test_a_file_becomes_a_checkpoint_without_marks_once(tmp_path, tokenizer):
    model = write_gguf(tmp_path / "small.gguf", tokenizer)
    for _ in range(2):
        args = ModelArguments(model_name_or_path=str(tmp_path), gguf_file="small.gguf")
        line = use_checkpoint(args)
        (folder,) = (tmp_path / "cache/hf_flexseq").iterdir()
        assert line.startswith("small.gguf has quantized weights: dequantized, they are in")
        assert (args.model_name_or_path, args.gguf_file) == (str(folder), None)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    named = load_tokenizer(args)
    assert named("import os").input_ids[-1] == tokenizer("import os").input_ids[-1]
    assert named.chat_template == "{{ messages }}"
    found = load_base(args, named)
    for name, weight in model.state_dict().items():
        is_exact = "embed" not in name and "lm_head" not in name
        torch.testing.assert_close(
            found.state_dict()[name], weight, atol=0 if is_exact else 0.01, rtol=0
        )
    found.save_pretrained(tmp_path / "again")
    AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert use_checkpoint(args) is None


def test_files_that_cannot_be_used_are_one_line(tmp_path, tokenizer):
    write_gguf(tmp_path / "odd.gguf", tokenizer, architecture="mammoth")
    (tmp_path / "text.gguf").write_text("a text")
    for name, said in {
        "odd.gguf": "does not read it (GGUF model with architecture mammoth is not supported yet.",
        "text.gguf": "does not start with the GGUF magic bytes",
        "none.gguf": "odd.gguf, text.gguf",
    }.items():
        with pytest.raises(ValueError) as error:
            use_checkpoint(ModelArguments(model_name_or_path=str(tmp_path), gguf_file=name))
        assert f"gguf_file={name!r}: " in str(error.value)
        assert said in str(error.value)
    assert not list(tmp_path.glob("cache/hf_flexseq/*"))
