"""Everything that hf_flexseq asks of a transformers model and changes on it: facts, checks, the
loss, gradient buckets."""
