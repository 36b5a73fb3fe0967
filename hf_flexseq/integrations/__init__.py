"""Other tools' ways to start a run, each in a module that puts `FlexSeqMixin` into the tool."""
