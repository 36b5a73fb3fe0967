"""The shortest order of a few chunks' actions, by exhaustion: the slow twin of
`planner/pipeline/greedy.py`.

Forwards, I's and W's of a stage each have a fixed order, so a stage's next action is one of three.
Giffler and Thompson's branching visits all active schedules, one of which is optimal: find the
action that could be done first, and begin any action of its stage that could begin before that.
States that another state reached no later in any respect are dropped, and so are those that cannot
beat the best.
"""

from itertools import accumulate

from hf_flexseq.planner.pipeline.orders import backward_names


def shortest(sizes, costs, memory_limit):
    """Nanoseconds of the best order, None where a unit alone does not fit."""
    return _Search(sizes, costs, memory_limit).best


class _Search:
    def __init__(self, sizes, costs, memory_limit):
        self.costs, self.stages, self.count = costs, len(costs.forward), sum(sizes)
        firsts = list(accumulate(sizes, initial=0))
        self.backward = [firsts[unit] + index for unit, index in backward_names(sizes)]
        self.memory_limit = [
            limit - max(carried)
            for limit, carried in zip(memory_limit, costs.carried, strict=True)
        ]
        self.first = set(firsts)
        self.best, self.seen = None, {}
        start = tuple([0] * self.stages)
        self._visit((start, start, start, start), {}, {})

    def _held(self, s, f, i, w):
        held, carried = self.costs.held[s], self.costs.carried[s]
        gone = {self.backward[k] for k in range(w)}
        drained = {self.backward[k] for k in range(i)}
        total = sum(held[place] for place in range(f) if place not in gone)
        return total + sum(
            carried[place] for place in range(f) if place in self.first and place not in drained
        )

    def _ready(self, state, ahead, back):
        """(stop, start, stage, kind, place) of every action that may come next on its stage."""
        f, i, w, free = state
        for s in range(self.stages):
            if f[s] < self.count and self._held(s, f[s] + 1, i[s], w[s]) <= self.memory_limit[s]:
                place = f[s]
                arrived = ahead.get((s, place)) if s else 0
                if arrived is not None:
                    start = max(free[s], arrived)
                    yield start + self.costs.forward[s][place], start, s, "F", place
            if i[s] < self.count:
                place = self.backward[i[s]]
                arrived = back.get((s, place))
                if arrived is not None and place < f[s]:
                    start = max(free[s], arrived)
                    yield start + self.costs.input_grad[s][place], start, s, "I", place
            if w[s] < i[s]:
                place = self.backward[w[s]]
                yield free[s] + self.costs.weight_grad[s][place], free[s], s, "W", place

    def _bound(self, state):
        f, i, w, free = state
        costs, ends = self.costs, []
        for s in range(self.stages):
            left = sum(costs.forward[s][f[s] :])
            left += sum(costs.input_grad[s][p] for p in self.backward[i[s] :])
            left += sum(costs.weight_grad[s][p] for p in self.backward[w[s] :])
            ends.append(free[s] + left)
        return max(ends)

    def _visit(self, state, ahead, back):
        f, i, w, free = state
        if min(w) == self.count:
            self.best = max(free) if self.best is None else min(self.best, max(free))
            return
        if self.best is not None and self._bound(state) >= self.best:
            return
        times = (*free, *(ahead[k] for k in sorted(ahead)), *(back[k] for k in sorted(back)))
        known = self.seen.setdefault((f, i, w), [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in known):
            return
        known[:] = [
            other for other in known if not all(b <= a for a, b in zip(other, times, strict=True))
        ] + [times]
        actions = sorted(self._ready(state, ahead, back))
        if not actions:
            return
        soonest, _, stage, _, _ = actions[0]
        for stop, start, s, kind, place in actions:
            if s == stage and start < soonest:
                self._visit(*self._after(state, ahead, back, s, kind, place, stop))

    def _after(self, state, ahead, back, s, kind, place, stop):
        counts = [list(part) for part in state]
        counts["FIW".index(kind)][s] += 1
        counts[3][s] = stop
        ahead, back = dict(ahead), dict(back)
        at = stop + self.costs.send[place]
        if kind == "F":
            ahead.pop((s, place), None)
            if s + 1 < self.stages:
                ahead[s + 1, place] = at
            else:
                back[s, place] = stop
        elif kind == "I":
            back.pop((s, place))
            if s:
                back[s - 1, place] = at
        return tuple(map(tuple, counts)), ahead, back
