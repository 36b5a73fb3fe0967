"""Cost models of HF models: estimated from a configuration, counted, kept for later runs.

source.py               the cost model of a run: named, of a checkpoint, or estimated and corrected
choose.py               the estimate of a model in training
cache.py                the corrections that earlier runs have found
model_configuration.py  models by their configurations
layer_trial.py          bytes of a token in layers, by a copy without memory
"""
