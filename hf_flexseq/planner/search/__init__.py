"""The default planner, `auto`: a search over groups, their degrees and what they hold."""
