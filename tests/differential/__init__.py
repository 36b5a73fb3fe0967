"""Trainings by a stock trainer, and by the same trainer with hf_flexseq, side by side.

case.py    Case: a trainer, its model, options and ours; make_trainer makes either trainer
runs.py    run(case) on one rank; here(case) beside the stock trainer; both(cases) on forked ranks
           beside the stock trainer in one process, which runs once for all cases that it is the
           same for; assert_alike(cases) compares these; both_on_ranks(cases) beside the stock
           trainer on as many ranks

assert_alike({"two batches": Case(accumulation=2)}, folder, weights=1e-6)
"""
