"""A plan run without running it: `simulate` for plans of sequences, `pipeline.simulate_pipeline`
for pipelines."""

from hf_flexseq.simulate.run import CLOSED_FORM, Detail, most_events, simulate

__all__ = ["CLOSED_FORM", "Detail", "most_events", "simulate"]
