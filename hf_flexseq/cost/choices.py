"""Cost models under other choices for activations than the one that they were measured with.

Relative to the choice that the user has set for the run, of L layers,

    linear      3 passes, one more in a layer that runs again; 2 where weights are frozen
    tiles       one pass of the MLP more; in a layer that runs again, whose replay ends before the
                MLP (`memory/tiles.py`), a pass of the last of its three matrices alone
    attention   1 forward and a backward of 2.5; 1 more where its output is computed again
    experts     as linear layers, their exchanges twice, three times for a layer that runs again
    transfers   Ulysses exchanges heads twice, 2 2/3 times for a layer that runs again; a ring's
                keys make 3 trips, 4 where attention is computed again
    host        a layer's transfers to the host, and back, beyond the seconds of linear layers that
                hide them

Attention would hide transfers to the host, too. It is left out, because its seconds per token
depend on the sequence, so a choice is never priced too low.
"""

import functools
from dataclasses import replace

from hf_flexseq.base.values import MAX_TOKENS_PER_RANK
from hf_flexseq.cost.activations import Activations
from hf_flexseq.cost.model import ATTENTION_BACKWARD, EXCHANGES, EXCHANGES_AGAIN, CostModel
from hf_flexseq.plan.memory import MemoryChoice
from hf_flexseq.plan.rings import RING_PASSES

# Exchanges with experts where nothing runs again.
EXPERT_EXCHANGES = 2.0

# Matrices of a gated MLP, of which each is a third of its pass.
MLP_MATRICES = 3

# Most tiles of an MLP: with these, what is inside of it hardly counts any more.
MOST_TILES = 16

# Steps by which layers go to the host.
QUARTERS = 4

# Choices that a planner has, at most.
MOST_CHOICES = 5


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
        self.exchanges = EXCHANGES + EXCHANGES_AGAIN * again
        self.experts = EXPERT_EXCHANGES + again
        self.ring_trips = RING_PASSES + attention_again


@functools.lru_cache(maxsize=4096)
def with_choice(cost: CostModel, choice: MemoryChoice | None) -> CostModel:
    """Return the cost model of micro-batches under a choice; None is the user's own choice.

    Its `token_bytes` follow the choice. Raises ValueError for a choice of more layers than the
    model has.
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
        experts = experts.scaled(computing=linear_ratio, exchanges=passes.experts / before.experts)
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


def _exposed_s(cost: CostModel, activations: Activations, choice: MemoryChoice) -> float:
    """Return the seconds per token of transfers to the host and back that linear layers do not
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


def token_bytes(cost: CostModel, choice: MemoryChoice | None) -> float:
    """Return the device's bytes per token under a choice: the cost model's, times the choice's
    share of the activation bytes under the user's own choice, which None is."""
    if choice is None:
        return cost.token_bytes
    activations = cost.activations
    assert activations is not None, "only a cost model with activations has choices"
    if choice == activations.as_set:
        return cost.token_bytes
    of_choice = activations.token_bytes(choice)
    return cost.token_bytes * of_choice / activations.token_bytes(activations.as_set)


def most_tokens(cost: CostModel, choice: MemoryChoice, world_size: int) -> int:
    """Return the most tokens per rank under a choice, on its device and its host; 0 for none."""
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


# ---- the ladder


@functools.lru_cache(maxsize=64)
def choices_of(cost: CostModel, world_size: int) -> tuple[MemoryChoice, ...]:
    """Return the choices that a planner has, by rising room for tokens and rising price, the
    user's own first; () for a cost model without activations.

    Each keeps the user's settings, and also

        as set       nothing else
        half         runs half of the layers again that the user keeps
        all          runs all of them again
        on host      has their inputs and the outputs of their attention on the host
        tiles        computes MLPs in tiles as well
        again        computes attention again instead of having its outputs

    The host takes as many layers as give a rank most tokens. A choice without more room than the
    one before it is left out, and `half` if more than `MOST_CHOICES` remain.
    """
    activations = cost.activations
    if activations is None:
        return ()
    as_set, layers = activations.as_set, activations.layers
    half = (as_set.recomputed_layers + layers) // 2
    every = replace(as_set, recomputed_layers=layers)
    tiles = MOST_TILES if activations.mlp_share and as_set.mlp_tiles == 1 else as_set.mlp_tiles
    tiled = replace(every, mlp_tiles=tiles)
    again = replace(tiled, outputs_recomputed=layers - as_set.outputs_on_host)

    def room(choice: MemoryChoice) -> int:
        return most_tokens(cost, choice, world_size)

    kept = [as_set]
    higher = [replace(as_set, recomputed_layers=half), every]
    higher += [max(_on_host(choice), key=room) for choice in (every, tiled, again)]
    for choice in higher:
        if room(choice) > room(kept[-1]):
            kept.append(choice)
    if len(kept) > MOST_CHOICES:
        del kept[1]
    return tuple(kept)


def _on_host(choice: MemoryChoice) -> list[MemoryChoice]:
    """Return the choices with the inputs of more layers on the host, then with all inputs and
    more outputs of attention, by quarters of the layers."""
    layers = choice.recomputed_layers
    made = []
    for inputs in _steps(choice.inputs_on_host, layers):
        made.append(replace(choice, inputs_on_host=inputs))
    for outputs in _steps(choice.outputs_on_host, layers - choice.outputs_recomputed):
        made.append(replace(choice, inputs_on_host=layers, outputs_on_host=outputs))
    return made


def _steps(least: int, most: int) -> list[int]:
    """Return the numbers of layers from `least` to `most`, by quarters of their difference."""
    return [least + (most - least) * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
