"""Planning beside training: what is asked (jobs), the training process's end (client), and the
planning process's (worker)."""
