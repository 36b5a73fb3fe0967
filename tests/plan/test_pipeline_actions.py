"""A pipeline's plan as data: its text form and its JSON."""

import json
from dataclasses import replace

import pytest

from hf_flexseq.plan.pipeline import Action, Chunk, PipelinePlan, parse, text
from hf_flexseq.plan.shard import Slice


@pytest.fixture
def plan():
    """Two stages; sequence 0 in two chunks, its tail packed with sequence 1."""
    first = Chunk(unit=0, index=0, slices=(Slice(sequence=0, start=0, stop=6),))
    tail = Chunk(
        unit=0,
        index=1,
        slices=(Slice(sequence=0, start=6, stop=9), Slice(sequence=1, start=0, stop=2)),
    )
    return PipelinePlan(
        lengths=(9, 2),
        ranks=2,
        stages=2,
        chunks=(first, tail),
        actions=(
            parse("0F0.0 0F0.1 0B0.1 0I0.0 0W0.0"),
            parse("1F0.0 1F0.1 1B0.1 1I0.0 1W0.0"),
        ),
        checkpointed=((0, 1), (0, 0)),
        schedule="auto",
        objective_s=1.5,
        planning_s=0.25,
    )


def test_the_text_form_names_stage_kind_unit_and_chunk():
    assert str(Action(2, "F", 0, 1)) == "2F0.1"
    assert parse("2F0.1 10W3.12") == (Action(2, "F", 0, 1), Action(10, "W", 3, 12))
    assert text(parse("2F0.1 10W3.12")) == "2F0.1 10W3.12"


@pytest.mark.parametrize("word", ["2X0.1", "F0.1", "2F0", "2F0.1x", "-1F0.0", ""])
def test_other_words_are_refused(word):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(word)


def test_a_chunk_knows_its_cut_sequence(plan):
    whole = Chunk(unit=1, index=0, slices=(Slice(sequence=1, start=0, stop=2),))
    assert plan.chunks[1].cut(plan.lengths) == Slice(sequence=0, start=6, stop=9)
    assert whole.cut(plan.lengths) is None
    assert plan.chunks[1].tokens == 5


def test_json_round_trip(plan):
    assert PipelinePlan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match="not a plan of a pipeline"):
        PipelinePlan.from_json(json.dumps({"lengths": [1]}))


def test_the_digest_leaves_out_planning_time_only(plan):
    assert replace(plan, planning_s=9.0).digest() == plan.digest()
    assert replace(plan, checkpointed=()).digest() != plan.digest()
    assert replace(plan, actions=plan.actions[::-1]).digest() != plan.digest()
