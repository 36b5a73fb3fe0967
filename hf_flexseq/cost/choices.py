"""Cost models under other choices for activations than the one that they were measured with.

Relative to the choice that the user has set for the run, of L layers,

    linear      3 passes, one more in a layer that runs again; 2 where weights are frozen
    tiles       one pass of the MLP more; in a layer that runs again, whose replay ends before it
                (`memory/tiles.py`), that of the last of its three matrices
    attention   1 forward and a backward of 2.5; 1 more where its output is computed again
    experts     as linear layers, their exchanges as those of Ulysses
    transfers   Ulysses exchanges heads twice, three times for a layer that runs again; a ring's
                keys make 3 trips, 4 where attention is computed again
    host        what a layer sends, or gets back, beyond the seconds in which linear layers hide it

Attention's seconds would hide transfers to the host, too; they are left out, because those of a
token depend on its sequence. So a choice is never priced too low by it.
"""

import functools
from dataclasses import replace

from hf_flexseq.base.values import MAX_TOKENS_PER_RANK
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.model import ATTENTION_BACKWARD, CostModel
from hf_flexseq.plan.memory import MemoryChoice

# Trips of Ulysses' heads and of a ring's keys where nothing runs again.
EXCHANGES = 2.0
RING_TRIPS = 3.0

# Matrices of a gated MLP, of which each is a third of its pass.
MLP_MATRICES = 3

# Most tiles of an MLP: with these, what is inside of it hardly counts any more.
MOST_TILES = 16

# Steps in which a choice grows: layers are taken by quarters of the model.
QUARTERS = 4


class _Passes:
    """How often each part of a model runs under a choice, relative to running nothing again."""

    def __init__(self, choice: MemoryChoice, activations: Activations) -> None:
        layers = activations.layers
        again = choice.recomputed_layers / layers
        attention_again = choice.outputs_recomputed / layers
        self.linear = activations.linear_passes + again
        if choice.mlp_tiles > 1:
            self.linear += activations.mlp_share * (1 - again + again / MLP_MATRICES)
        self.attention = 1 + ATTENTION_BACKWARD + attention_again
        self.exchanges = EXCHANGES + again
        self.ring_trips = RING_TRIPS + attention_again


@functools.lru_cache(maxsize=4096)
def with_choice(cost: CostModel, choice: MemoryChoice | None) -> CostModel:
    """Return the cost model of micro-batches under a choice; None stands for the user's own.

    Its `token_bytes` are those of the choice. Raises ValueError for a choice of more layers than
    the model has.
    """
    activations = cost.activations
    if activations is None or choice is None or choice == activations.as_set:
        return cost
    if choice.recomputed_layers > activations.layers:
        raise ValueError(
            f"the plan recomputes {choice.recomputed_layers} layers, and the model of cost model "
            f"{cost.name!r} has {activations.layers}: give the cost model that it was made with"
        )
    passes = _Passes(choice, activations)
    before = _Passes(activations.as_set, activations)
    linear_ratio = passes.linear / before.linear
    attention_ratio = passes.attention / before.attention
    exchange_ratio = passes.exchanges / before.exchanges
    linear_s = cost.linear_s * linear_ratio
    linear_s += _exposed_s(cost, activations, choice) - _exposed_s(
        cost, activations, activations.as_set
    )
    experts = cost.experts
    if experts is not None:
        experts = experts.scaled(computing=linear_ratio, exchanges=exchange_ratio)
    ring_bytes = cost.ring_bytes
    if ring_bytes is not None:
        ring_bytes *= passes.ring_trips / before.ring_trips
    return replace(
        cost,
        attention_s=cost.attention_s * attention_ratio,
        linear_s=linear_s,
        all_to_all_bytes=cost.all_to_all_bytes * exchange_ratio,
        ring_bytes=ring_bytes,
        token_bytes=token_bytes(cost, choice),
        experts=experts,
    )


def price_of(cost: CostModel, choice: MemoryChoice) -> tuple[float, float]:
    """Return the seconds of linear layers with experts, and of attention, under a choice, each
    relative to those under the user's own."""
    priced = with_choice(cost, choice)
    activations = cost.activations
    assert activations is not None, "only a cost model with activations has choices"
    passes = _Passes(choice, activations)
    before = _Passes(activations.as_set, activations)
    return priced.token_s / cost.token_s, passes.attention / before.attention


def _exposed_s(cost: CostModel, activations: Activations, choice: MemoryChoice) -> float:
    """Return the seconds of each token's transfers to the host and back that linear layers do not
    hide."""
    moved = activations.host_token_bytes(choice)
    if not moved:
        return 0.0
    pass_s = cost.linear_s / _Passes(activations.as_set, activations).linear
    out_s = moved / activations.out_rate
    back_s = moved / activations.back_rate
    backward_passes = _Passes(choice, activations).linear - 1
    return max(0.0, out_s - pass_s) + max(0.0, back_s - backward_passes * pass_s)


# ---- tokens


def token_bytes(cost: CostModel, choice: MemoryChoice) -> float:
    """Return the device's bytes of a token under a choice, in the proportion that its activations
    have to those of the user's own choice."""
    activations = cost.activations
    assert activations is not None, "only a cost model with activations has choices"
    if choice == activations.as_set:
        return cost.token_bytes
    of_choice = activations.token_bytes(choice)
    return cost.token_bytes * of_choice / activations.token_bytes(activations.as_set)


def most_tokens(cost: CostModel, choice: MemoryChoice, world_size: int) -> int:
    """Return the most tokens of a rank under a choice, on its device and its host; 0 for none."""
    activations = cost.activations
    assert activations is not None, "only a cost model with activations has choices"
    free_bytes = cost.free_bytes(world_size)
    on_device = max(0.0, min(free_bytes // token_bytes(cost, choice), MAX_TOKENS_PER_RANK))
    return activations.within_host(int(on_device), choice)


def held_at_most(cost: CostModel, tokens: int, world_size: int) -> CostModel:
    """Return a cost model of ranks with no more memory than model states and `tokens` tokens under
    the user's own choice take."""
    states = cost.budget_bytes - cost.free_bytes(world_size)
    room = (tokens + 0.5) * cost.token_bytes  # half a token, lest one is lost to rounding
    return replace(cost, budget_bytes=min(cost.budget_bytes, states + room))


# ---- which choices there are


@functools.lru_cache(maxsize=64)
def choices_of(cost: CostModel) -> tuple[MemoryChoice, ...]:
    """Return the choices that a planner compares, the user's own first, then by falling bytes of a
    token; () for a cost model without activations.

    What the user recomputes, or has on the host, stays so. A choice that needs no fewer bytes than
    another one, nor fewer of the host, and is no faster, is left out.
    """
    activations = cost.activations
    if activations is None:
        return ()
    figures: dict[MemoryChoice, tuple[float, ...]] = {}
    for choice in (activations.as_set, *_all_choices(activations)):
        priced = with_choice(cost, choice)
        figures[choice] = (
            priced.token_bytes,
            activations.host_token_bytes(choice),
            priced.token_s,
            _Passes(choice, activations).attention,
        )
    kept = []
    for choice, these in figures.items():
        if choice != activations.as_set and not _is_beaten(choice, these, figures):
            kept.append(choice)
    kept.sort(key=lambda choice: -figures[choice][0])
    return (activations.as_set, *kept)


def _is_beaten(
    choice: MemoryChoice,
    these: tuple[float, ...],
    figures: dict[MemoryChoice, tuple[float, ...]],
) -> bool:
    """Return True if another choice is as good in everything, and better or earlier in order."""
    earlier = True
    for other, those in figures.items():
        if other == choice:
            earlier = False
            continue
        as_good = all(that <= this for that, this in zip(those, these, strict=True))
        if as_good and (earlier or those != these):
            return True
    return False


def _all_choices(activations: Activations) -> list[MemoryChoice]:
    """Return all combinations of steps that save at least what the user's choice saves."""
    as_set = activations.as_set
    tiles = [as_set.mlp_tiles]
    if activations.mlp_share and as_set.mlp_tiles == 1:
        tiles.append(MOST_TILES)
    made = []
    for count in tiles:
        for recomputed in _steps(as_set.recomputed_layers, activations.layers):
            for inputs, outputs in _on_host(as_set, recomputed, activations.layers):
                rest = recomputed - outputs
                for again in sorted({min(as_set.outputs_recomputed, rest), rest}):
                    choice = MemoryChoice(
                        recomputed_layers=recomputed,
                        inputs_on_host=inputs,
                        outputs_on_host=outputs,
                        outputs_recomputed=again,
                        mlp_tiles=count,
                    )
                    made.append(choice)
    return made


def _on_host(as_set: MemoryChoice, recomputed: int, layers: int) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of recomputed layers that may be on the host: inputs go first, and
    only a model that recomputes all layers takes them there by quarters."""
    step = _steps if recomputed == layers else _ends
    inputs = step(as_set.inputs_on_host, recomputed)
    outputs = step(as_set.outputs_on_host, recomputed - as_set.outputs_recomputed)
    pairs = [(count, outputs[0]) for count in inputs]
    pairs += [(recomputed, count) for count in outputs[1:]]
    return pairs


def _ends(least: int, most: int) -> list[int]:
    """Return the least and the most layers."""
    return sorted({least, most})


def _steps(least: int, most: int) -> list[int]:
    """Return the numbers of layers from `least` to `most` at which choices are compared."""
    steps = {least, most}
    for quarter in range(1, QUARTERS):
        steps.add(least + (most - least) * quarter // QUARTERS)
    return sorted(steps)
