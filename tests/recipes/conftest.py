import pytest

from bpe import train_bpe

TEXTS = ["def f(x):\n    return x + 1\n", "import os\n\nprint(os.name)\n"]


@pytest.fixture(scope="session")
def tokenizer():
    return train_bpe(TEXTS, vocab_size=300)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    """What `datasets` writes stays in the test's own folder."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
