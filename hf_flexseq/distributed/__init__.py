"""The only place that creates process groups or moves bytes between ranks."""
