"""Cost models of HF models: chosen for a run, estimated from a configuration, or measured by the
profiler on copies of the model."""
