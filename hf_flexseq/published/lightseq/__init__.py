"""LightSeq, or DistFlashAttn (arXiv 2310.03294)."""
