"""The engine: a dataloader becomes planned steps, which run on an attached model.

    engine.py         draws, plans, dispatches and runs steps
    whole_model.py    the attached model, as steps need it
    model_planning.py costs, memory and planner of an attached model
    loop.py           items that a user's own loop runs

The cost model of a run:

    cost_source.py          named, of a checkpoint, or estimated and corrected
    cost_choice.py          the estimate of a model in training
    layer_trial.py          bytes of a token in layers, by a copy without memory
"""
