"""The common parts of all runs' checkpoints: files that appear whole, marker and manifest, an
optimizer's state without pickles."""
