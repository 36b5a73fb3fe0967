"""Costs of a forward without a backward: of a reference model, of an evaluation, or of samples
whose log-probabilities are wanted."""

from dataclasses import replace

from hf_flexseq.cost.model import ATTENTION_BACKWARD, LINEAR_PASSES, TERMS, CostModel
from hf_flexseq.cost.terms import scaled

# Shares of a forward and its backward. Of attention's seven matrix products a forward has two;
# Ulysses exchanges heads four times in a forward and four times in a backward, and states of
# recurrent layers come back in a backward; the keys of a ring make one trip of three.
SHARES = dict.fromkeys(TERMS, 1 / LINEAR_PASSES) | {
    "attention": 1 / (1 + ATTENTION_BACKWARD),
    "all_to_all": 1 / 2,
    "states": 1 / 2,
}


def forward_only(cost: CostModel) -> CostModel:
    """Return the cost model of forwards alone, from a cost model of forwards and backwards.

    Bytes of memory stay: a rank has room for as many tokens as in training.
    """
    return replace(
        scaled(cost, [SHARES[name] for name in TERMS]),
        name=f"{cost.name}, forward only",
        tower=None if cost.tower is None else cost.tower.forward_only(),
        activations=None,  # nothing waits for a backward
    )
