"""Random draws of options, models and customisations of a Trainer, each trained twice on two
ranks: by the stock trainer and with hf_flexseq.

    options.py    the options of trainers and of hf_flexseq, as data
    sources.py    models, datasets and collators
    changes.py    what a user may change of a trainer, method by method
    hooks.py      hooks, callbacks and modules that a user may add
    case.py       draw(seed): one combination of these
    verdicts.py   what a comparison of both trainings comes to
    run.py        the two trainings of many cases, on forked ranks

    python -m tests.hf.drawn_settings --seed 17         one draw again
    python -m tests.hf.drawn_settings --first 0 --count 300
"""
