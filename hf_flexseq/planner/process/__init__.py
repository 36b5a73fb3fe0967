"""Planning besides training: the question (jobs), the training process's end (client), and the
planning process's (worker)."""
