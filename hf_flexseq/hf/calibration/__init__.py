"""The cost model of a run: chosen, estimated from the model's config, or measured on copies of the
model."""
