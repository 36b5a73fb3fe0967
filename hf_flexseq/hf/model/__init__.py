"""What hf_flexseq asks of a transformers model and changes on it: checks, loss, gradient
buckets."""
