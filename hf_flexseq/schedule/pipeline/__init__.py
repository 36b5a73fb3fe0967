"""The schedules of a pipeline: which stage does which action, in which order, and when."""
