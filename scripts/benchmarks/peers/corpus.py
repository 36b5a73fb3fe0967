"""The sequences that all methods train on: the standard library's source, tokenized, capped and
drawn into steps."""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "recipes"))

VOCABULARY, LONGEST, PER_STEP = 4096, 8192, 16


def write_steps(path: Path, steps: int, seed: int) -> None:
    """[step][sequence][token], each sequence cut at LONGEST, as JSON."""
    from arguments import DataArguments
    from bpe import cached_bpe
    from corpus import load_documents

    documents, _ = load_documents(
        DataArguments(dataset="python-stdlib", max_length=LONGEST, long_sequences="split")
    )
    tokenizer = cached_bpe(documents["text"], VOCABULARY)
    chosen = random.Random(seed).sample(range(len(documents)), steps * PER_STEP)
    sequences = [tokenizer(documents[i]["text"]).input_ids[:LONGEST] for i in chosen]
    path.write_text(
        json.dumps([sequences[i * PER_STEP : (i + 1) * PER_STEP] for i in range(steps)])
    )


def read_steps(path: Path) -> list[list[list[int]]]:
    return json.loads(path.read_text())
