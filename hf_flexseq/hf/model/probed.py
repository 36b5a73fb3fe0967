"""Families whose trial (`trial.py`) ends early, and that are known to be exact all the same.

A trial that ends early has seen some of the layers, or none; the rest might ask for anything. A
family stands here once `tests/hf/test_reach.py` has trained it against one process, with windows
and lengths that would show a difference.
"""

# by model_type of the text configuration: where the trial ends, and why
PROBED_FAMILIES: dict[str, str] = {
    "gemma3n_text": "sparse activations read a quantile of the normal distribution",
    "jetmoe": "experts are cut by how many tokens each has",
}
