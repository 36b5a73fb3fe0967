"""Planners that the published systems are compared with."""
