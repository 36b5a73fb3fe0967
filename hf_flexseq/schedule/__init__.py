"""Schedules as data: who computes what, when, and whom it needs for that."""
