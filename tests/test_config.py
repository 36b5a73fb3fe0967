"""FlexSeqArguments: defaults, nonsense refused when created, and mixing with another dataclass."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from hf_flexseq import FlexSeqConfig
from hf_flexseq.base.registry import PLANNERS, STRATEGIES
from hf_flexseq.config import REMOVED, FlexSeqArguments


def test_defaults_are_valid_and_documented() -> None:
    arguments = FlexSeqArguments()
    assert (arguments.planner, arguments.strategy, arguments.sync, arguments.lookahead) == (
        "auto",
        "auto",
        "auto",
        4,
    )
    assert all(f.metadata["help"] for f in fields(FlexSeqArguments))


@pytest.mark.parametrize(
    "chosen, message",
    [
        ({"planner": "fastest"}, "planner must be one of auto, .*; got 'fastest'"),
        ({"strategy": "ring"}, "strategy must be one of auto, .*; got 'ring'"),
        ({"sync": "loose"}, "sync must be one of auto, lockstep, free; got 'loose'"),
        ({"routing": "off"}, "routing was removed: leave it out"),
        ({"remap": "off"}, "remap was removed: leave it out"),
        ({"on_nonfinite": "skip"}, "on_nonfinite must be one of raise, warn; got 'skip'"),
        ({"planner": "static"}, "needs sp_degree"),
        ({"sp_degree": 2}, "needs planner='static', got planner='auto'"),
        ({"planner": "static", "sp_degree": 0}, "sp_degree=0"),
        (
            {"planner": "static", "sp_degree": 2, "strategy": "local"},
            "sp_degree=2 does not go with strategy='local'",
        ),
        ({"planner": "static", "sp_degree": "2"}, "sp_degree='2': must be a whole number"),
        ({"planner": None}, "planner must be one of auto, .*; got None"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0: must be at least 1"),
        ({"max_tokens_per_rank": 1e5}, "max_tokens_per_rank=100000.0"),
        ({"lookahead": -1}, "lookahead=-1: must be at least 0"),
        ({"lookahead": True}, "lookahead=True"),
        ({"save_attention_output": 2}, "save_attention_output=2: must be true or false"),
    ],
)
def test_refuses_nonsense(chosen: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlexSeqArguments(**chosen)


@pytest.mark.parametrize("kind", [FlexSeqArguments, FlexSeqConfig])
def test_a_removed_option_says_what_to_write(kind: type) -> None:
    with pytest.raises(ValueError, match="deterministic was removed: call torch.use_determ"):
        kind(deterministic=True)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"planner": "static", "sp_degree": 1, "strategy": "local"},
        {
            "planner": "static",
            "sp_degree": 4,
            "strategy": "zigzag",
            "sync": "free",
            "lookahead": 0,
        },
        {
            "strategy": "local",
            "max_tokens_per_rank": 1,
            "sync": "lockstep",
            "save_attention_output": False,
        },
    ],
)
def test_takes_what_makes_sense(chosen: dict) -> None:
    assert all(
        getattr(FlexSeqArguments(**chosen), name) == value for name, value in chosen.items()
    )


def test_paths_become_text() -> None:
    args = FlexSeqArguments(cost_model=Path("cost.json"), plan_trace=Path("trace.jsonl"))
    assert (args.cost_model, args.plan_trace) == ("cost.json", "trace.jsonl")


def test_every_planner_can_be_chosen() -> None:
    for planner in PLANNERS:
        args = FlexSeqArguments(planner=planner, sp_degree=1 if planner == "static" else None)
        assert args.plan_options().planner == planner


def test_flexsp_without_its_solver_is_refused_when_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hf_flexseq.base.registry.find_spec",
        lambda module: None if module == "highspy" else object(),
    )
    with pytest.raises(ValueError, match=r'needs highspy.*pip install "hf_flexseq\[planner\]"'):
        FlexSeqArguments(planner="flexsp")
    with pytest.raises(ValueError, match="pipeline_schedule='infinipipe' needs highspy"):
        FlexSeqArguments(pipeline_parallel_size=2, pipeline_schedule="infinipipe")


@pytest.mark.parametrize("strategy", ["auto", *STRATEGIES])
def test_every_strategy_of_a_plan_can_be_chosen(strategy: str) -> None:
    assert FlexSeqArguments(strategy=strategy).strategy == strategy


def test_a_removed_strategy_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="strategy='allgather' was removed: write strategy='zig"):
        FlexSeqArguments(strategy="allgather")


@dataclass
class Following:
    batch: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError("batch")


@dataclass
class Mixed(FlexSeqArguments, Following):
    pass


def test_runs_the_checks_of_the_dataclass_it_is_mixed_with() -> None:
    assert Mixed(batch=2, lookahead=0).batch == 2
    with pytest.raises(ValueError, match="batch"):
        Mixed(batch=0)


@pytest.mark.parametrize("name", [name for name in REMOVED if "=" not in name])
def test_every_removed_option_says_what_to_write(name: str) -> None:
    for kind in (FlexSeqArguments, Mixed):
        with pytest.raises(ValueError, match=f"{name} was removed: "):
            kind(**{name: 1})


def test_there_are_at_most_twelve_options() -> None:
    assert len(fields(FlexSeqArguments)) <= 12
