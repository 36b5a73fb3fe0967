"""FlexSeqArguments: defaults, nonsense refused when created, and mixing with another dataclass."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from hf_flexseq import FlexSeqConfig
from hf_flexseq.config import FlexSeqArguments
from hf_flexseq.registry import STRATEGIES


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
        ({"planner": "fastest"}, "planner='fastest'"),
        ({"strategy": "ring"}, "strategy='ring'"),
        ({"sync": "loose"}, "sync='loose'"),
        ({"routing": "off"}, "routing was removed: leave it out"),
        ({"remap": "off"}, "remap was removed: leave it out"),
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip' is none of raise, warn"),
        ({"planner": "static"}, "needs sp_degree"),
        ({"sp_degree": 2}, "is for planner='static'"),
        ({"planner": "static", "sp_degree": 0}, "sp_degree=0"),
        (
            {"planner": "static", "sp_degree": 2, "strategy": "local"},
            "sp_degree=2: strategy='local'",
        ),
        ({"planner": "static", "sp_degree": "2"}, "sp_degree='2': give a whole number"),
        ({"planner": None}, "planner=None is none of auto"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0: give a whole number, at least 1"),
        ({"max_tokens_per_rank": 1e5}, "max_tokens_per_rank=100000.0"),
        ({"lookahead": -1}, "lookahead=-1: give a whole number, at least 0"),
        ({"lookahead": True}, "lookahead=True"),
        ({"attention_remat": "layers"}, "attention_remat='layers': give True or False"),
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
            "attention_remat": False,
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


@pytest.mark.parametrize("planner", ["auto", "flexsp", "zeppelin"])
def test_planners_to_choose(planner: str) -> None:
    assert FlexSeqArguments(planner=planner).planner == planner


@pytest.mark.parametrize("planner", ["megatron", "batch-ada", "batch-rebalance"])
def test_baselines_are_not_for_training(planner: str) -> None:
    with pytest.raises(ValueError, match="is none of auto, static, flexsp, zeppelin"):
        FlexSeqArguments(planner=planner)


def test_flexsp_without_its_solver_is_refused_when_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hf_flexseq.config.find_spec", lambda module: None if module == "highspy" else object()
    )
    with pytest.raises(ValueError, match=r'needs highspy.*pip install "hf_flexseq\[planner\]"'):
        FlexSeqArguments(planner="flexsp")


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
