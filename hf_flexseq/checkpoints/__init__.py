"""What checkpoints of all runs have in common: files that appear whole, marker and manifest, an
optimizer's state without pickles."""
