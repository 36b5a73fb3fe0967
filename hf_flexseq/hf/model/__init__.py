"""Facts, checks, loss and gradient buckets of a transformers model: everything that hf_flexseq asks
of one and changes on it."""
