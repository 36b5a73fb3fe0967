"""Cost models as records: files, digests, those of before, and what is refused by its name."""

import json
from dataclasses import MISSING, fields

import pytest

from hf_flexseq.base.layers import Reach
from hf_flexseq.cost import CostModel
from hf_flexseq.cost.kinds import NearLayers
from hf_flexseq.cost.model import HOST_CONSTANTS
from hf_flexseq.cost.presets import PRESETS, load_cost_model
from tests.costs import SCAN, simple_cost

FLEXSP = PRESETS["flexsp-gpt-7b-a100"]
H200 = PRESETS["llama-3.1-8b-h200"]
WINDOWS = {"share": 0.5, "attention_s": 1.0, "window": 2}
SCANS = SCAN.to_record()
CHANGED = {
    "heads": 64,
    "ring_bytes": 1.0,
    "ring_overlap": 0.5,
    "all_to_all_overlap": 0.5,
    "host_overlap": 0.5,
    "name": "x",
    "bandwidths": [[2, 1.0]],
    "kinds": [WINDOWS],
    "recurrent": [SCANS],
    "attention_share": 0.5,
}


def test_json_round_trip(tmp_path):
    chunks = NearLayers(reach=Reach(chunk=8192), share=0.25, attention_s=1e-9)
    for model in (*PRESETS.values(), simple_cost(kinds=(chunks,), recurrent=(SCAN,))):
        model.save(tmp_path / "cost.json")
        loaded = load_cost_model(str(tmp_path / "cost.json"))
        assert loaded == model
        assert loaded.digest() == model.digest()


def test_digest_sees_every_constant():
    constants = FLEXSP.to_record()
    assert constants.pop("version") == 1
    digests = {FLEXSP.digest()}
    for name, value in constants.items():
        changed = CHANGED.get(name) or value + 1
        digests.add(CostModel.from_record(constants | {name: changed}).digest())
    assert len(digests) == 1 + len(constants)


def test_models_of_before_are_read_and_keep_their_digests():
    """Plans made with them are in traces."""
    digests = {
        "flexsp-gpt-7b-a100": "afa882b7c5c26842",
        "flexsp-gpt-13b-a100": "898a36c6280d8868",
        "flexsp-gpt-30b-a100": "6fd399ba0147bfd0",
        "llama-3.1-8b-a800": "ad5063b782717d2b",
        "llama-3.1-8b-h200": "03a1ae1cb22a6215",
    }
    assert {name: PRESETS[name].digest() for name in digests} == digests
    first = {one.name for one in fields(CostModel) if one.default is MISSING}
    record = {name: value for name, value in FLEXSP.to_record().items() if name in first}
    assert CostModel.from_record(record) == FLEXSP
    assert (FLEXSP.nics_per_node, FLEXSP.transfer_s, FLEXSP.all_to_all_overlap) == (1, 0.0, 0.0)
    assert not FLEXSP.has_waits
    record = {name: one for name, one in H200.to_record().items() if name not in HOST_CONSTANTS}
    old = CostModel.from_record(record)
    assert (old.launch_s, old.post_s, old.message_s, old.contact_s) == (0, 0, 0, 0)
    assert old.digest() != H200.digest()


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
        ({"heads": 2.5}, "heads=2.5"),
        ({"heads": 0}, "heads=0"),
        ({"nics_per_node": 0}, "nics_per_node=0"),
        ({"nics_per_node": 1.5}, "nics_per_node=1.5: must be a whole number"),
        ({"transfer_s": -1.0}, "transfer_s=-1.0"),
        ({"launch_s": -1.0}, "launch_s=-1.0"),
        ({"post_s": 1e10}, "post_s=1.*: must be at most"),
        ({"message_s": "x"}, "message_s='x'"),
        ({"contact_s": -1.0}, "contact_s=-1.0"),
        ({"host_overlap": 1.5}, "host_overlap=1.5"),
        ({"all_to_all_overlap": 1.5}, "all_to_all_overlap=1.5"),
        ({"name": 3}, "name=3"),
        ({"bandwidths": []}, "at least one"),
        ({"bandwidths": {"2": 1}}, "must be a list"),
        ({"bandwidths": [[4, 1.0], [2, 1.0]]}, "must ascend"),
        ({"bandwidths": [[2, 0.0]]}, "positive"),
        ({"bandwidths": [["2", 1.0]]}, "degree='2': must be a whole number"),
        ({"extra": 1}, r"unknown keys \['extra'\]"),
        ({"attention_share": 0.0}, "attention_share=0.0: attention of no layers"),
        ({"kinds": {"window": 2}}, "kinds"),
        ({"kinds": [{"share": 0.5, "attention_s": 1.0}]}, "full layers are in attention_s"),
        ({"kinds": [{"share": 0.5, "window": 2}]}, "attention_s"),
        ({"kinds": [WINDOWS | {"window": 0}]}, "kinds, window=0"),
        ({"kinds": [WINDOWS | {"chunk": 2}]}, "set one of them"),
        ({"kinds": [WINDOWS | {"share": 1.5}]}, "window 2, share=1.5"),
        ({"kinds": [WINDOWS | {"share": 0.0}]}, "window 2: .* of no layers"),
        ({"kinds": [WINDOWS | {"attention_s": -1.0}]}, "window 2, attention_s=-1.0"),
        ({"kinds": [WINDOWS] * 2}, "window 2 is listed twice"),
        ({"kinds": [WINDOWS | {"share": 0.6}, WINDOWS | {"window": 3}]}, "1.1 of the layers"),
        ({"recurrent": [SCANS | {"kind": "rwkv"}]}, "one of gated_delta, kimi_delta, mamba2"),
        ({"recurrent": [SCANS | {"share": 1.5}]}, "recurrent, gated_delta, share=1.5"),
        ({"recurrent": [SCANS | {"share": 0.0}]}, "gated_delta: token_s=2.0 of no layers"),
        ({"recurrent": [SCANS | {"token_s": -1.0}]}, "recurrent, gated_delta, token_s=-1.0"),
        ({"recurrent": [SCANS | {"chunk": 0}]}, "recurrent, gated_delta, chunk=0"),
        ({"recurrent": [SCANS | {"window": 4}]}, "window"),
        ({"recurrent": [SCANS] * 2}, "gated_delta is listed twice"),
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
