"""`flexseq fit`: the table, its figures as JSON, and one line for what cannot be."""

import json
from dataclasses import replace

import pytest

from hf_flexseq.base.topology import Topology
from hf_flexseq.cost.analytic_model import analytic_cost_model
from hf_flexseq.cost.devices import DEVICES
from hf_flexseq.cost.presets import LLAMA_8B
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.planner.fit import ladder

NODE = Topology(nodes=1, ranks_per_node=8)
ESTIMATE = analytic_cost_model(LLAMA_8B, DEVICES["H100"], NODE, zero_stage=3, checkpointing=False)
# as `fit` counts: all bytes of a token are those of its activations
LLAMA = replace(ESTIMATE, token_bytes=ESTIMATE.activations.token_bytes(MemoryChoice()))


def test_a_model_by_name_has_a_line_for_each_rung(flexseq):
    head, columns, *rows = flexseq("fit llama-3.1-8b --topology 1x8").splitlines()
    assert head.startswith("llama-3.1-8b on 1 x 8 ranks, analytic-H100: 67.1 GiB a rank")
    assert columns.split()[-1] == "choice"
    rungs = ladder(LLAMA, NODE)
    for rung, row in zip(rungs, rows, strict=False):
        assert row.split()[:3] == [
            f"{rung.tokens_per_rank:,}",
            f"{rung.longest:,}",
            f"{rung.seconds:.2f}",
        ]
        assert row.endswith(f"  {rung.choice}")
    levers = rows[len(rungs) :]
    assert len(levers) == len(rungs)
    assert all(line.startswith("to go beyond ") for line in levers)


def test_a_sequence_is_priced_on_the_rungs_that_hold_it(flexseq):
    short, long = "100", "1048576"
    words = "fit llama-3.1-8b --topology 1x8 --length"
    assert "     -" not in flexseq(f"{words} {short}")
    shown = flexseq(f"{words} {long}")
    assert "-           -         -  nothing recomputed" in shown
    assert shown.splitlines()[-1].startswith("1,048,576 tokens: ")
    beyond = flexseq(f"{words} 100000000").splitlines()[-1]
    assert beyond.startswith("100,000,000 tokens do not fit under any choice here: they need ")


def test_a_cost_model_file_gives_the_same_and_figures_are_written(flexseq, tmp_path):
    cost, out = tmp_path / "cost.json", tmp_path / "fit.json"
    LLAMA.save(cost)
    flexseq(f"fit --cost-model {cost} --topology 1x8 --json {out}")
    of_file = json.loads(out.read_text())
    of_name = json.loads(flexseq("fit llama-3.1-8b --topology 1x8 --json -"))
    for name in ("ladder", "next", "cost_model"):
        assert of_file[name] == of_name[name]
    assert of_name["ladder"][0]["choice"] == LLAMA.activations.as_set.to_record()
    priced = json.loads(flexseq("fit llama-3.1-8b --topology 1x8 --length 9000 --json -"))
    assert priced["fastest"]["length"] == 9000


def test_options_change_what_fits(flexseq):
    def longest(words):
        record = json.loads(flexseq(f"fit llama-3.1-8b --topology 1x8 {words} --json -"))
        return [rung["longest"] for rung in record["ladder"]]

    plain = longest("")
    assert longest("--device H200")[0] > plain[0]
    assert longest("--dtype float32")[0] < plain[0]
    assert longest("--zero-stage 2 --device H200")[0] < longest("--device H200")[0]
    lora = longest("--lora-rank 64 --zero-stage 0")
    assert lora[-1] > 0.9 * plain[-1] / 2
    assert longest("--lora-rank 64")[0] > plain[0]
    assert longest("--limit ranks=9000")[0] == plain[0]
    assert longest("--checkpointing") == plain[1:]
    over = json.loads(flexseq("fit qwen3-30b-a3b --topology 1x8 --expert-ranks 8 --json -"))
    assert over["cost_model"]["experts"]["ranks"] == 8
    assert longest("--host-memory-gib 0")[-1] < longest("--host-memory-gib 50")[-1] < plain[-1]


@pytest.mark.slow
def test_any_model_of_transformers_is_read_by_its_configuration(flexseq, tmp_path):
    pytest.importorskip("transformers")
    sizes = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    of_folder = json.loads(flexseq(f"fit {tmp_path} --topology 1x8 --json -"))
    of_name = json.loads(flexseq("fit llama-3.1-8b --topology 1x8 --json -"))
    # layers are counted for the one, and computed for the other
    for counted, computed in zip(of_folder["ladder"], of_name["ladder"], strict=True):
        assert counted["longest"] == pytest.approx(computed["longest"], rel=0.02)


@pytest.mark.parametrize(
    "words, message",
    [
        ("fit --topology 1x8", "give either MODEL or --cost-model PATH"),
        ("fit qwen3-8b --topology 1x8 --cost-model COST", "give either MODEL or"),
        ("fit qwen3-8b-h100 --topology 1x8", "is a cost model: give a model, such as one of"),
        ("fit --topology 1x8 --cost-model qwen3-8b-h100", "measure it again"),
        ("fit --topology 1x8 --cost-model COST --device H100", "--device goes with MODEL"),
        ("fit --topology 1x8 --cost-model COST --zero-stage 3", "--zero-stage goes with MODEL"),
        ("fit --topology 1x8 --cost-model COST --expert-ranks 8", "--expert-ranks goes with"),
        ("fit qwen3-8b --topology 1x8 --expert-ranks 8", "a model without experts"),
        ("fit qwen3-8b", "--topology"),
        ("fit qwen3-8b --topology 1x8 --device X", "invalid choice: 'X'"),
        ("fit qwen3-8b --topology 1x8 --dtype int8", "invalid choice: 'int8'"),
        ("fit qwen3-8b --topology 1x8 --length 0", "expected a number from 1"),
        ("fit qwen3-8b --topology 1x8 --host-memory-gib -1", "expected GiB from 0"),
        ("fit qwen3-8b --topology 1x8 --host-memory-gib nan", "expected GiB from 0"),
        ("fit qwen3-8b --topology 1x8 --host-memory-gib x", "GiB as a number, got 'x'"),
        (
            "fit gpt-oss-120b --topology 1x1",
            "leaves no room for a token: use more ranks, or train adapters (--lora-rank)",
        ),
        (
            "fit gpt-oss-120b --topology 1x1 --zero-stage 1 --lora-rank 8",
            "leaves no room for a token: use more ranks, or shard them (--zero-stage 3)",
        ),
        ("fit qwen3-8b --topology 10000x8", "raise it with --limit ranks=80000"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, refused, tmp_path):
    path = tmp_path / "cost.json"
    LLAMA.save(path)
    assert message in refused(words.replace("COST", str(path)))


def test_a_model_that_is_nowhere_is_one_line(refused, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert "fit: " in refused(f"fit {tmp_path}/missing --topology 1x8")
    assert "fit: " in refused(f"fit {tmp_path} --topology 1x8")
