"""`flexseq prove`: what is sound is proven, and errors of training that others' users reported are
found. Errors inside of a model are planted in `test_probe.py`, those of images, router losses and
memory in `test_prove_errors.py`."""

import json

import pytest
import torch
import transformers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

from hf_flexseq.cli import main
from hf_flexseq.cli import prove as page
from hf_flexseq.hf.model import probe
from hf_flexseq.hf.model.small import plain_options, small_model
from hf_flexseq.prove import command
from hf_flexseq.prove.documents import (
    IMAGE_COUNTS,
    LONGEST,
    documents,
    drawn_images,
    image_documents,
)
from hf_flexseq.prove.pinned import pin_routers
from hf_flexseq.prove.subject import model_of, with_router_loss
from hf_flexseq.prove.trained import call_alone, step_alone
from hf_flexseq.steps.differences import StepOutcome, difference
from tests.budget import others_nightly
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def llama():
    return probe.lively_copy(small_model(LlamaForCausalLM, {}), torch.float64)


@pytest.fixture(scope="module")
def rows(llama):
    return documents(llama.config, 2)


@pytest.fixture(scope="module")
def step(llama, rows):
    return step_alone(llama, rows)


# ---- errors of training


def scaled(step, factor):
    gradients = {name: factor * gradient for name, gradient in step.gradients.items()}
    return step._replace(gradients=gradients)


def with_labels(rows, change):
    return [{**row, "labels": change(list(row["labels"]), row["input_ids"])} for row in rows]


def mean_of_means(llama, rows):
    """The mean over documents with a target of each one's own mean."""
    steps = [step_alone(llama, [row]) for row in rows if any(x >= 0 for x in row["labels"][1:])]
    gradients = {
        name: sum(step.gradients[name] for step in steps) / len(steps)
        for name in steps[0].gradients
    }
    return StepOutcome(sum(step.loss for step in steps) / len(steps), gradients)


def boundary_lost(labels, ids):
    """The target at the edge between two ranks' halves is ignored."""
    if len(labels) == LONGEST:
        labels[LONGEST // 2] = -100
    return labels


ERRORS = {
    "a mean of the documents' means": lambda model, rows, step: mean_of_means(model, rows),
    "gradients averaged twice": lambda model, rows, step: scaled(step, 0.5),
    "prompts are learned": lambda model, rows, step: step_alone(
        model, with_labels(rows, lambda labels, ids: ids)
    ),
    "the target at a shard's edge is lost": lambda model, rows, step: step_alone(
        model, with_labels(rows, boundary_lost)
    ),
    "a document is dropped": lambda model, rows, step: step_alone(model, rows[:-1]),
    "documents packed as one": lambda model, rows, step: step_alone(
        model, [{k: [x for row in rows for x in row[k]] for k in rows[0]}]
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_training_is_found(error, llama, rows, step):
    wrong = ERRORS[error](llama, rows, step)
    assert not difference(wrong, step).within(command.FLOAT64)


def test_the_first_module_that_differs_is_named(llama):
    def attach(model):
        probe._attach(model)
        model.model.layers[2].self_attn.scaling *= 1.01

    wrong = probe.probe_model(
        llama, strategies=("zigzag",), changes=(), gradients=False, attach=attach
    )
    assert wrong[0].startswith("zigzag: the first module whose output differs is model.layers.2.")


# ---- the small model


def test_a_small_model_has_the_kinds_of_layers_of_a_large_one():
    config = Gemma3TextConfig(hidden_size=2560, num_hidden_layers=34, sliding_window=1024)
    small = small_model(Gemma3ForCausalLM, plain_options(config.to_diff_dict()))
    assert set(small.config.layer_types) == set(config.layer_types)
    assert small.config.sliding_window < 10
    assert small.num_parameters() < 100_000


def test_a_model_that_loses_digits_may_be_as_far_as_its_float32_and_no_further(llama):
    controls = (1e-6, 3e-4, 1)
    bounds = [command._bounds(llama, one, bf16=False).gradient for one in controls]
    assert bounds == [1e-4, 3e-4, 1e-3]


# ---- images, and router losses


def vision_model(name):
    return probe.lively_copy(small_model(getattr(transformers, name), {}), torch.float64)


FORMS = {
    "Qwen3VLForConditionalGeneration": ["image_grid_thw"],
    "LlavaForConditionalGeneration": ["pixel_values"],
    "Mistral3ForConditionalGeneration": ["image_sizes"],
    "Idefics3ForConditionalGeneration": ["pixel_attention_mask"],
    "LlavaOnevisionForConditionalGeneration": ["image_sizes"],
    "Lfm2VlForConditionalGeneration": ["spatial_shapes"],
}


@pytest.mark.parametrize("name", others_nightly(FORMS, tried=list(FORMS)[:2]))
def test_images_are_drawn_in_the_form_that_a_model_takes(name):
    model = vision_model(name)
    form = drawn_images(model, call_alone)
    assert set(FORMS[name]) <= form.draw(0).keys()
    rows = image_documents(form, IMAGE_COUNTS, 2)
    counts = []  # of tokens that stand for images
    for row in rows:
        counts.append(sum(token == form.placeholder for token in row["input_ids"]))
        is_part = [token == form.placeholder for token in row["input_ids"]]
        assert not any(
            part and label >= 0 for part, label in zip(is_part, row["labels"], strict=True)
        )
    assert [bool(count) for count in counts] == [bool(count) for count in IMAGE_COUNTS]
    first, second = rows[0]["input_ids"], rows[1]["input_ids"]
    shared = first.index(form.placeholder) + counts[1]
    assert first[:shared] == second[:shared]
    step = step_alone(model, rows)
    of_tower = [name for name in step.gradients if "vis" in name and "pos" not in name]
    assert any(step.gradients[name].any() for name in of_tower)


def test_the_router_loss_is_that_of_all_documents_and_as_large_as_the_other():
    model = vision_model("MixtralForCausalLM")
    rows = documents(model.config, 2)
    routed = with_router_loss(model)
    assert routed.facts.coefficient == 1.0
    without, with_loss = (
        step_alone(model, rows),
        step_alone(routed.model, rows, router=routed.facts),
    )
    assert with_loss.loss - without.loss > 0.5  # about 1 where experts are balanced, and more
    assert difference(with_loss, without).gradient > 0.1


# ---- on ranks


def proven(rank, world_size, name):
    return command.prove(name)


MEMORY = "auto, least memory"
# By model, further steps that are trained.
TITLES = {
    "LlamaForCausalLM": (MEMORY, "auto, FSDP2"),
    "Qwen3_5ForCausalLM": (MEMORY, "auto, FSDP2"),
    "Qwen3MoeForCausalLM": ("auto, FSDP2", "auto, experts over ranks", "auto, router loss"),
    "Qwen3VLMoeForConditionalGeneration": (
        *(MEMORY, "auto, router loss", "auto, one image"),
        *("auto, images", "zigzag, images", "balanced, images", "ulysses, images"),
    ),
    "Gemma3ForConditionalGeneration": ("auto, images", "ulysses, images"),
}


NOT_IN_SHARDS = "Qwen3VLMoeForConditionalGeneration"  # transformers cannot load it so


@pytest.mark.processes
@pytest.mark.parametrize("name", others_nightly(list(TITLES), tried=["LlamaForCausalLM"]))
def test_a_sound_model_is_proven_on_two_ranks(name):
    record = run_ranks(proven, 2, name, seconds=300)[0]
    assert page.holds(record)
    assert {"auto", "zigzag", "balanced", "ulysses"} <= record["steps"].keys()
    for title in TITLES[name]:
        assert record["steps"][title]["holds"]
    shown = page.page_of(json.loads(json.dumps(record)))
    assert shown.endswith("\nPROVEN")
    assert ("which has not run" in shown) == (name == NOT_IN_SHARDS)
    without = {**record, "steps": record["steps"] | {MEMORY: {"not_run": "it is refused"}}}
    shown = page.page_of(without)
    assert f"\nnot proven: {MEMORY}, which has not run\n" in shown
    record["steps"]["zigzag"]["holds"] = False
    assert not page.holds(record)
    assert "DIFFERS" in page.page_of(record)


def test_a_record_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path):
    for path in (tmp_path, tmp_path / "none" / "record.json"):
        assert main(["prove", "LlamaForCausalLM", "--json", str(path)]) == 2
        said = f"--json {path} cannot be written: name a file in a folder that exists"
        assert said in capsys.readouterr().err


def test_what_cannot_be_proven_is_told_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "0")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "unheard-of"}')
    uneven = tmp_path / "uneven.json"
    uneven.write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}')
    for name, message in (
        ("./no-such-folder", "./no-such-folder does not exist: give a folder"),
        ("LlamaConfig", "LlamaConfig is not a class of models: give the folder"),
        ("LlamaModel", "LlamaModel has no head that predicts tokens: name the"),
        (str(unknown), "model type `unheard-of`"),
        (str(uneven), "The hidden size (64) is not a multiple"),
        ("LlamaForSequenceClassification", "has no head that predicts tokens: name the"),
        ("Qwen2AudioForConditionalGeneration", "its forward computes a loss of its own"),
        ("LlamaForCausalLM", "1 rank shares nothing with others, and two are needed"),
        ("MambaForCausalLM", "MambaForCausalLM: it has layers of the kinds linear_attention"),
        (str(tmp_path), f"{tmp_path} has no configuration that transformers"),
        ("BltForCausalLM", "BltForCausalLM cannot be made small (ValueError: with narrow layers"),
    ):
        assert main(["prove", name]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1


# ---- in 16 bits: a token's experts do not depend on how sums are rounded


FAMILIES = ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM")


def chosen(model, rows, *, autocast):
    """The experts of each token in each layer, in the order of their numbers."""
    found = []

    def note(module, args, kwargs):
        found.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).sort(-1).values)

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for row in rows:
            call_alone(model, row)
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in found])


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(FAMILIES, tried=["GptOssForCausalLM"]))
def test_rounding_changes_no_experts(name):
    model, _ = model_of(name, whole=False)
    model = probe.lively_copy(model, torch.float32)
    rows = documents(model.config, 2)
    free, rounded = (chosen(model, rows, autocast=autocast) for autocast in (False, True))
    assert not torch.equal(free, rounded)
    assert pin_routers(model) >= 3
    free, rounded = (chosen(model, rows, autocast=autocast) for autocast in (False, True))
    assert torch.equal(free, rounded)
    assert len(free.unique(dim=0)) > 3, "not all tokens go to the same experts"
    gradients = step_alone(model, rows).gradients
    routers = [n for n in gradients if n.endswith(("mlp.router.weight", "mlp.gate.weight"))]
    assert len(routers) >= 3
    assert all(gradients[name].any() for name in routers)


def in_16_bits(rank, world_size, name):
    return command.prove(name, bf16=True)


@pytest.mark.processes
@pytest.mark.nightly
def test_a_mixture_is_proven_in_16_bits():
    for record in run_ranks(in_16_bits, 2, FAMILIES[0], seconds=170):
        steps = {title: one for title, one in record["steps"].items() if "not_run" not in one}
        assert {"auto", "zigzag", "auto, least memory", "auto, router loss"} <= steps.keys()
        for title, one in steps.items():
            if "FSDP2" not in title and "over ranks" not in title:  # which do not run on GPUs
                assert one["holds"], title
        assert any("it alone decides" in line for line in record["not_proven"])
