"""The pipeline's schedules: which stage does which action, and when."""
