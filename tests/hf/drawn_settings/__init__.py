"""Random draws of options, models and customisations of a Trainer, each trained twice on two
ranks: by the stock trainer and with hf_flexseq.

    options.py    the options of trainers and of hf_flexseq, as data
    sources.py    models, datasets and collators
    change.py     what a customisation is, for losses.py, methods.py, hooks.py and callbacks.py
    case.py       draw(seed): one combination of these
    verdicts.py   what a comparison of both trainings comes to
    run.py        the two trainings of a case, on forked ranks

    python -m tests.hf.drawn_settings --seed 17 --reduce      the part of a draw that fails
    python -m tests.hf.drawn_settings --first 0 --count 300
"""
