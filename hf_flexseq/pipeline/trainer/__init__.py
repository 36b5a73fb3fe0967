"""The Trainer on a model that is cut into pipeline stages."""
