"""A byte-level BPE trained on the corpus, for runs without any downloaded tokenizer.

Trained once and cached under a name that depends on the text and the vocabulary's size. The folder
appears under that name only when it is complete, so that processes that start together, or a run
that was interrupted, do no harm.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from huggingface_hub.constants import HF_HOME
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS = "<s>"
EOS = "</s>"


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `vocab_size` tokens that puts a BOS before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 2
    if vocab_size < smallest:
        raise ValueError(
            f"tokenizer_vocab_size={vocab_size}: 256 bytes and two special tokens need {smallest}"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[bos]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def cached_bpe(
    texts: Iterable[str], vocab_size: int, cache: str | Path | None = None
) -> PreTrainedTokenizerFast:
    """Return such a tokenizer, from the cache if these texts were seen before.

    The tokenizer is always read back from disk: so every process has the same object, and the same
    key in the cache of tokenized data.
    """
    texts = list(texts)
    folder = Path(cache or Path(HF_HOME) / "hf_flexseq") / f"bpe-{vocab_size}-{_digest(texts)}"
    if not folder.exists():
        save_whole(train_bpe(texts, vocab_size).save_pretrained, folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _digest(texts: list[str]) -> str:
    """Return a name for these texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode(errors="surrogatepass")).digest())
    return digest.hexdigest()[:16]


def save_whole(save: Callable[[Path], object], folder: Path) -> None:
    """Call `save` with the folder to write, so that `folder` appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        save(Path(unfinished) / folder.name)
        try:
            os.rename(Path(unfinished) / folder.name, folder)
        except OSError:
            # Another process was faster; what it wrote is the same.
            if not folder.exists():
                raise
