"""FlexSeqArguments: defaults, nonsense refused when created, and mixing with another dataclass."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from hf_flexseq import FlexSeqConfig
from hf_flexseq.base.registry import PLANNERS
from hf_flexseq.config import REMOVED, FlexSeqArguments


def test_defaults_are_valid_and_documented():
    arguments = FlexSeqArguments()
    assert (arguments.planner, arguments.strategy, arguments.sync) == ("auto",) * 3
    assert arguments.lookahead is None
    assert all(f.metadata["help"] for f in fields(FlexSeqArguments))
    assert len(fields(FlexSeqArguments)) <= 15


STATIC = {"planner": "static", "sp_degree": 2}


@pytest.mark.parametrize(
    "chosen, message",
    [
        ({"planner": "fastest"}, "planner must be one of auto, .*; got 'fastest'"),
        ({"planner": None}, "planner must be one of auto, .*; got None"),
        ({"strategy": "ring"}, "strategy must be one of auto, .*; got 'ring'"),
        ({"sync": "loose"}, "sync must be one of auto, lockstep, free; got 'loose'"),
        ({"on_nonfinite": "skip"}, "on_nonfinite must be one of raise, warn; got 'skip'"),
        (
            {"activation_memory": "host"},
            "activation_memory must be one of auto, as_set; got 'host'",
        ),
        ({"host_memory_gib": -1}, "host_memory_gib=-1: must not be negative"),
        ({"host_memory_gib": "8"}, "host_memory_gib='8': must be a finite number"),
        (
            {"host_memory_gib": 8, "pipeline_parallel_size": 2},
            "host_memory_gib=8: the stages of a pipeline keep nothing on the host",
        ),
        ({"planner": "static"}, "needs sp_degree"),
        ({"sp_degree": 2}, "needs planner='static', got planner='auto'"),
        (STATIC | {"sp_degree": 0}, "sp_degree=0"),
        (STATIC | {"sp_degree": "2"}, "sp_degree='2': must be a whole number"),
        (STATIC | {"strategy": "local"}, "sp_degree=2 does not go with strategy='local'"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0: must be at least 1"),
        ({"max_tokens_per_rank": 1e5}, "max_tokens_per_rank=100000.0"),
        ({"lookahead": -1}, "lookahead=-1: must be at least 0"),
        ({"lookahead": True}, "lookahead=True"),
        ({"save_attention_output": 2}, "save_attention_output=2: must be true or false"),
        ({"strategy": "allgather"}, "strategy='allgather' was removed: write strategy='zig"),
        ({"deterministic": True}, "deterministic was removed: call torch.use_determ"),
    ],
)
def test_refuses_nonsense(chosen, message):
    with pytest.raises(ValueError, match=message):
        FlexSeqArguments(**chosen)


def test_all_mistakes_are_named_at_once():
    wrong = {"planner": "fastest", "strategy": "ring", "sync": "loose", "lookahead": -1}
    wrong |= {"max_tokens_per_rank": 0, "on_nonfinite": "skip", "pipeline_parallel_size": 0}
    with pytest.raises(ValueError, match="^7 reasons to refuse this:\n1. ") as raised:
        FlexSeqArguments(**wrong)
    for name in wrong:
        assert name in str(raised.value)


def test_paths_become_text():
    args = FlexSeqArguments(cost_model=Path("cost.json"), plan_trace=Path("trace.jsonl"))
    assert (args.cost_model, args.plan_trace) == ("cost.json", "trace.jsonl")


def test_every_planner_can_be_chosen():
    for planner in PLANNERS:
        args = FlexSeqArguments(planner=planner, sp_degree=1 if planner == "static" else None)
        assert args.plan_options().planner == planner


def test_flexsp_without_its_solver_is_refused_when_configured(monkeypatch):
    monkeypatch.setattr(
        "hf_flexseq.base.registry.find_spec",
        lambda module: None if module == "highspy" else object(),
    )
    with pytest.raises(ValueError, match=r'needs highspy.*pip install "hf_flexseq\[planner\]"'):
        FlexSeqArguments(planner="flexsp")
    with pytest.raises(ValueError, match="pipeline_schedule='infinipipe' needs highspy"):
        FlexSeqArguments(pipeline_parallel_size=2, pipeline_schedule="infinipipe")


@dataclass
class Following:
    batch: int = 1

    def __post_init__(self):
        if self.batch < 1:
            raise ValueError("batch")


@dataclass
class Mixed(FlexSeqArguments, Following):
    pass


def test_runs_the_checks_of_the_dataclass_it_is_mixed_with():
    assert Mixed(batch=2, lookahead=0).batch == 2
    with pytest.raises(ValueError, match="batch"):
        Mixed(batch=0)


@pytest.mark.parametrize("kind", [FlexSeqArguments, FlexSeqConfig, Mixed])
def test_every_removed_option_says_what_to_write(kind):
    for name in [name for name in REMOVED if "=" not in name]:
        with pytest.raises(ValueError, match=f"{name} was removed: "):
            kind(**{name: 1})
