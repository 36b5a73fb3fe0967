"""scripts/benchmarks: every benchmark starts, is in the index, and records what it measured. Those
that measure trainers run on documents so short that their figures mean nothing."""

import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import MODELS, load_cost_model
from tests.budget import others_nightly
from tests.programs import ROOT, run_program

BENCHMARKS = ROOT / "scripts/benchmarks"
# modules that they import
SHARED = {
    "common",
    "forked",
    "lengths",
    "peer_bytes",
    "placements",
    "published_rows",
    "reach_models",
    "tiny",
}
NAMES = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - SHARED)

# Starts every benchmark with --help in one fork, for torch takes seconds to import. Modules beside
# it are found as by a command, whatever this process has imported by their names.
ALL_HELPS = """
import contextlib, io, json, pathlib, runpy, sys

folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
beside = {path.stem for path in pathlib.Path(folder).iterdir()}
for name in [name for name in sys.modules if name.partition(".")[0] in beside]:
    del sys.modules[name]
helps = {}
for name in names:
    sys.argv = [f"{folder}/{name}.py", "--help"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
    helps[name] = said.getvalue()
print(json.dumps(helps))
"""


@pytest.mark.processes
def test_every_benchmark_starts_and_takes_a_file_for_its_raw_figures(tmp_path):
    program = tmp_path / "all_helps.py"
    program.write_text(ALL_HELPS)
    for name, said in json.loads(run_program(program, BENCHMARKS, *NAMES)).items():
        assert "--json FILE" in said, name
        assert f"scripts/benchmarks/{name}.py" in said


def test_every_benchmark_is_in_the_index_and_hides_no_module_of_the_standard_library():
    index = (BENCHMARKS / "README.md").read_text()
    assert [name for name in NAMES if f"benchmarks/{name}.py" not in index] == []
    # a benchmark's own folder comes first on its path
    beside = {path.stem for path in BENCHMARKS.iterdir()}
    assert beside & set(sys.stdlib_module_names) == set()


def module(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.processes  # git
def test_a_record_holds_the_figures_and_what_they_were_measured_with(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "step_time.py"), "--steps", "2"])
    monkeypatch.chdir(tmp_path)
    common = module("common")
    common.write_record(None, {"steps": [1, 2]})
    assert list(tmp_path.iterdir()) == []
    common.write_record(tmp_path / "folder/record.json", {"steps": [1, 2]})
    record = json.loads((tmp_path / "folder/record.json").read_text())
    assert record["command"] == "python scripts/benchmarks/step_time.py --steps 2"
    assert record["machine"]["cores"] == os.cpu_count()
    assert {"python", "numpy"} <= set(record["versions"])
    assert record["figures"] == {"steps": [1, 2]}


def test_images_and_parts_of_videos_are_placed_evenly_and_whole_videos_cannot_be(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    placements = module("placements")
    monkeypatch.setattr(placements, "STEPS", 20)
    _, figures = placements.placements_page()
    cases = ("images", "videos, whole", "videos, divided")
    places = [(case, ranks) for case in cases for ranks in (8, 64)]
    assert [(one["case"], one["ranks"]) for one in figures] == places
    for one in figures:
        apart = [a / b for a, b in zip(one["planned"], one["least"], strict=True)]
        assert 1 <= min(apart) <= max(apart) < 1.05
        planned, as_drawn = statistics.median(one["planned"]), statistics.median(one["as_drawn"])
        assert planned < as_drawn
        if one["case"] == "videos, whole":
            # the longest video exceeds a rank's share
            assert planned > 1.5
        else:
            assert planned < 1.05 < 1.5 < as_drawn


def test_planning_time_counts_the_steps_of_both_larger_clusters_apart(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "lengths", "planners"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    steps = module("planning_time").all_steps(2, 1)
    assert {ranks: len(chosen) for ranks, chosen in steps.items()} == {64: 14, 1024: 1, 4096: 1}


def test_published_figures_are_modelled_as_closely_as_the_index_says(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "lengths", "peer_bytes", "published_rows"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    published = module("published")
    seconds, gigabytes = published.step_rows()
    longest = published.longest_rows()
    assert [row.source for row in seconds if row.is_fitted] == [
        published.STEPS[0].source,
        "https://github.com/huggingface/transformers/pull/48324",
    ]
    assert max(abs(row.error) for row in seconds) <= 0.05
    assert max(abs(row.error) for row in gigabytes) <= 0.10
    assert max(abs(row.error) for row in longest if "arxiv" in row.source) <= 0.10
    assert published.median_error([*seconds, *gigabytes, *longest]) <= 0.10
    # at no more bytes than published, in fewer seconds, or hardly more
    rows = [row for row in (*seconds, *gigabytes) if row.planned is not None]
    for row in rows:
        assert row.planned <= 1.02 * row.published
    # its norms are fused; those of transformers hold more in float32 than it has for a token
    (without,) = [row for row in gigabytes if row.planned is None]
    assert "1,200,000 tokens, 1 H200" in without.what
    ours = published.at_50_gb()
    assert ours.seconds <= 310
    assert ours.device_bytes <= 50e9
    assert not ours.choice.outputs_recomputed


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b"])
def test_a_peer_s_plain_layer_has_the_bytes_of_ours(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "peer_bytes", raising=False)
    peers = module("peer_bytes")
    one = Topology(nodes=1, ranks_per_node=1)
    (ours,) = analytic_cost_model(MODELS[name], DEVICES["H100"], one).activations.kinds
    theirs = peers.layer_of(peers.Model(name, MODELS[name]), peers.Stack())
    for figure, value in ours.to_record().items():
        if figure == "rest_bytes" and not ours.tiled_bytes:
            continue  # of nothing
        assert getattr(theirs, figure) == pytest.approx(value, rel=0.02), figure


def test_steps_of_the_benchmark_of_choices_have_their_tokens_and_their_longest(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "lengths"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    choices = module("choices")
    lengths = choices.lengths_of(10**6, seed=0)
    assert sum(lengths) == 10**6
    assert max(lengths) == choices.LONGEST
    result = choices.result_of("hsdp", 1, [0])
    best, worst = result.switches[0], result.switches[-1]
    assert result.bound_s <= best.seconds < worst.seconds
    assert best.seconds <= result.again.seconds <= result.one_degree.seconds
    assert result.planned_s <= worst.seconds


def test_plans_for_experts_are_as_fast_as_what_they_are_compared_with(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("common", "lengths"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    benchmark = module("expert_plans")
    run = next(benchmark.runs_of(1, 100_000))
    result = benchmark.result_of(run, load_cost_model("qwen3-30b-a3b-ep8-h100"))
    assert 0 < result.bound_s <= result.planned_s
    for other in (result.own, result.ordered, result.single):
        assert result.planned_s <= 1.01 * other.seconds  # one degree wins by more than 1 % alone
    assert 0 < result.experts < 1


def first_cells(name, *options):
    """The first column of what a benchmark prints, and all of it."""
    printed = run_program(BENCHMARKS / f"{name}.py", *options)
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip() for row in rows], printed


@pytest.mark.processes
def test_overhead_compares_all_lanes():
    options = ["--steps", 2, "--warmup", 1, "--lengths", 9, 5, 5]
    cells, printed = first_cells("overhead", *options)
    assert cells[:4] == ["lane", "packed", "same work", "flexseq"]
    assert "3 documents a step, 19 tokens: 9, 2 x 5" in printed


@pytest.mark.processes
def test_remat_states_the_gain_and_the_memory(monkeypatch):
    def run(command, **options):
        """A fork, as the processes that the benchmark starts for its peaks of memory."""
        interpreter, path, *words = command
        assert interpreter == sys.executable
        return SimpleNamespace(stdout=run_program(Path(path), *words))

    monkeypatch.setattr("subprocess.run", run)
    cells, printed = first_cells("remat", "--tokens", 64, "--layers", 2, "--pairs", 2)
    assert cells == ["save_attention_output", "True", "False"]
    assert "one document of 64 tokens; 2 pairs" in printed
    assert "faster on the processor" in printed


@pytest.mark.processes
def test_planners_are_compared_with_each_other():
    options = ["--sets", "documents", "--batches", 1, "--planners", "auto", "static"]
    cells, printed = first_cells("planners", *options)
    assert cells == ["lengths", "documents", "documents"]
    over_bound = [float(line.split("|")[6]) for line in printed.splitlines()[-2:]]
    assert 1 <= over_bound[0] < over_bound[1]


@pytest.mark.processes
def test_planning_with_shared_prefixes_is_timed_beside_planning_without():
    cells, _ = first_cells("shared_prefixes", "--planning")
    assert cells == [
        "what",
        *("planning 64 groups of 8 as " + way for way in ("units", "as many sequences", "rows")),
        "nothing found in 1,000,000 tokens",
    ]


@pytest.mark.processes
def test_step_time_times_all_that_a_step_does_outside_of_the_model():
    cells, printed = first_cells("step_time", "--steps", 1, "--only", "64 x 512")
    assert cells == ["ranks x sequences", "64 x 512"]
    milliseconds = [float(cell) for cell in printed.splitlines()[-1].split("|")[3:-1]]
    assert len(milliseconds) == 7
    assert min(milliseconds) > 0


HELD = {"Llama": "all on the host", "Qwen3-MoE": "nothing recomputed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", others_nightly(HELD, tried=["Llama"]))
def test_steps_hold_the_bytes_that_were_counted_of_a_layer_without_memory(monkeypatch, name):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    counting = module("activation_bytes")
    model = counting.TINY[name]
    activations = counting.activations_of(counting.made(model), torch.float32)
    choice = counting.choices_of(activations.layers, tiled=False)[HELD[name]]
    few, many = counting.peaks_of_steps(model, choice)
    tokens = (counting.MORE - 1) * counting.FEW_TOKENS
    found = (many - few) / tokens / activations.token_bytes(choice)
    assert found == pytest.approx(1, abs=0.03)
