"""Token-level pipeline: an HF model cut into stages that pass chunks of sequences along."""
