"""The shortest order of a few chunks' actions, by exhaustion: the slow twin of
`pipeline/planning/greedy.py`.

Forwards, I's and W's of a stage each have a fixed order, so a stage's next action is one of three.
Giffler and Thompson's branching visits all active schedules, one of which is optimal: find the
action that could be done first, and begin any action of its stage that could begin before that.
States that another state reached no later in any respect are dropped, and so are those that cannot
beat the best.
"""

from collections import defaultdict
from itertools import accumulate

from hf_flexseq.pipeline.planning.orders import backward_names

KINDS = "FIW"


def shortest(sizes, costs, memory_limit):
    """Nanoseconds of the best order, None where a unit alone does not fit."""
    stages = range(len(costs.forward))
    count = sum(sizes)
    firsts = list(accumulate(sizes, initial=0))
    backward = [firsts[unit] + index for unit, index in backward_names(sizes)]
    orders = {"F": range(count), "I": backward, "W": backward}
    rows = {"F": costs.forward, "I": costs.input_grad, "W": costs.weight_grad}
    seen = defaultdict(list)  # by counts of actions, the times of states
    best = None

    def fits(s, done):
        """Whether a stage has memory for its next forward. done: its actions of each kind."""
        forwarded = set(range(done["F"] + 1))
        held = sum(costs.held[s][place] for place in forwarded - set(backward[: done["W"]]))
        begun = forwarded & set(firsts) - set(backward[: done["I"]])
        carried = sum(costs.carried[s][place] for place in begun)
        return held + carried + max(costs.carried[s]) <= memory_limit[s]

    def ready(counts, free, arrivals):
        """Yield (stop, start, stage, kind, place) of every action that may come next."""
        for s in stages:
            done = counts[s]
            for kind in KINDS:
                if done[kind] == count or (kind == "F" and not fits(s, done)):
                    continue
                place = orders[kind][done[kind]]
                arrived = 0 if s == 0 and kind == "F" else arrivals.get((kind, s, place))
                if arrived is not None:
                    start = max(free[s], arrived)
                    yield start + rows[kind][s][place], start, s, kind, place

    def bound(counts, free):
        """Nanoseconds that the stages take at least."""
        ends = []
        for s in stages:
            left = sum(rows[k][s][p] for k in KINDS for p in orders[k][counts[s][k] :])
            ends.append(free[s] + left)
        return max(ends)

    def visit(counts, free, arrivals):
        nonlocal best
        if best is not None and bound(counts, free) >= best:
            return
        if all(done["W"] == count for done in counts):
            best = max(free)
            return
        times = (*free, *(arrivals[key] for key in sorted(arrivals)))
        known = seen[tuple(tuple(done.values()) for done in counts)]
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in known):
            return
        known.append(times)
        actions = sorted(ready(counts, free, arrivals))
        for stop, start, s, kind, place in actions:
            if s == actions[0][2] and start < actions[0][0]:
                later = {key: at for key, at in arrivals.items() if key != (kind, s, place)}
                receiver = s + 1 if kind == "F" else s - 1
                if kind == "F" and receiver not in stages:
                    later["I", s, place] = stop
                elif kind != "W" and receiver in stages:
                    later[kind, receiver, place] = stop + costs.send[place]
                if kind == "I":
                    later["W", s, place] = stop
                after = [dict(done) for done in counts]
                after[s][kind] += 1
                visit(after, [*free[:s], stop, *free[s + 1 :]], later)

    visit([dict.fromkeys(KINDS, 0) for _ in stages], [0 for _ in stages], {})
    return best
