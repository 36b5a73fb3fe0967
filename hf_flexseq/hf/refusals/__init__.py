"""What hf_flexseq refuses, as tables of rules: one module per subject.

The trainer and the engine read the tables when they are made. `scripts/pages/render.py` makes the
tables of docs/limits.md from the same rules.
"""
