"""The fit finds the constants that made its timings; a measured model is kept whole, and is the
same on every rank."""

import dataclasses
import importlib
import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from hf_flexseq.base.layers import FULL, Reach, RecurrentShape
from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.analytic import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.shapes import ModelShape
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration import choose
from hf_flexseq.hf.calibration.choose import CostSubject, fit_key, make_cost
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.hf.model.facts import model_facts
from hf_flexseq.plan import check
from hf_flexseq.profiler import calibrate as profiler
from hf_flexseq.profiler import measure
from hf_flexseq.profiler.cache import cache_path, load_cached, save_whole
from hf_flexseq.profiler.calibrate import Calibration
from hf_flexseq.profiler.design import (
    Effort,
    LayerType,
    ProbeShape,
    in_groups,
    make_design,
    measured_degrees,
)
from hf_flexseq.profiler.fit import Sample, Terms, fit, nnls, price
from hf_flexseq.profiler.transfers import AllToAllRun, HopRun, RingRun
from tests.hf.tiny import tiny_llama
from tests.plans import plan_of_groups
from tests.ranks import join, run_ranks, run_threads

ATTENTION = LayerType(FULL, None)
WINDOW = LayerType(Reach(window=512), None)
CHUNK = LayerType(Reach(chunk=700), None)
DELTA = LayerType(None, "gated_delta")
SIZES = {"hidden": 1024, "heads": 8, "kv_heads": 2, "head_dim": 128, "intermediate": 4096}
SHAPE = ModelShape(layers=8, vocab=32000, params=200_000_000, **SIZES)
SCANS = RecurrentShape(
    kind="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=8, width=4, channels=96
)
MODEL = {ATTENTION: 8}
# what a shape has beside that of `SHAPE`, and the layers of each type
MODELS = {
    "large": ({}, MODEL),
    "small": ({"params": 40_000_000}, MODEL),
    "windows and chunks": (
        {"reaches": ((4, WINDOW.reach), (3, CHUNK.reach))},
        {WINDOW: 4, CHUNK: 3, ATTENTION: 1},
    ),
    "recurrent": ({"without_attention": 6, "recurrent": ((6, SCANS),)}, {DELTA: 6, ATTENTION: 2}),
}
TOPOLOGY = Topology(nodes=1, ranks_per_node=4)
ONE_RANK = Topology(nodes=1, ranks_per_node=1)
ESTIMATE = analytic_cost_model(SHAPE, DEVICES["H100"], TOPOLOGY)
TERMS = Terms.of(ESTIMATE, SHAPE)
SECONDS = {
    "linear": 3e-7,
    "head": 5e-7,
    "layer": 1e-4,
    "micro-batch": 2e-3,
    FULL: 2e-10,
    WINDOW.reach: 3e-10,
    CHUNK.reach: 1.5e-10,
    ("scan", "gated_delta"): 2e-6,
    ("again", "gated_delta"): 6e-7,
    "launch": 1e-5,
    "post": 1e-4,
    "message": 2e-6,
    "group": 3e-4,
    ("ulysses", 2): 1 / 4e9,
    ("ulysses", 4): 1 / 2e9,
    ("zigzag", 2): 1.5 / 4e9,
    ("zigzag", 4): 1.5 / 2e9,
}
TINY = tiny_llama().config.to_dict()
QUICK = Effort(budget_s=0.01, rounds=1, held_out=2)


def model_of(name, topology=TOPOLOGY):
    """Shape and layers of a model, and an estimate in which nothing hides anything, so that
    seconds add up."""
    changes, layers = MODELS[name]
    shape = dataclasses.replace(SHAPE, **changes)
    estimate = analytic_cost_model(shape, DEVICES["H100"], topology)
    overlap = {"ring_overlap": 0.0, "all_to_all_overlap": 0.0, "host_overlap": 0.0}
    return shape, layers, dataclasses.replace(estimate, **overlap)


def design_of(model=MODEL, shape=SHAPE, estimate=ESTIMATE, topology=TOPOLOGY, **effort):
    return make_design(model, shape, estimate, topology, Effort(**effort))


def timed(design, shape, model, estimate, topology):
    """Time each run by the cost model that `SECONDS` gives its copy; transfers by hand."""
    samples = []
    for one in design.shapes:
        if one.layers:
            cost = price(SECONDS, estimate, model, one.layers)
            layout = in_groups(one, topology)
            (whole_ns,) = lockstep_ns(cost, [layout.micro_batch], layout.lengths, topology)
            seconds = whole_ns / 1e9
        else:
            peers = one.degree - 1
            posts, messages = (3 * peers, 6 * peers)
            if one.strategy == "ulysses":
                posts, messages = (4, 8 * peers)
            moved = Terms.of(estimate, shape).bytes_moved(one)
            seconds = moved * SECONDS[one.strategy, one.degree] + SECONDS["group"]
            seconds += posts * SECONDS["post"] + messages * SECONDS["message"]
        samples.append(Sample(shape=one, seconds=seconds))
    return samples


def found_by(name, noise=0.0, topology=TOPOLOGY):
    """Cost models of a whole model: the true one, and the one fitted to timings of it."""
    shape, layers, estimate = model_of(name, topology)
    design = design_of(layers, shape, estimate, topology)
    rng = random.Random(3)
    samples = []
    for sample in timed(design, shape, layers, estimate, topology):
        error = noise * rng.uniform(-1, 1)
        samples.append(dataclasses.replace(sample, seconds=sample.seconds * (1 + error)))
    seconds = fit(samples, Terms.of(estimate, shape))
    return price(SECONDS, estimate, layers, layers), price(seconds, estimate, layers, layers)


# ---- the fit


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("noise, tolerance", [(0.0, 0.01), (0.02, 0.1)])
def test_a_fit_recovers_the_constants(model, noise, tolerance):
    truth, found = found_by(model, noise)
    for name in ("attention_s", "linear_s", "micro_batch_s", "post_s", "launch_s"):
        loose = 1 if name in ("attention_s", "linear_s") else 5
        wanted = getattr(truth, name)
        assert getattr(found, name) == pytest.approx(wanted, rel=loose * tolerance), name
    for one, wanted in zip(found.kinds, truth.kinds, strict=True):
        assert (one.reach, one.share) == (wanted.reach, wanted.share)
        assert one.attention_s == pytest.approx(wanted.attention_s, rel=2 * tolerance)
    for kind, of_truth in zip(found.recurrent, truth.recurrent, strict=True):
        assert kind.token_s == pytest.approx(of_truth.token_s, rel=tolerance)
        assert kind.again_s == pytest.approx(of_truth.again_s, rel=10 * tolerance)
        assert kind.summary_bytes == pytest.approx(of_truth.summary_bytes)
    speeds, wanted_speeds = dict(found.bandwidths), dict(truth.bandwidths)
    assert speeds == pytest.approx(wanted_speeds, rel=2 * tolerance)
    assert found.ring_bytes == pytest.approx(truth.ring_bytes, rel=2 * tolerance)
    assert found.attention_share == truth.attention_share


OF_BYTES = ("all_to_all_bytes", "token_bytes", "state_bytes", "sharded_state_bytes")
OF_RANKS = ("bandwidths", "ring_bytes", "group_s", "launch_s", "post_s", "message_s")


@pytest.mark.parametrize(
    "topology, kept", [(TOPOLOGY, (*OF_BYTES, "budget_bytes", "heads")), (ONE_RANK, OF_RANKS)]
)
def test_what_is_not_measured_is_the_estimate_s(topology, kept):
    """Bytes and memory; on one rank transfers and the host, too."""
    *_, estimate = model_of("large", topology)
    _, found = found_by("large", topology=topology)
    for name in kept:
        assert getattr(found, name) == getattr(estimate, name)


def test_waiting_does_not_pass_for_the_whole_transfer():
    bare = [one for one in design_of().shapes if not one.layers]
    found = fit([Sample(shape=one, seconds=1e-3) for one in bare], TERMS)
    for one in bare:
        if moved := TERMS.bytes_moved(one):
            assert found[one.strategy, one.degree] == pytest.approx(0.5e-3 / moved)


def test_timings_that_do_not_grow_with_tokens_are_no_cost_model():
    design = design_of(topology=ONE_RANK)
    seconds = fit([Sample(shape=one, seconds=1e-3) for one in design.shapes], TERMS)
    with pytest.raises(ValueError, match="more tokens take no more time: .* when it is idle"):
        price(seconds, ESTIMATE, MODEL, MODEL)


def test_nnls_is_the_best_of_the_non_negative():
    rng = np.random.default_rng(0)
    for repeated in [False] * 40 + [True] * 40:
        rows, wanted = rng.normal(size=(12, 5)), rng.normal(size=12)
        if repeated:  # columns of which any mixture is as good
            rows[:, 1] = 4 * rows[:, 0]
        found = nnls(rows, wanted)
        # Karush, Kuhn, Tucker: zero where x > 0, not negative where x = 0
        slope = rows.T @ (rows @ found - wanted)
        assert (found >= 0).all()
        assert np.allclose(slope[found > 0], 0, atol=1e-8)
        assert (slope[found == 0] >= -1e-8).all()


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_bare_runs_post_what_is_counted(degree, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    transport = importlib.import_module("gpu_checks.stub").StubTransport(0, degree)
    communicator = Communicator(Topology(nodes=1, ranks_per_node=degree), transport=transport)
    posted = []  # messages of each post
    post = type(transport).post

    def counting(self, lane, *, sends, recvs, **options):
        posted.append(len(sends) + len(recvs))
        return post(self, lane, sends=sends, recvs=recvs, **options)

    monkeypatch.setattr(type(transport), "post", counting)
    for strategy, run in (("ulysses", AllToAllRun), ("zigzag", RingRun)):
        posted.clear()
        run(communicator, range(degree), 0, torch.device("cpu"))()
        row = TERMS.row(ProbeShape(strategy=strategy, degree=degree, lengths=(0,)))
        assert (len(posted), sum(posted)) == (row["post"], row["message"])


# ---- the design


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 1), (1, 2), (1, 3), (2, 3), (2, 8), (4, 2)])
def test_every_timed_micro_batch_is_legal(nodes, ranks_per_node):
    topology = Topology(nodes=nodes, ranks_per_node=ranks_per_node)
    design = design_of(topology=topology, budget_s=1e-6, held_out=9)
    degrees = set(measured_degrees(topology))
    assert {one.degree for one in design.shapes if not one.layers} == degrees
    layouts = [in_groups(one, topology) for one in design.shapes if one.layers]
    for layout in (*layouts, *design.mixes):
        check(plan_of_groups(layout.lengths, layout.micro_batch.groups), topology)
    assert len(design.mixes) == 9
    mixed_degrees = {group.degree for mix in design.mixes for group in mix.micro_batch.groups}
    assert mixed_degrees <= {1, *degrees}
    # what has few tokens stays on a node if it can
    few = {one.degree for one in design.shapes if one.layers and one.has_few_tokens}
    assert max(few) <= (ranks_per_node if ranks_per_node > 1 else nodes)


def test_the_sizes_follow_the_budget():
    found = []
    for budget_s in (1e-6, 0.1, 1.0, 1e6):
        design = design_of(budget_s=budget_s)
        found.append((design.tokens, design.sequence))
    for sizes in zip(*found, strict=True):
        assert list(sizes) == sorted(sizes)
    assert (found[0], found[-1]) == ((64, 64), (16384, 32768))


def test_a_sequence_is_no_longer_than_half_the_memory_holds():
    held = dataclasses.replace(ESTIMATE, budget_bytes=2 * 20000 * ESTIMATE.token_bytes)
    design = design_of(estimate=held, budget_s=1e6)
    assert (design.tokens, design.sequence) == (16384, 16384)


@pytest.mark.parametrize(
    "model, copies",
    [
        ("large", [{ATTENTION: 3}, {ATTENTION: 1}]),
        ("small", [{ATTENTION: 8}, {ATTENTION: 1}]),
        (
            "windows and chunks",
            [{WINDOW: 1, CHUNK: 1, ATTENTION: 1}, {WINDOW: 1}, {CHUNK: 1}, {ATTENTION: 1}],
        ),
        ("recurrent", [{DELTA: 1, ATTENTION: 1}, {DELTA: 1}, {ATTENTION: 1}]),
    ],
)
def test_copies_have_every_type_of_layer(model, copies):
    shape, layers, estimate = model_of(model)
    assert list(design_of(layers, shape, estimate).copies) == copies


# ---- the cache


def test_a_model_is_kept_whole_and_an_interrupted_save_leaves_what_was_there(
    tmp_path, monkeypatch
):
    path = cache_path(tmp_path / "new", {"device": "x"})
    assert load_cached(path) is None
    save_whole(ESTIMATE, path)

    def half(self, name):
        Path(name).write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(CostModel, "save", half)
    with pytest.raises(KeyboardInterrupt):
        save_whole(dataclasses.replace(ESTIMATE, attention_s=1.0), path)
    assert load_cached(path) == ESTIMATE
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.write_text("{")
    assert load_cached(path) is None, "a broken file is no model"


def test_the_key_names_all_that_a_fit_depends_on(tmp_path):
    model = tiny_llama()
    facts = model_facts(model, Accelerator(cpu=True))
    two_ranks = Topology(nodes=1, ranks_per_node=2)
    cpu = torch.device("cpu")
    changes = (
        {"shape": dataclasses.replace(facts.shape, layers=3)},
        {"dtype": torch.float32},
        {"autocast": torch.bfloat16},
        {"checkpointing": True},
        {"save_attention_output": False},
        {"frozen": True},
        {"zero_stage": 3},
        {"replicas": 2},
    )
    keys = [fit_key(facts, two_ranks, cpu), fit_key(facts, TOPOLOGY, cpu)]
    for change in changes:
        keys.append(fit_key(dataclasses.replace(facts, **change), two_ranks, cpu))
    assert len({cache_path(tmp_path, key) for key in keys}) == len(keys)
    assert cache_path(tmp_path, keys[0]) == cache_path(tmp_path, dict(reversed(keys[0].items())))


# ---- on real ranks


@pytest.fixture
def any_fit_will_do(monkeypatch):
    """So tiny a model, on a busy machine, shows little but noise."""
    monkeypatch.setattr(profiler, "fit", lambda *args: fit(*args) | {"head": 1e-12})
    monkeypatch.setattr(Calibration, "objection", lambda self: None)
    monkeypatch.setattr(choose, "Effort", lambda: QUICK)


def calibrate_tiny(rank, world_size, output):
    return calibrate(TINY, dtype="float32", output=output, effort=QUICK)


@pytest.mark.processes
@pytest.mark.usefixtures("any_fit_will_do")
def test_all_ranks_get_the_model_that_is_written(tmp_path):
    output = tmp_path / "cost.json"
    records = run_ranks(calibrate_tiny, 3, str(output))
    assert all(record == records[0] for record in records)
    json.dumps(records[0])
    cost = CostModel.load(output)
    assert cost == CostModel.from_record(records[0]["cost_model"])
    assert [degree for degree, _ in cost.bandwidths] == [2, 3]
    assert len(records[0]["hold_out"]["errors"]) == QUICK.held_out
    activations = cost.activations
    guessed = DEVICES["CPU"].host_rate
    for rate in (activations.out_rate, activations.back_rate):
        assert guessed / 100 < rate < 100 * guessed
        assert rate != guessed
    # bytes are counted, not fitted
    assert activations.kinds[0].mlp_bytes == 4 * 4 * TINY["intermediate_size"]
    assert cost.token_bytes == activations.token_bytes(activations.as_set)


class Told(logging.Handler):
    """Collects visible lines."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def cost_model_for(name, model, accelerator, communicator, folder):
    subject = CostSubject.of(model, accelerator, communicator.topology)
    return make_cost(name, subject, communicator, folder)[0]


def automatic(rank, world_size, folder):
    """Digests of the first and the second run's models; what each said about measuring; whether
    random numbers, and the model, stayed as they were."""
    communicator, accelerator = Communicator(), Accelerator(cpu=True)
    model = tiny_llama(torch.float32)
    before, state = model.state_dict(), torch.random.get_rng_state()
    found, told = [], []
    for _ in range(2):
        screen = Told()
        choose.logger.addHandler(screen)
        cost = cost_model_for("auto", model, accelerator, communicator, Path(folder))
        choose.logger.removeHandler(screen)
        found.append(cost.digest())
        told.append([line for line in screen.lines if "measures" in line])
    same_numbers = bool((torch.random.get_rng_state() == state).all())
    kept = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return found, told, same_numbers, kept and model.config._attn_implementation != "flexseq"


@pytest.mark.processes
@pytest.mark.usefixtures("any_fit_will_do")
def test_auto_measures_once_and_keeps_it(tmp_path):
    results = run_ranks(automatic, 2, str(tmp_path))
    digests = {digest for found, _, _, _ in results for digest in found}
    assert len(digests) == 1
    assert all(same_numbers and kept for _, _, same_numbers, kept in results)
    (kept_in,) = tmp_path.iterdir()
    (first, second), others = (told for _, told, _, _ in results)
    assert [len(first), second, others] == [1, [], [[], []]]
    assert f"caches the result in {kept_in};" in first[0]


def test_a_senseless_measurement_leaves_the_estimate(tmp_path, monkeypatch, caplog):
    def senseless(*args, **kwargs):
        raise ValueError("more tokens take no more time")

    monkeypatch.setattr(choose, "calibrate", senseless)
    arguments = tiny_llama(), Accelerator(cpu=True), Communicator(), tmp_path
    assert cost_model_for("auto", *arguments) == cost_model_for("estimate", *arguments)
    assert "more tokens take no more time" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_model_with_a_tower_is_calibrated_with_the_tower(monkeypatch):
    asked = []

    def estimated(probes, shape, estimate, communicator, **options):
        asked.append(estimate)
        slower = dataclasses.replace(estimate, linear_s=2 * estimate.linear_s, tower=None)
        return Calibration(cost=slower, errors=(0.1,), tokens=1)

    monkeypatch.setattr(choose, "calibrate", estimated)
    text = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    model = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision}
    record = calibrate(model, dtype="float32")
    tower = record["cost_model"]["tower"]
    assert record["model"] == "Qwen3VLForConditionalGeneration"
    assert tower["patch_s"] == 2 * asked[0].tower.patch_s > 0
    assert tower["patches_per_token"] == 4.0


@pytest.mark.parametrize(
    "model, options, message",
    [
        ({"hidden_size": 32}, {}, "model_type"),
        ({"model_type": "t5"}, {}, "not a causal language model"),
        (TINY, {"dtype": "int8"}, "dtype must be one of auto, .*; got 'int8'"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(model, **options)


# ---- NICs


@pytest.mark.parametrize(
    "lone_s, together_s, nics",
    [
        (1.0, 1.02, 4),
        (1.0, 3.9, 1),
        (1.0, 2.1, 2),
        (1.0, 0.7, 4),
        (1.0, 30.0, 1),
        (1.5e-3, 1.5e-3, 1),
    ],
)
def test_nics_are_counted_by_what_ranks_do_to_each_other(monkeypatch, lone_s, together_s, nics):
    timed = [[lone_s, lone_s / 2], [together_s / 2, together_s], [1e-3, 1e-3]]
    monkeypatch.setattr(measure, "median_seconds", lambda *args: timed)
    monkeypatch.setattr(measure, "MOST_HOP_BYTES", 1000)
    communicator = SimpleNamespace(rank=0, topology=Topology(nodes=2, ranks_per_node=4))
    communicator.world_size = 8
    found = measure.measured_nics(communicator, ESTIMATE, device=torch.device("cpu"), rounds=1)
    assert found == (nics, 1e-3)


def hops(rank, world_size):
    """Run both kinds of hops, and return the peers that this rank sends to and receives from."""
    communicator = join(Topology(nodes=3, ranks_per_node=2))
    found = []
    for lone in (True, False):
        run = HopRun(communicator, lone=lone, bytes_moved=8, device=torch.device("cpu"))
        run()
        found.append([[peer for _, peer in messages] for messages in (run.sends, run.recvs)])
    measure.measured_nics(communicator, ESTIMATE, device=torch.device("cpu"), rounds=1)
    return found


def test_nics_are_counted_between_two_nodes_while_others_look_on(monkeypatch):
    monkeypatch.setattr(measure, "MOST_HOP_BYTES", 1000)
    lone, together = zip(*run_threads(hops, 6), strict=True)
    assert list(lone) == [[[2], []], [[], []], [[], [0]], [[], []], [[], []], [[], []]]
    assert list(together) == [[[2], []], [[3], []], [[], [0]], [[], [1]], [[], []], [[], []]]
