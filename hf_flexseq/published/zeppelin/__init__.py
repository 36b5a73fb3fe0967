"""Zeppelin (arXiv 2509.21841)."""
