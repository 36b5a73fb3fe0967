"""A tokenizer whose tokens are the characters of a corpus, for small tasks.

With few tokens a model without any training says something useful by chance, which is where
reinforcement learning begins.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from bpe import BOS, EOS

UNKNOWN = "<unk>"


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each character of `texts`, and a BOS before every text.

    A character that no text has becomes the unknown token.
    """
    alphabet = sorted({character for text in texts for character in text})
    vocabulary = {token: index for index, token in enumerate([BOS, EOS, UNKNOWN, *alphabet])}
    # a BPE that merges nothing
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN
    )
