"""Families whose trial (`trial.py`) ends early, and that are known to be exact all the same.

A trial that ends early has seen some of the layers, or none; the rest might ask for anything. A
family stands here once `scripts/benchmarks/reach.py --probe` has compared it with one process
(`probe.py`), with windows and lengths that would show a difference. What its configuration says of
its layers is checked as for any other family.
"""

# by model_type of the text configuration: where the trial ends, and why
PROBED_FAMILIES: dict[str, str] = {
    "gemma3n_text": "its MLPs keep a share of their values, above a quantile that is a number",
    "jetmoe": "its routing counts tokens by expert",
}
