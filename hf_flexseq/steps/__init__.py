"""An optimizer step from drawn batches to trace: draw, plan, exchange tokens, run, record. No
HuggingFace library."""
