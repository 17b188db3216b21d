"""A tokenizer of one's own captions: a byte-level BPE, as CLIP's, in a file tokenizer.json."""

from collections.abc import Iterator

from vit_jax.base import outputs
from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install
from vit_jax.data.options import Data
from vit_jax.data.sources.pairs import open_pairs
from vit_jax.data.texts import captions_of

SPECIAL = ("<pad>", "<eos>", "<bos>")


def train_tokenizer(path: str, out: str, size: int) -> dict:
    """Writes the tokenizer of the captions of pairs of images and texts; held-out ones are not read.

    Args:
      path: of the pairs, see `sources.pairs`.
      out: file to write.
      size: the most tokens that it may have, at least 259: those of all bytes, and three special ones.

    Returns:
      How many `captions` were read and how many `tokens` there are, and the file, `out`.

    Raises:
      ConfigError: the package is missing, the size is too small, or there are no captions.
    """
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(f"--tokenizer={size}: to train one, run: {pip_install('text')}") from None
    least = len(SPECIAL) + 256
    if size < least:
        raise ConfigError(
            f"--tokenizer={size} must be at least {least}: all bytes and {len(SPECIAL)} special tokens"
        )
    file = outputs.file_to_write(out, "--out")
    source, count = open_pairs(Data(name="pairs", path=path)).open("train"), 0

    def captions() -> Iterator[str]:
        nonlocal count
        for index in range(len(source)):
            for caption in captions_of(source, index):
                count += 1
                yield caption.lower()

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions(), trainer)
    with outputs.writing(file) as local:
        local.write_text(tokenizer.to_str(pretty=True))
    return {"captions": count, "tokens": tokenizer.get_vocab_size(), "out": out}


def text(result: dict) -> str:
    """What the command prints."""
    return (
        f"{result['tokens']:,} tokens of {result['captions']:,} captions: {result['out']}; train with "
        f"--config.objective.tokenizer={result['out']}"
    )
