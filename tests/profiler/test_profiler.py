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

from hf_flexseq.cost import CostModel, lockstep_ns
from hf_flexseq.cost.analytic import DEVICES, ModelShape, analytic_cost_model
from hf_flexseq.cost.launches import layer_work
from hf_flexseq.cost.recurrent import RecurrentLayers
from hf_flexseq.distributed.communicator import Communicator
from hf_flexseq.hf.calibration import choose
from hf_flexseq.hf.calibration.choose import cost_model_for, fit_key
from hf_flexseq.hf.calibration.command import calibrate
from hf_flexseq.hf.model.facts import model_facts
from hf_flexseq.plan import Plan, check
from hf_flexseq.profiler import calibrate as profiler
from hf_flexseq.profiler import measure
from hf_flexseq.profiler.cache import cache_path, load_cached, save_whole
from hf_flexseq.profiler.calibrate import Calibration
from hf_flexseq.profiler.design import (
    Effort,
    ProbeShape,
    ProbeSizes,
    alone,
    choose_sizes,
    fitting_shapes,
    hold_out_layouts,
    measured_degrees,
    timed_bytes,
)
from hf_flexseq.profiler.fit import Compute, Sample, fit_compute, fit_links, nnls
from hf_flexseq.profiler.host import (
    ALL_TO_ALLS,
    FEW_TOKENS,
    RING,
    HostSeconds,
    bare_work,
    fit_host,
    small_shapes,
)
from hf_flexseq.profiler.runs import AllToAllRun, HopRun, RingRun
from hf_flexseq.topology import Topology
from tests.hf.tiny import tiny_llama
from tests.ranks import join, run_ranks, run_threads

SHAPE = ModelShape(
    layers=8,
    hidden=1024,
    heads=8,
    kv_heads=2,
    head_dim=128,
    intermediate=4096,
    vocab=32000,
    params=200_000_000,
)
TOPOLOGY = Topology(nodes=1, ranks_per_node=4)
ESTIMATE = analytic_cost_model(SHAPE, DEVICES["H100"], TOPOLOGY)
TRUTH = dataclasses.replace(
    ESTIMATE,
    attention_s=8 * 2e-10,
    linear_s=8 * 3e-7 + 5e-7,
    micro_batch_s=8 * 1e-4 + 2e-3,
    group_s=8 * 1e-3,
    bandwidths=((2, 4e9), (4, 2e9)),
    ring_bytes=1.5 * ESTIMATE.ring_bytes,
    ring_overlap=0.6,
)
TINY = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NO_HOST = HostSeconds(launch_s=0.0, post_s=0.0, message_s=0.0)
QUICK = Effort(budget_s=0.3, rounds=2, held_out=2)


def of_depth(model: CostModel, layers: int) -> CostModel:
    """`TRUTH` for another number of layers."""
    return dataclasses.replace(
        model,
        attention_s=layers * 2e-10,
        linear_s=layers * 3e-7 + 5e-7,
        micro_batch_s=layers * 1e-4 + 2e-3,
        all_to_all_bytes=model.all_to_all_bytes * layers / SHAPE.layers,
        ring_bytes=model.ring_bytes * layers / SHAPE.layers,
    )


def synthetic_samples(
    depths: tuple[int, ...], noise: float, latency_s: float = 0.0
) -> list[Sample]:
    """Time each shape by the closed form, with every timing off by up to `noise`."""
    rng = random.Random(3)
    samples = []
    for shape in fitting_shapes(ProbeSizes(tokens=8192, sequence=32768), TOPOLOGY, rings=True):
        for layers in depths if shape.strategy == "local" else (1,):
            error = noise * rng.uniform(-1, 1)
            seconds = synthetic_seconds(shape, layers, latency_s) * (1 + error)
            samples.append(
                Sample(
                    strategy=shape.strategy,
                    degree=shape.degree,
                    layers=layers,
                    lengths=shape.lengths,
                    seconds=seconds,
                )
            )
    return samples


def synthetic_seconds(shape: ProbeShape, layers: int, latency_s: float) -> float:
    if shape.strategy == "local":
        layout = alone(shape.lengths, TOPOLOGY)
        cost = of_depth(TRUTH, layers)
        (whole_ns,) = lockstep_ns(cost, [layout.micro_batch], layout.lengths, TOPOLOGY)
        return whole_ns / 1e9
    (tokens,) = shape.lengths
    if shape.strategy == "kernel":
        return 2e-10 * tokens * tokens + 1e-8 * tokens + 1e-5
    if shape.strategy == "ulysses":
        model_bytes = TRUTH.all_to_all_bytes
    else:
        model_bytes = TRUTH.ring_bytes * (shape.degree - 1)
    rank_bytes = model_bytes / SHAPE.layers * tokens / shape.degree
    return rank_bytes / TRUTH.bandwidth(shape.degree, False) + latency_s


def check_layout(micro_batch, lengths, topology=TOPOLOGY) -> None:
    plan = Plan(
        lengths=tuple(lengths),
        micro_batches=(micro_batch,),
        objective_s=0.0,
        lower_bound_s=0.0,
        planner="",
        planning_s=0.0,
    )
    check(plan, topology)


# ---- the fit


@pytest.mark.parametrize("depths", [(8,), (1, 3)])
@pytest.mark.parametrize("noise, tolerance", [(0.0, 0.01), (0.02, 0.06)])
def test_a_fit_recovers_the_constants(
    depths: tuple[int, ...], noise: float, tolerance: float
) -> None:
    samples = synthetic_samples(depths, noise, latency_s=1e-3)
    compute = fit_compute(samples)
    links = fit_links(samples, ESTIMATE, moved=timed_bytes(ESTIMATE, SHAPE), overlap=0.6)
    found = links.fill(compute.fill(ESTIMATE, 8), 8, NO_HOST)
    assert found.attention_s == pytest.approx(TRUTH.attention_s, rel=tolerance)
    assert found.linear_s == pytest.approx(TRUTH.linear_s, rel=tolerance)
    assert found.micro_batch_s == pytest.approx(TRUTH.micro_batch_s, rel=10 * tolerance)
    assert found.group_s == pytest.approx(TRUTH.group_s, rel=10 * tolerance)
    for (degree, speed), (wanted_degree, wanted) in zip(
        found.bandwidths, TRUTH.bandwidths, strict=True
    ):
        assert (degree, speed) == (wanted_degree, pytest.approx(wanted, rel=3 * tolerance))
    assert found.ring_bytes == pytest.approx(TRUTH.ring_bytes, rel=3 * tolerance)
    assert found.ring_overlap == 0.6


def test_bytes_and_memory_are_the_estimate_s() -> None:
    samples = synthetic_samples((8,), noise=0.0)
    compute = fit_compute(samples)
    links = fit_links(samples, ESTIMATE, moved=timed_bytes(ESTIMATE, SHAPE), overlap=1.0)
    found = links.fill(compute.fill(ESTIMATE, 8), 8, NO_HOST)
    for name in (
        "all_to_all_bytes",
        "token_bytes",
        "state_bytes",
        "sharded_state_bytes",
        "budget_bytes",
        "heads",
    ):
        assert getattr(found, name) == getattr(ESTIMATE, name)


def test_one_rank_keeps_the_estimate_s_transfers() -> None:
    samples = [sample for sample in synthetic_samples((8,), noise=0.0) if sample.degree == 1]
    links = fit_links(samples, ESTIMATE, moved=timed_bytes(ESTIMATE, SHAPE), overlap=0.3)
    found = links.fill(ESTIMATE, 8, NO_HOST)
    assert (found.bandwidths, found.ring_bytes) == (ESTIMATE.bandwidths, ESTIMATE.ring_bytes)


def test_waiting_does_not_pass_for_the_whole_transfer() -> None:
    samples = [
        dataclasses.replace(s, seconds=1e-3)
        for s in synthetic_samples((8,), noise=0.0)
        if s.degree > 1
    ]
    found = fit_links(samples, ESTIMATE, moved=timed_bytes(ESTIMATE, SHAPE), overlap=0.0)
    for degree, speed in found.bandwidths:
        most_tokens = max(s.tokens for s in samples if s.degree == degree)
        most_bytes = most_tokens / degree * ESTIMATE.all_to_all_bytes / 8
        assert speed == pytest.approx(2 * most_bytes / 1e-3)


def test_a_fit_needs_the_kernel_and_the_model() -> None:
    samples = synthetic_samples((8,), noise=0.0)
    without_kernel = [sample for sample in samples if sample.strategy != "kernel"]
    with pytest.raises(ValueError, match="kernel"):
        fit_compute(without_kernel)


def test_timings_that_do_not_grow_with_tokens_are_no_cost_model() -> None:
    samples = [
        dataclasses.replace(sample, seconds=1e-3) for sample in synthetic_samples((8,), noise=0.0)
    ]
    with pytest.raises(ValueError, match="more tokens take no more time: .* when it is idle"):
        fit_compute(samples).fill(ESTIMATE, 8)


def test_nnls_is_the_best_of_the_non_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows, wanted = rng.normal(size=(12, 4)), rng.normal(size=12)
        found = nnls(rows, wanted)
        # Karush, Kuhn, Tucker: zero where x > 0, not negative where x = 0
        slope = rows.T @ (rows @ found - wanted)
        assert (found >= 0).all()
        assert np.allclose(slope[found > 0], 0, atol=1e-9)
        assert (slope[found == 0] >= -1e-9).all()


# ---- the host

HOST = HostSeconds(launch_s=1e-5, post_s=1e-4, message_s=2e-6)


def small_samples(noise: float) -> list[Sample]:
    """Time the small runs by the counts, with a constant for each call of a layer."""
    rng = random.Random(5)
    samples = []
    for shape in small_shapes(TOPOLOGY, rings=True):
        if shape.strategy in (ALL_TO_ALLS, RING):
            call_s, work = 0.0, bare_work(shape.strategy, shape.degree)
        else:
            call_s, work = 3e-4, layer_work(shape.strategy, shape.degree)
        seconds = call_s + HOST.launch_s * work.launches + HOST.post_s * work.posts
        seconds += HOST.message_s * work.messages
        samples.append(
            Sample(
                strategy=shape.strategy,
                degree=shape.degree,
                layers=1,
                lengths=shape.lengths,
                seconds=seconds * (1 + noise * rng.uniform(-1, 1)),
            )
        )
    return samples


@pytest.mark.parametrize("noise, tolerance", [(0.0, 1e-6), (0.02, 0.3)])
def test_few_tokens_tell_launches_from_posts_and_messages(noise: float, tolerance: float) -> None:
    found = fit_host(small_samples(noise), NO_HOST)
    assert found.launch_s == pytest.approx(HOST.launch_s, rel=tolerance)
    assert found.post_s == pytest.approx(HOST.post_s, rel=tolerance)
    assert found.message_s == pytest.approx(HOST.message_s, rel=3 * tolerance)
    cost = found.fill(ESTIMATE, 8)
    assert cost.post_s == 8 * found.post_s
    assert HostSeconds.of(cost, 8) == found


def test_one_rank_keeps_the_estimate_s_host() -> None:
    assert small_shapes(Topology(nodes=1, ranks_per_node=1), rings=True) == ()
    assert fit_host((), HOST) == HOST


def test_small_runs_give_every_rank_tokens_and_stay_on_a_node_where_they_can() -> None:
    for nodes, ranks in ((1, 4), (2, 2), (3, 1), (2, 3)):
        for shape in small_shapes(Topology(nodes=nodes, ranks_per_node=ranks), rings=True):
            assert shape.lengths == (FEW_TOKENS * shape.degree,)
            assert shape.degree <= (ranks if ranks > 1 else nodes)
    no_rings = small_shapes(TOPOLOGY, rings=False)
    assert {shape.strategy for shape in no_rings} == {"local", "ulysses", ALL_TO_ALLS}


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_bare_runs_post_what_is_counted(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    transport = importlib.import_module("gpu_checks.stub").StubTransport(0, degree)
    communicator = Communicator(Topology(nodes=1, ranks_per_node=degree), transport=transport)
    posted = []  # messages of each post
    post = type(transport).post

    def counting(self, lane, *, sends, recvs, **options):
        posted.append(len(sends) + len(recvs))
        return post(self, lane, sends=sends, recvs=recvs, **options)

    monkeypatch.setattr(type(transport), "post", counting)
    for name, run in ((ALL_TO_ALLS, AllToAllRun), (RING, RingRun)):
        posted.clear()
        run(communicator, (0,), degree, bytes_moved=0, device=torch.device("cpu"))()
        work = bare_work(name, degree)
        assert (len(posted), sum(posted)) == (work.posts, work.messages)


def test_a_latency_that_posts_explain_is_no_latency_of_the_group() -> None:
    """All-to-alls of a layer take four posts, a ring of d three (d - 1); only the rest counts."""
    samples = synthetic_samples((8,), noise=0.0, latency_s=2e-3)
    links = fit_links(samples, ESTIMATE, moved=timed_bytes(ESTIMATE, SHAPE), overlap=1.0)
    posts = HostSeconds(launch_s=1.0, post_s=1e-4, message_s=0.0)
    rest_s = [2e-3 - 1e-4 * count for degree in (2, 4) for count in (4, 3 * (degree - 1))]
    assert [degree for degree, _ in links.ring_latencies_s] == [2, 4]
    assert links.fill(ESTIMATE, 8, posts).group_s == pytest.approx(8 * np.mean(rest_s), rel=0.05)
    slow = dataclasses.replace(posts, post_s=1.0)
    assert links.fill(ESTIMATE, 8, slow).group_s == 0.0


# ---- the design


@pytest.mark.parametrize("nodes, ranks_per_node", [(1, 1), (1, 2), (1, 3), (2, 3), (2, 8), (4, 2)])
def test_every_timed_micro_batch_is_legal(nodes: int, ranks_per_node: int) -> None:
    topology = Topology(nodes=nodes, ranks_per_node=ranks_per_node)
    shapes = fitting_shapes(ProbeSizes(tokens=256, sequence=1024), topology, rings=True)
    layouts = [alone(shape.lengths, topology) for shape in shapes if shape.strategy == "local"]
    assert {shape.degree for shape in shapes} == {1, *measured_degrees(topology)}
    mixes = hold_out_layouts(256, topology, rings=True, count=9)
    for layout in (*layouts, *mixes):
        check_layout(layout.micro_batch, layout.lengths, topology)
    mixed_degrees = {group.degree for mix in mixes for group in mix.micro_batch.groups}
    assert mixed_degrees <= {1, *measured_degrees(topology)}


def test_the_size_follows_the_budget() -> None:
    def sizes(budget_s: float) -> tuple[int, int]:
        found = choose_sizes(
            ESTIMATE, TOPOLOGY, layers=8, depths=(1, 3), rounds=4, budget_s=budget_s
        )
        return found.tokens, found.sequence

    for of_budgets in zip(*(sizes(budget) for budget in (1e-6, 0.1, 1.0, 1e6)), strict=True):
        assert list(of_budgets) == sorted(of_budgets)
    assert sizes(1e-6) == (64, 64)
    assert sizes(1e6) == (16384, 65536)


# ---- the cache


def test_a_model_is_kept_whole(tmp_path: Path) -> None:
    path = cache_path(tmp_path / "new", {"device": "x"})
    assert load_cached(path) is None
    save_whole(ESTIMATE, path)
    assert load_cached(path) == ESTIMATE
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_an_interrupted_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache_path(tmp_path, {})
    save_whole(ESTIMATE, path)

    def half(self: CostModel, name: str) -> None:
        Path(name).write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(CostModel, "save", half)
    with pytest.raises(KeyboardInterrupt):
        save_whole(TRUTH, path)
    assert load_cached(path) == ESTIMATE
    assert len(list(tmp_path.iterdir())) == 1


def test_a_broken_file_is_no_model(tmp_path: Path) -> None:
    path = cache_path(tmp_path, {})
    path.write_text("{")
    assert load_cached(path) is None


def test_the_key_names_all_that_a_fit_depends_on(tmp_path: Path) -> None:
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
def any_fit_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """So tiny a model, on a busy machine, shows little but noise."""

    def positive(samples: list[Sample], recurrent: list[RecurrentLayers]) -> Compute:
        found = fit_compute(samples, recurrent)
        return dataclasses.replace(found, linear_s=max(found.linear_s, 1e-12))

    monkeypatch.setattr(profiler, "fit_compute", positive)
    monkeypatch.setattr(Calibration, "objection", lambda self: None)
    monkeypatch.setattr(choose, "Effort", lambda: QUICK)


def calibrate_tiny(rank: int, world_size: int, output: str) -> dict:
    return calibrate(TINY, dtype="float32", output=output, effort=QUICK)


@pytest.mark.processes
@pytest.mark.usefixtures("any_fit_will_do")
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_model_that_is_written(world_size: int, tmp_path: Path) -> None:
    output = tmp_path / "cost.json"
    records = run_ranks(calibrate_tiny, world_size, str(output))
    assert all(record == records[0] for record in records)
    json.dumps(records[0])
    cost = CostModel.load(output)
    assert cost == CostModel.from_record(records[0]["cost_model"])
    if world_size > 1:
        assert [degree for degree, _ in cost.bandwidths] == list(range(2, world_size + 1))
    assert records[0]["hold_out"]["micro_batches"] == QUICK.held_out


class Told(logging.Handler):
    """Collects visible lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def automatic(
    rank: int, world_size: int, folder: str
) -> tuple[list[str], list[list[str]], bool, bool]:
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
@pytest.mark.parametrize("world_size", [1, 2])
def test_auto_measures_once_and_keeps_it(world_size: int, tmp_path: Path) -> None:
    results = run_ranks(automatic, world_size, str(tmp_path))
    digests = {digest for found, _, _, _ in results for digest in found}
    assert len(digests) == 1
    assert all(same_numbers and kept for _, _, same_numbers, kept in results)
    (kept_in,) = tmp_path.iterdir()
    (first, second), *others = (told for _, told, _, _ in results)
    assert [len(first), second] == [1, []]
    assert f"keeps the result in {kept_in};" in first[0]
    assert others == [[[], []]] * (world_size - 1)


def test_a_senseless_measurement_leaves_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def senseless(*args: object, **kwargs: object) -> None:
        raise ValueError("more tokens take no more time")

    monkeypatch.setattr(choose, "calibrate", senseless)
    arguments = tiny_llama(), Accelerator(cpu=True), Communicator(), tmp_path
    assert cost_model_for("auto", *arguments) == cost_model_for("estimate", *arguments)
    assert "more tokens take no more time" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "model, options, message",
    [
        ({"hidden_size": 32}, {}, "model_type"),
        ({"model_type": "t5"}, {}, "no causal language model"),
        (TINY, {"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model: dict, options: dict, message: str) -> None:
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
    found = [[lone_s, lone_s / 2], [together_s / 2, together_s], [1e-3, 1e-3]]
    monkeypatch.setattr(measure, "median_seconds", lambda *args: found)
    communicator = SimpleNamespace(rank=0, topology=Topology(nodes=2, ranks_per_node=4))
    options = {"bytes_moved": 8, "device": torch.device("cpu"), "rounds": 1}
    assert measure.measured_nics(communicator, **options) == (nics, 1e-3)


def lazy(nodes: int, ranks_per_node: int, *, connects_lazily: bool = True) -> SimpleNamespace:
    """Stand in for a communicator whose ranks all answer alike."""
    topology = Topology(nodes=nodes, ranks_per_node=ranks_per_node)
    host = SimpleNamespace(
        gather_ints=lambda values: [values],
        gather_values=lambda values: [values, [x / 2 for x in values]],
    )
    transport = SimpleNamespace(capabilities=SimpleNamespace(connects_lazily=connects_lazily))
    return SimpleNamespace(rank=0, topology=topology, host=host, transport=transport)


def test_a_first_contact_is_what_a_first_message_takes_longer(monkeypatch) -> None:
    timed = iter([0.75, 0.25])
    monkeypatch.setattr(measure, "_seconds", lambda run, device: next(timed))
    assert measure.first_contact_s(lazy(2, 2), torch.device("cpu")) == 0.5


def test_a_first_contact_needs_ranks_that_are_not_connected() -> None:
    cpu = torch.device("cpu")
    assert measure.first_contact_s(lazy(2, 2, connects_lazily=False), cpu) == 0.0
    assert measure.first_contact_s(lazy(1, 4), cpu) is None
    assert measure.first_contact_s(lazy(4, 1), cpu) is None


def diagonal_hop(rank, world_size):
    """Run the hop of a first contact, and return the peers of this rank."""
    communicator = join(Topology(nodes=2, ranks_per_node=2))
    run = HopRun(communicator, lone=True, bytes_moved=1, device=torch.device("cpu"), shift=1)
    run()
    return [peer for _, peer in run.sends], [peer for _, peer in run.recvs]


def test_first_contacts_are_measured_between_ranks_that_are_no_counterparts():
    found = run_threads(diagonal_hop, 4)
    assert found == [([3], []), ([], []), ([], []), ([], [0])]


def hops(rank, world_size):
    """Run both kinds of hops, and return the peers that this rank sends to and receives from."""
    communicator = Communicator(Topology(nodes=3, ranks_per_node=2))
    found = []
    for lone in (True, False):
        run = HopRun(communicator, lone=lone, bytes_moved=8, device=torch.device("cpu"))
        run()
        found.append([[peer for _, peer in messages] for messages in (run.sends, run.recvs)])
    nics, transfer_s = measure.measured_nics(
        communicator, bytes_moved=8, device=torch.device("cpu"), rounds=1
    )
    return found, nics, transfer_s


@pytest.mark.processes
def test_nics_are_counted_between_two_nodes_while_others_look_on():
    lone, together = zip(*(found for found, *_ in run_ranks(hops, 6)), strict=True)
    assert list(lone) == [[[2], []], [[], []], [[], [0]], [[], []], [[], []], [[], []]]
    assert list(together) == [[[2], []], [[3], []], [[], [0]], [[], [1]], [[], []], [[], []]]
