"""What hf_flexseq refuses, as tables of rules: one module per subject.

The trainer and the engine read the tables when they are made. `scripts/refusals_page.py` writes
`docs/refusals.md` from the same tables.
"""
