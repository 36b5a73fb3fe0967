"""ms-swift's runs on planned steps: what is refused, and, where ms-swift is installed, its own
command on two CPU processes against one without hf_flexseq."""

import importlib
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer

from bpe import train_bpe
from hf_flexseq import DataCollatorForFlexSeq
from tests.hf.tiny import tiny_llama
from tests.programs import ROOT

MODULE = "hf_flexseq.integrations.ms_swift"


TASKS = {"causal_lm": "swift.trainers.Seq2SeqTrainer", "dpo": "swift.rlhf_trainers.DPOTrainer"}


@pytest.fixture
def module(monkeypatch):
    """The plugin's module, beside stand-ins for ms-swift."""
    trainers = ModuleType("swift.trainers")
    trainers.Seq2SeqTrainer = type("Seq2SeqTrainer", (Trainer,), {})
    trainers.TrainerFactory = SimpleNamespace(TRAINER_MAPPING=dict(TASKS))
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.trainers", trainers)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def settings(args=(), template=(), *, multimodal=False, llama=()):
    """What ms-swift makes a trainer of, by default with nothing that is refused."""
    llama = dict(llama)
    default = {"sequence_parallel_size": 1, "is_binary_loss_scale": True}
    default |= {"_loss_scale": "default", "task_type": "causal_lm"}
    model = SimpleNamespace(
        model_meta=SimpleNamespace(is_multimodal=multimodal, model_type="qwen3_vl")
    )
    return {
        "model": model,
        "args": SimpleNamespace(**dict(args)),
        "template": SimpleNamespace(
            **{**default, "get_base_model": lambda given: tiny_llama(**llama), **dict(template)}
        ),
    }


def test_the_factory_is_told_of_classes_that_can_be_imported(module):
    module.register(max_tokens_per_rank=100)
    names = module.TrainerFactory.TRAINER_MAPPING
    for task, kind in (("causal_lm", module.PlannedTrainer), ("dpo", module.RefusedTrainer)):
        package, _, name = names[task].rpartition(".")
        assert getattr(importlib.import_module(package), name) is kind
    with pytest.raises(ValueError, match="pipeline_parallel_size=2: ms-swift loads the whole"):
        module.register(pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="no option 'max_tokens', did you mean 'max_tokens_per"):
        module.register(max_tokens=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"template": {"sequence_parallel_size": 2}}, "sequence_parallel_size=2"),
        ({"template": {"is_binary_loss_scale": False, "_loss_scale": "react"}}, "'react'"),
        ({"args": {"enable_dft_loss": True}}, "enable_dft_loss=True"),
        ({"args": {"enable_channel_loss": True}}, "enable_channel_loss=True"),
        ({"args": {"loss_type": "mine"}}, "loss_type='mine'"),
        ({"args": {"predict_with_generate": True}}, "predict_with_generate=True"),
        ({"multimodal": True}, "the multimodal model qwen3_vl"),
    ],
)
def test_what_ms_swift_alone_can_compute_is_refused(module, given, message):
    module.register()
    with pytest.raises((NotImplementedError, ValueError), match=f"does not support .*{message}"):
        module.PlannedTrainer(**settings(**given))


def test_settings_and_model_are_refused_together(module):
    module.register()
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    wrong = {"args": args | {"enable_dft_loss": True}, "llama": {"attention_dropout": 0.1}}
    with pytest.raises(NotImplementedError, match="^3 reasons") as raised:
        module.PlannedTrainer(**settings(template={"sequence_parallel_size": 4}, **wrong))
    _, first, second, third = str(raised.value).splitlines()
    assert "sequence_parallel_size=4" in first
    assert first.endswith(
        "per_device_train_batch_size=2 and gradient_accumulation_steps=1 keep the tokens of a step"
    )
    assert "enable_dft_loss=True" in second
    assert "attention_dropout=0.1" in third


@pytest.mark.parametrize(("task", "said"), [("seq_cls", "'seq_cls'"), ("causal_lm", "swift rlhf")])
def test_other_tasks_are_refused_by_name(module, task, said):
    with pytest.raises(NotImplementedError, match=f"does not support .*{said}"):
        module.RefusedTrainer(**settings(template={"task_type": task}))


def joined(batch):
    """What ms-swift makes of a batch with `packing`, whose examples are lists of sequences."""
    sequences = [one for row in batch for one in row]
    columns = {name: [value for one in sequences for value in one[name]] for name in sequences[0]}
    columns["position_ids"] = [at for one in sequences for at in range(len(one["input_ids"]))]
    return {name: torch.tensor([values]) for name, values in columns.items()}


def test_packed_examples_are_taken_apart_into_their_sequences():
    three = {"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}
    one, two = ({"input_ids": [4] * size, "labels": [-100, 4][:size]} for size in (1, 2))
    batch = DataCollatorForFlexSeq(joined)([[three, two], [one]])
    assert batch["lengths"] == [3, 2, 1]
    assert batch["shift_labels"].tolist() == [[-100, 3, -100, 4, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert not {"other_rows", "first_labels"} & batch.keys()


# ---- ms-swift's own command


def marked(test):
    """Mark a test that runs ms-swift's command."""
    missing = pytest.mark.skipif(find_spec("swift") is None, reason="ms-swift is not installed")
    for mark in (pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(600), missing):
        test = mark(test)
    return test


STEPS = 20
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
PLUGIN = """
from hf_flexseq.integrations.ms_swift import register
register(cost_model="estimate", max_tokens_per_rank=300, plan_trace="plans.jsonl")
"""
# ms-swift packs for flash attention alone, which no CPU has. SDPA keeps sequences of a row apart
# where their positions begin again.
ANY_ATTENTION = """
from swift.arguments import SftArguments
def check(self):
    self.padding_free = self.padding_free or self.packing
SftArguments._check_padding_free = check
"""
OPTIONS = {
    "model": "model",
    "model_type": "qwen2",
    "template": "qwen2_5",
    "dataset": "data.jsonl",
    "val_dataset": "val.jsonl",
    "tuner_type": "full",
    "torch_dtype": "float32",
    "attn_impl": "sdpa",
    "optim": "sgd",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "save_steps": STEPS,
    "eval_steps": STEPS,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "use_cpu": True,
    "report_to": "none",
    "check_model": False,
    "add_version": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model, its tokenizer, data of very different lengths, and the plugin."""
    folder = tmp_path_factory.mktemp("swift")
    rng = random.Random(0)

    def words(count):
        return " ".join(rng.choice(WORDS) for _ in range(count))

    tokenizer = train_bpe([words(200) for _ in range(20)], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    for name, count in (("data.jsonl", 58), ("val.jsonl", 6)):
        with (folder / name).open("w") as file:
            for _ in range(count):
                answer = words(1 + int(4 * rng.paretovariate(1.0)) % 200)
                question = {"role": "user", "content": words(1 + rng.randrange(10))}
                messages = [question, {"role": "assistant", "content": answer}]
                print(json.dumps({"messages": messages}), file=file)
    (folder / "plugin.py").write_text(PLUGIN)
    (folder / "any_attention.py").write_text(ANY_ATTENTION)
    return folder


def run(folder, output, ranks, batch=8, **options):
    """What a run of `swift sft` says. ranks: processes; None without the plugin, in one. batch:
    examples of all ranks."""
    plugins = ["any_attention.py"]
    options = {**OPTIONS, "output_dir": output, **options}
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "USE_HF": "1"}
    if ranks is not None:
        plugins.append("plugin.py")
        options["ddp_backend"] = "gloo"
        environment["NPROC_PER_NODE"] = str(ranks)
    batch //= ranks or 1
    options |= {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    words += ["--external_plugins", *plugins]
    (package,) = find_spec("swift").submodule_search_locations
    script = f"{package}/cli/main.py"
    done = subprocess.run(
        [sys.executable, script, "sft", *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def logged(folder, output):
    state = json.loads((folder / output / f"checkpoint-{STEPS}/trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if {"loss", "eval_loss"} & entry.keys()]


# ms-swift's sampler leaves out what does not divide by the processes, before it shuffles: 58
# sequences are an even number, and so are the 14 rows of this length.
ROWS = {
    "padded": {},
    "padding_free": {"padding_free": True},
    "packing": {"packing": True, "packing_length": 560, "batch": 2},
}


@pytest.mark.parametrize("rows", ROWS)
@marked
def test_two_processes_end_with_the_weights_of_ms_swift_in_one(folder, rows):
    stock, planned = (f"{kind}-{rows}" for kind in ("stock", "planned"))
    (folder / "plans.jsonl").unlink(missing_ok=True)
    for output, ranks in ((stock, None), (planned, 2)):
        code, said = run(folder, output, ranks, **ROWS[rows])
        assert code == 0, said[-3000:]
    files = ("model", f"{stock}/checkpoint-{STEPS}", f"{planned}/checkpoint-{STEPS}")
    before, wanted, found = (load_file(folder / file / "model.safetensors") for file in files)
    apart = sum(float((wanted[n] - found[n]).double().square().sum()) for n in wanted)
    update = sum(float((wanted[n] - before[n]).double().square().sum()) for n in wanted)
    assert (apart / update) ** 0.5 < 1e-6
    for one, other in zip(logged(folder, stock), logged(folder, planned), strict=True):
        named = {name for name in ("loss", "eval_loss", "grad_norm") if name in one}
        assert named <= other.keys()
        for name in named:
            assert one[name] == pytest.approx(other[name], rel=1e-4)
    assert len((folder / "plans.jsonl").read_text().splitlines()) == STEPS
