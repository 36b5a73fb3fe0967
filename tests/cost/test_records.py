"""Cost models as records: files, digests, those of before, and what is refused by its name."""

import json

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.experts import ExpertLayers
from hf_flexseq.cost.kernels import WITH_CUDNN
from hf_flexseq.cost.presets import PRESETS, load_cost_model
from tests.costs import SMALL

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
NODE = Topology(nodes=1, ranks_per_node=2)
CHANGED = {
    "heads": 64,
    "ring_bytes": 1.0,
    "overlap": 0.5,
    "name": "x",
    "bandwidths": [[2, 1.0]],
    "kernel": WITH_CUDNN.to_record(),
    "experts": ExpertLayers(ranks=2, token_s=1.0, exchanged_bytes=1.0, rate=1.0).to_record(),
    "tower": PRESETS["qwen3-vl-8b-h100"].tower.to_record(),
    "activations": analytic_cost_model(SMALL, DEVICES["CPU"], NODE).activations.to_record(),
}


def test_json_round_trip(tmp_path):
    for model in (*PRESETS.values(), analytic_cost_model(SMALL, DEVICES["CPU"], NODE)):
        model.save(tmp_path / "cost.json")
        loaded = load_cost_model(str(tmp_path / "cost.json"))
        assert loaded == model
        assert loaded.digest() == model.digest()


def test_digest_sees_every_constant():
    constants = FLEXSP.to_record()
    assert constants.pop("version") == 1
    digests = {FLEXSP.digest()}
    for name, value in (constants | CHANGED).items():
        changed = CHANGED.get(name) or value + 1
        digests.add(CostModel.from_record(constants | {name: changed}).digest())
    assert len(digests) == 1 + len(constants | CHANGED)


def test_a_model_of_an_earlier_version_is_refused_in_one_line(tmp_path):
    record = FLEXSP.to_record() | {"ring_overlap": 1.0, "query_bytes": 0.0}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="an earlier version .* leave it out") as caught:
        load_cost_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_s": "fast"}, "linear_s='fast'"),
        ({"linear_s": 0}, "linear_s=0"),
        ({"attention_s": -1.0}, "attention_s=-1.0"),
        ({"budget_bytes": float("nan")}, "NaN is not a number"),
        ({"budget_bytes": 1e300}, "budget_bytes=1e.300: must be at most"),
        ({"attention_s": True}, "attention_s=True: must be a finite number"),
        ({"attention_s": 10**400}, "attention_s=1000.*: must be at most"),
        ({"name": "\x1b[31m"}, r"name='\\x1b\[31m': must be one line"),
        ({"version": 2}, "version 2: this hf_flexseq reads version 1"),
        ({"heads": 0}, "heads=0"),
        ({"pass_s": 1e10}, "pass_s=1.*: must be at most"),
        ({"overlap": 1.5}, "overlap=1.5"),
        ({"widest_window": 0.5}, "widest_window=0.5: must be a whole number"),
        ({"kernel": {"block": 128}}, "kernel"),
        ({"kernel": WITH_CUDNN.to_record() | {"tile": 0}}, "kernel, tile=0"),
        ({"kernel": WITH_CUDNN.to_record() | {"own_paces": [[1]]}}, "own_paces: .* of pairs"),
        ({"kernel": WITH_CUDNN.to_record() | {"own_paces": [[4, 1], [2, 1]]}}, "must ascend"),
        ({"name": 3}, "name=3"),
        ({"bandwidths": []}, "at least one"),
        ({"bandwidths": {"2": 1}}, "must be a list"),
        ({"bandwidths": [[4, 1.0], [2, 1.0]]}, "must ascend"),
        ({"bandwidths": [[2, 0.0]]}, "positive"),
        ({"bandwidths": [["2", 1.0]]}, "bandwidths='2': must be a whole number"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
    ],
)
def test_a_file_with_nonsense_is_named(tmp_path, change, message):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(FLEXSP.to_record() | change))
    with pytest.raises(ValueError, match=message) as caught:
        load_cost_model(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"name": "x"}'])
def test_a_file_that_does_not_parse_is_named(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json"):
        CostModel.load(path)


def test_unknown_names_list_the_presets():
    assert load_cost_model("flexsp-gpt-7b-a100") is FLEXSP
    with pytest.raises(
        ValueError, match="flexsp-gpt-7b-a100, flexsp-gpt-13b-a100, flexsp-gpt-30b"
    ):
        load_cost_model("gpt-7b")
