"""Calibration of a vision tower: what is run, what the fit finds, and which bytes are counted."""

import dataclasses
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from hf_flexseq.base.layers import FULL
from hf_flexseq.base.topology import Topology
from hf_flexseq.cli.calibrate import _summary
from hf_flexseq.cost.analytic import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.cost.tower import TowerCost, TowerShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration import choose, drawn_images, tower_trial
from hf_flexseq.hf.calibration.choose import fit_key, with_counted_tower
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.hf.calibration.probe import ModelProbe, ModelProbes
from hf_flexseq.hf.calibration.tower_trial import try_tower
from hf_flexseq.hf.model.facts import model_facts
from hf_flexseq.hf.model.towers import tower_parameters
from hf_flexseq.hf.model.vision import VisionModel
from hf_flexseq.profiler import calibrate as profiler
from hf_flexseq.profiler.calibrate import Calibration
from hf_flexseq.profiler.design import Effort, LayerType, make_design
from hf_flexseq.profiler.fit import Sample, Terms, fit
from hf_flexseq.profiler.tower_runs import (
    ImagesShape,
    held_out_images,
    images_s,
    images_shapes,
    most_patches,
    with_tower,
)
from tests.budget import others_slow
from tests.costs import simple_cost
from tests.hf.vision import tiny_vision_model
from tests.hf.vision_families import FAMILIES
from tests.ranks import join, run_threads

ONE_RANK = Topology(nodes=1, ranks_per_node=1)
CPU = torch.device("cpu")
QUICK = Effort(budget_s=0.01, rounds=1, held_out=1)
SIZES = tuple(16 * 4**power for power in range(5))  # up to 4,096 patches
TOWER = TowerCost(
    patch_s=2e-6,
    pair_s=3e-10,
    image_s=4e-5,
    call_s=1e-3,
    patch_bytes=1e5,
    token_bytes=1e4,
    patches_per_token=4.0,
)
SHAPE = ModelShape(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate=4096,
    vocab=32000,
    params=200_000_000,
    tower=TowerShape(
        layers=8, hidden=512, intermediate=2048, patches_per_token=4.0, row_numbers=1024
    ),
)
MODEL = {LayerType(FULL, None): 8}
ESTIMATE = analytic_cost_model(SHAPE, DEVICES["H100"], ONE_RANK)


# ---- the fit


def fitted(shapes, tower=TOWER):
    """The tower that is fitted to runs which take what they do by `tower`."""
    sizes = {shape.patches for shape in shapes}
    terms = Terms.of(ESTIMATE, SHAPE, one_image_size=len(sizes) == 1)
    samples = [Sample(shape=shape, seconds=images_s(tower, shape)) for shape in shapes]
    return with_tower(simple_cost(tower=TOWER), fit(samples, terms)).tower


@pytest.mark.parametrize("changes", [{}, {"image_s": 0.0}, {"pair_s": 0.0, "call_s": 0.0}])
def test_a_fit_recovers_the_constants_of_a_tower(changes):
    truth = dataclasses.replace(TOWER, **changes)
    found = fitted(images_shapes(4096, SIZES), truth)
    for name in ("patch_s", "pair_s", "image_s", "call_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6, abs=1e-15)
    assert (found.patch_bytes, found.patches_per_token) == (1e5, 4.0)


def test_where_images_have_one_size_patches_stand_for_all_of_it():
    shapes = images_shapes(most_patches((729,)), (729,))
    found = fitted(shapes)
    assert (found.pair_s, found.image_s) == (0.0, 0.0)
    for images in (1, 3, 7):
        shape = ImagesShape(images=images, patches=729)
        assert images_s(found, shape) == pytest.approx(images_s(TOWER, shape))
    assert [shape.images for shape in shapes] == [8, 1]
    assert held_out_images(shapes) == [ImagesShape(images=6, patches=729)]


# ---- the design


def images_of(design):
    return [shape for shape in design.shapes if isinstance(shape, ImagesShape)]


def test_runs_of_as_many_patches_differ_in_pairs_and_the_sizes_follow_the_budget():
    largest = []
    for budget_s in (1e-3, 0.05, 1e6):
        effort = Effort(budget_s=budget_s)
        design = make_design(MODEL, SHAPE, ESTIMATE, ONE_RANK, effort, image_sizes=SIZES)
        one, four, many, *_, few = images_of(design)
        assert one.all_patches == four.all_patches == many.all_patches
        assert one.pairs == 4 * four.pairs == 16 * many.pairs
        assert few.has_few_tokens
        largest.append(one.patches)
        timed = {shape.patches for shape in images_of(design)}
        assert all(math.isqrt(shape.patches) ** 2 == shape.patches for shape in design.images)
        assert not timed & {shape.patches for shape in design.images}
    assert largest == [256, 1024, 4096]


def test_images_take_no_more_than_half_the_memory():
    most = 2 * 1500 * ESTIMATE.tower.patch_bytes
    held = dataclasses.replace(ESTIMATE, budget_bytes=most)
    design = make_design(MODEL, SHAPE, held, ONE_RANK, Effort(budget_s=1e6), image_sizes=SIZES)
    assert images_of(design)[0].patches == 1024


@pytest.mark.parametrize("sizes, patch_s", [((), 1e-6), (SIZES, 1.0), ((4096,), 1.0)])
def test_a_tower_that_does_not_run_or_takes_too_long_has_no_runs(sizes, patch_s):
    slow = dataclasses.replace(ESTIMATE.tower, patch_s=patch_s)
    estimate = dataclasses.replace(ESTIMATE, tower=slow)
    design = make_design(MODEL, SHAPE, estimate, ONE_RANK, Effort(), image_sizes=sizes)
    assert not images_of(design)
    assert not design.images


# ---- bytes


def seen_bytes(model, image):
    """Bytes that autograd saves of an image for the backward, parameters left out."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    vision = VisionModel(model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vision.encode([image, image], vision.calls([image, image]))
    return sum(one.untyped_storage().nbytes() for key, one in kept.items() if key not in own)


def tiny(name):
    """A tiny model in float32 with transformers' usual attention."""
    model = tiny_vision_model(name).float().train()
    model.set_attn_implementation("sdpa")
    return model


def facts_of(model):
    return model_facts(model, Accelerator(cpu=True))


@pytest.mark.parametrize(
    "name", others_slow(["qwen3_vl", "qwen2_5_vl", "gemma3", "smolvlm"], tried=["qwen3_vl"])
)
def test_the_bytes_of_a_patch_are_those_that_autograd_saves(name):
    model = tiny(name)
    state = torch.random.get_rng_state()
    tried = try_tower(facts_of(model))
    assert bool((torch.random.get_rng_state() == state).all())
    patches = tried.patches[min(1, len(tried.patches) - 1)]
    image = tried.draw(patches)
    assert seen_bytes(model, image) == pytest.approx(2 * patches * tried.patch_bytes, rel=0.02)
    width = model.config.text_config.hidden_size * (2 if name == "qwen3_vl" else 1)
    assert tried.token_bytes == 2 * 4 * width
    assert image.tokens == patches / tried.patches_per_token


def test_checkpointed_layers_keep_their_inputs_and_one_of_them_all():
    model = tiny("qwen3_vl")
    whole = try_tower(facts_of(model)).patch_bytes
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = try_tower(facts_of(model)).patch_bytes
    hidden, layers = 32, 2
    of_layer = (whole - again) * layers / (layers - 1)
    inputs = again - of_layer / layers
    assert of_layer > 10 * 4 * hidden
    assert layers * 4 * hidden <= inputs < again < whole


def test_the_whole_tower_parts_of_it_and_none_are_told_apart(tmp_path):
    model = tiny("gemma3")
    found = [facts_of(model)]
    for parameter in model.model.vision_tower.parameters():
        parameter.requires_grad_(False)
    found.append(facts_of(model))
    for parameter in tower_parameters(model):
        parameter.requires_grad_(False)
    found.append(facts_of(model))
    parts = [one.trained_tower for one in found]
    projector = "model.multi_modal_projector"
    assert parts == [("model.vision_tower", projector), (projector,), ()]
    tried = [try_tower(one) for one in found]
    whole, projected, none = (one.patch_bytes for one in tried)
    assert whole > 5 * projected > 0
    assert none == 0.0
    assert tried[2].token_bytes * 2 == tried[1].token_bytes == tried[0].token_bytes
    keys = [str(fit_key(one, ONE_RANK, CPU)) for one in found]
    assert len(set(keys)) == 3

    # a copy gives gradients to the same parts, and to nothing else
    for facts, expected in zip(found, (parts[0], parts[1], ()), strict=True):
        probe = ModelProbes(facts, Communicator(), CPU)
        copy = probe(probe.layers)
        copy.run_tower(1, probe.image_sizes[0])()
        trained = {name for name, one in copy.model.named_parameters() if one.grad is not None}
        assert all(name.startswith(expected) for name in trained)
        assert all(any(name.startswith(part) for name in trained) for part in expected)


def test_adapters_in_a_tower_are_timed_by_gradients_through_it_and_keep_what_weights_keep():
    peft = pytest.importorskip("peft")
    model = tiny("qwen3_vl")
    whole = try_tower(facts_of(model)).patch_bytes
    options = peft.LoraConfig(r=2, target_modules=["qkv", "q_proj"], lora_dropout=0.0)
    facts = facts_of(peft.get_peft_model(model, options).get_base_model())
    assert facts.trained_tower == ("adapters",)
    assert try_tower(facts).patch_bytes == whole
    probes = ModelProbes(facts, Communicator(), CPU)
    copy = probes(probes.layers)
    copy.run_tower(2, probes.image_sizes[0])()
    assert all(one.grad is None for one in copy.model.parameters())


# ---- a calibration


@pytest.fixture
def any_fit_will_do(monkeypatch):
    """So tiny a model, on a busy machine, shows little but noise."""
    monkeypatch.setattr(profiler, "fit", lambda *args: fit(*args) | {"head": 1e-12})
    monkeypatch.setattr(Calibration, "objection", lambda self: None)


@pytest.mark.usefixtures("any_fit_will_do")
def test_a_calibration_runs_the_tower_and_says_what_it_takes(monkeypatch):
    encoded = []
    encode = VisionModel.encode

    def noting(self, images, calls):
        features = encode(self, images, calls)
        if not isinstance(features, tower_trial.FakeTensor):
            encoded.append((len(images), features.requires_grad))
        return features

    monkeypatch.setattr(VisionModel, "encode", noting)
    config = {"model_type": "qwen3_vl", **FAMILIES["qwen3_vl"].config}
    record = calibrate(config, dtype="float32", effort=QUICK)
    assert {count for count, _ in encoded} == {1, 4, 16}
    assert all(has_graph for _, has_graph in encoded)
    tower = record["cost_model"]["tower"]
    assert tower["patch_s"] + tower["pair_s"] + tower.get("image_s", 0) + tower["call_s"] > 0
    assert len(record["hold_out"]["tower"]) == 2
    assert Calibration.from_record(record).to_record() == {
        name: record[name] for name in ("cost_model", "hold_out", "tokens")
    }
    (line,) = [one for one in _summary(record).splitlines() if one.startswith("vision tower")]
    assert "vision tower, trained: " in line
    assert "on images held out of the fit" in line


@pytest.mark.usefixtures("any_fit_will_do")
def test_a_tower_that_takes_no_drawn_images_is_priced_at_the_speed_of_text(monkeypatch, caplog):
    monkeypatch.setattr(tower_trial, "image_forms", lambda config, names: iter(()))
    monkeypatch.setattr(tower_trial, "_known", {})
    speeds = []
    with_tower_of = choose.with_tower_of

    def noting(estimate, cost):
        found = with_tower_of(estimate, cost)
        speeds.append((found.tower.patch_s, estimate.tower.patch_s * cost.linear_s))
        speeds[-1] += (estimate.linear_s,)
        return found

    monkeypatch.setattr(choose, "with_tower_of", noting)
    config = {"model_type": "qwen3_vl", **FAMILIES["qwen3_vl"].config}
    with caplog.at_level(logging.INFO, "hf_flexseq"):
        record = calibrate(config, dtype="float32", effort=QUICK)
    ((patch_s, scaled, estimated_linear_s),) = speeds
    assert record["cost_model"]["tower"]["patch_s"] == patch_s
    assert patch_s == pytest.approx(scaled / estimated_linear_s)
    assert "tower" not in record["hold_out"]
    assert "priced at the measured speed of text" in caplog.text
    assert "does not run on drawn images: its images are of a form" in caplog.text
    assert "at the speed of text, since it was not timed" in _summary(record)


@pytest.mark.usefixtures("any_fit_will_do")
def test_a_tower_that_fails_where_it_is_timed_is_priced_at_the_speed_of_text(monkeypatch, caplog):
    def fail(self, images, patches):
        raise torch.OutOfMemoryError("no memory for the images")

    monkeypatch.setattr(ModelProbe, "run_tower", fail)
    config = {"model_type": "qwen3_vl", **FAMILIES["qwen3_vl"].config}
    with caplog.at_level(logging.INFO, "hf_flexseq"):
        record = calibrate(config, dtype="float32", effort=QUICK)
    assert "tower" not in record["hold_out"]
    assert record["cost_model"]["tower"]["patch_s"] > 0
    assert "the vision tower cannot be timed: OutOfMemoryError('no memory" in caplog.text
    assert "priced at the measured speed of text" in caplog.text


def test_a_trial_that_fails_in_any_way_ends_no_run(monkeypatch, caplog):
    monkeypatch.setattr(tower_trial, "_known", {})
    monkeypatch.setattr(VisionModel, "work_of", lambda self, tensors: 1 / 0)
    with caplog.at_level(logging.INFO, "hf_flexseq"):
        assert try_tower(facts_of(tiny("qwen3_vl"))) is None
    assert "does not run on drawn images: division by zero" in caplog.text


def sizes_of_rank(rank, world_size, by_rank):
    probes = SimpleNamespace(image_sizes=by_rank[rank])
    return profiler._image_sizes(probes, join())


def test_ranks_run_a_tower_on_the_same_images_or_on_none():
    assert run_threads(sizes_of_rank, 2, [SIZES, SIZES]) == [list(SIZES)] * 2
    assert run_threads(sizes_of_rank, 2, [SIZES, ()]) == [(), ()]


def test_images_are_no_larger_than_a_tower_s_table_of_places():
    model = tiny("gemma4")
    probes = ModelProbes(facts_of(model), Communicator(), CPU)
    side = model.config.vision_config.position_embedding_size
    assert [math.isqrt(patches) for patches in probes.image_sizes] == [4, 8, 16]
    assert 16 <= side < 32
    probes(probes.layers).run_tower(1, probes.image_sizes[-1])()


@pytest.mark.parametrize(
    "tower, errors, message",
    [
        (dataclasses.replace(TOWER, patch_s=0.0, pair_s=0.0), (0.1,), "tower takes no measurable"),
        (TOWER, (0.9, 0.3), "images held out of the fit are off by 60% on average"),
        (TOWER, (0.2, 0.3), None),
    ],
)
def test_an_implausible_tower_is_refused(tower, errors, message):
    found = Calibration(
        cost=dataclasses.replace(ESTIMATE, tower=tower),
        errors=(0.1,),
        tokens=1,
        tower_errors=errors,
    )
    objection = found.objection()
    assert objection is None if message is None else message in objection


def test_counted_bytes_replace_estimated_ones_and_seconds_stay():
    facts = facts_of(tiny("gemma3"))
    found = with_counted_tower(simple_cost(tower=TOWER), facts).tower
    tried = try_tower(facts)
    assert (found.patch_s, found.call_s) == (TOWER.patch_s, TOWER.call_s)
    assert found.patch_bytes == tried.patch_bytes
    assert found.patches_per_token == 4.0  # pooled, which no option says
    text = simple_cost()
    assert with_counted_tower(text, facts) == text


# ---- drawn images


FORMS = ("mistral3", "gemma4", "lfm2_vl", "minicpmv4_6", "llava_next", "video_llama_3")


@pytest.mark.parametrize("name", others_slow(FORMS, tried=["lfm2_vl"]))
def test_images_of_other_forms_are_drawn_as_the_tower_takes_them(name):
    model = tiny(name)
    tried = try_tower(facts_of(model))
    vision = VisionModel(model)
    image = tried.draw(tried.patches[0])
    with torch.no_grad():
        features = vision.encode([image], vision.calls([image]))
    assert len(features) == image.tokens
    assert vision.work_of(image.arguments)[0] == tried.patches[0] <= drawn_images.MOST_PATCHES
