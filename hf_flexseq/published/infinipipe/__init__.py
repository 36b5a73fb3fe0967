"""InfiniPipe (arXiv 2509.21275)."""
