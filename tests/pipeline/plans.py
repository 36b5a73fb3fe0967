"""Random pipelined steps, legal by construction: tests of the executor must hold under any of
them."""

from itertools import pairwise

from hf_flexseq.pipeline.planning.orders import one_forward_one_backward
from hf_flexseq.pipeline.planning.plan import Action
from hf_flexseq.pipeline.planning.walk import check
from tests.pipelines import chunk_of, plan_of


def random_pipeline_plan(
    lengths, stages, rng, *, virtual=1, split_weights=False, checkpointing=False, layers=4
):
    """Sequences cut anywhere, tails packed with short ones, in any order, through a 1F1B-like
    schedule; `stages` ranks with `virtual` stages each."""
    chunks = tuple(
        chunk
        for unit, members in enumerate(_units(lengths, rng))
        for chunk in _cut(unit, members, rng)
    )
    order = _order(chunks)
    checkpointed = tuple(
        tuple(rng.randint(0, layers) for _ in chunks) for _ in range(stages * virtual)
    )
    if virtual > 1:
        actions = one_forward_one_backward([len(unit) for unit in order], stages, virtual)
    else:
        actions = [_actions(order, stage, stages) for stage in range(stages)]
    if split_weights:
        actions = [_with_split_weights(own, rng) for own in actions]
    plan = plan_of(
        list(map(tuple, actions)),
        stages=stages * virtual,
        lengths=tuple(lengths),
        chunks=chunks,
        checkpointed=checkpointed if checkpointing else (),
    )
    check(plan)
    return plan


def _units(lengths, rng):
    """[(id, length), ...] per unit: the first may be cut, the others are packed with its last
    chunk."""
    left = list(enumerate(lengths))
    rng.shuffle(left)
    units = []
    while left:
        count = rng.randint(1, 3)
        units.append(left[:count])
        left = left[count:]
    return units


def _cut(unit, members, rng):
    (sequence, length), *others = members
    cuts = sorted(rng.sample(range(1, length), min(rng.randint(0, 3), length - 1)))
    bounds = [0, *cuts, length]
    for index, (start, stop) in enumerate(pairwise(bounds)):
        whole = [(i, 0, n) for i, n in others] if stop == length else []
        yield chunk_of((sequence, start, stop), *whole, unit=unit, index=index)


def _order(chunks):
    """Chunk names by unit."""
    units = {}
    for chunk in chunks:
        units.setdefault(chunk.unit, []).append((chunk.unit, chunk.index))
    return list(units.values())


def _actions(order, stage, stages):
    """All forwards in order; a unit's backwards as soon as so many forwards are done as this stage
    keeps in flight."""
    forwards = [name for unit in order for name in unit]
    backwards = [name for unit in order for name in reversed(unit)]
    needs = [i for i, unit in enumerate(order) for _ in unit]  # the unit of each backward
    stops = [sum(len(unit) for unit in order[: i + 1]) for i in range(len(order))]
    actions, done = [], 0
    for count, name in enumerate(forwards, start=1):
        actions.append(Action(stage, "F", *name))
        while done < len(backwards) and stops[needs[done]] + stages - 1 - stage <= count:
            actions.append(Action(stage, "B", *backwards[done]))
            done += 1
    return actions + [Action(stage, "B", *name) for name in backwards[done:]]


def _with_split_weights(own, rng):
    """Two thirds of the backwards in two parts, the second ones at the end or before; all chunks
    of a unit alike."""
    actions, waiting = [], []
    for action in own:
        split = action.kind == "B" and (action.stage + action.unit) % 3 > 0
        actions.append(action._replace(kind="I") if split else action)
        waiting += [action._replace(kind="W")] if split else []
        while waiting and rng.random() < 0.4:
            actions.append(waiting.pop(0))
    return actions + waiting
