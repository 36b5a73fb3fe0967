"""Planning in a process of its own: the training process's end and the planning process's."""
