"""The sequences that all methods train on: the standard library's source, drawn into steps."""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "recipes"))

VOCABULARY = 4096
LONGEST = 8192  # tokens of a sequence; what is longer is cut
PER_STEP = 16  # sequences of an optimizer step


def write_steps(path: Path, steps: int, seed: int) -> None:
    """Write [step][sequence][token] as JSON, each sequence cut at LONGEST."""
    from arguments import DataArguments
    from bpe import cached_bpe
    from corpus import load_documents

    documents, _ = load_documents(
        DataArguments(dataset="python-stdlib", max_length=LONGEST, long_sequences="split")
    )
    tokenizer = cached_bpe(documents["text"], VOCABULARY)
    chosen = random.Random(seed).sample(range(len(documents)), steps * PER_STEP)
    sequences = [tokenizer(documents[i]["text"]).input_ids[:LONGEST] for i in chosen]
    by_step = [sequences[i * PER_STEP : (i + 1) * PER_STEP] for i in range(steps)]
    path.write_text(json.dumps(by_step))


def read_steps(path: Path) -> list[list[list[int]]]:
    """Return [step][sequence][token]."""
    return json.loads(path.read_text())
