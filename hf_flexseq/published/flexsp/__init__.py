"""FlexSP (arXiv 2412.01523)."""
