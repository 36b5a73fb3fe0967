"""Token-level pipeline: an HF model cut into stages that pass chunks of sequences along.

    planning/    decides, without torch: chunks, the order of actions, their costs, timelines
    trainer/     the Trainer and the engine on a model in stages, and their refusals
    executor     runs the actions of a rank; the other modules here are its parts

The core imports nothing from this package: the registry (`base/registry.py`) names the classes and
functions that replace the whole-model ones.
"""
