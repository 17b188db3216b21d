"""Captions as tokens: numbers that a text tower reads, made on the host. What a caption is of, a data source says.

A tokenizer is the file tokenizer.json of the package `tokenizers`, or SentencePiece's .model, both by packages that
only runs with such a file need; or 'bytes', the bytes of UTF-8, without a package.
"""

import dataclasses
import functools
import json
import pathlib
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install
from vit_jax.base.settings import named_entries
from vit_jax.data.record import BadImage, DataError, Label, Record, Source, reason
from vit_jax.data.sources import fingerprint

TOKENS = "tokens"  # of a batch
FIELD = "config.objective.tokenizer"
_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model")
# Names of the special tokens, the likeliest first; what an installed config says comes before these.
_PAD = ("<pad>", "[PAD]")
_END = ("<|endoftext|>", "<eos>", "</s>", "[SEP]")
_BEGIN = ("<|startoftext|>", "<bos>", "<s>", "[CLS]")
# The size of the SentencePiece model of SigLIP, whose texts are padded by the token that ends them. SigLIP 2 has
# Gemma's, of 256,000 tokens, and a token of its own for it.
_SIGLIP = 32_000
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to numbers.

    Attributes:
      encode: text -> numbers, without special tokens.
      size: how many there are.
      digest: of all tokens in the order of their numbers.
      pad, end, begin: numbers of the special tokens; -1 where there is none.
    """

    encode: Callable[[str], Sequence[int]]
    size: int
    digest: str
    pad: int
    end: int
    begin: int


class TextError(DataError):
    """A text cannot be made into tokens, such as one that was cut inside of a character."""


class TextRows:
    """Makes tokens of captions, as an objective's options say: `tokenizer`, `text`, `text_length`, `text_end`,
    `text_pad`.

    Lower-cased, cut to the length, always with the end token; after that padded. CLIP's tower has a begin token too.
    """

    def __init__(self, options: Any):
        self.length = options.text_length
        self._options = options

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_tokenizer(self._options.tokenizer)

    @functools.cached_property
    def _ends(self) -> tuple[int, int]:
        """The tokens that end and pad a text."""
        return _special(self._options, self._tokenizer)

    def empty(self, rows: int) -> dict[str, np.ndarray]:
        """Tokens of that many texts, to fill: (rows, length) int32."""
        return {TOKENS: np.empty((rows, self.length), np.int32)}

    def fill(self, out: np.ndarray, example: Record, draw: float) -> None:
        """Tokens of one of an example's captions.

        Args:
          out: (length,) int32.
          example: its label are the captions.
          draw: which of them, random in [0, 1).

        Raises:
          BadImage: it has no caption, or this one has no tokens or cannot be made into tokens.
          ConfigError: labels are no captions.
        """
        captions = example.label
        if not _are_captions(captions):
            raise ConfigError(
                f"{example.name} has no captions, which the objective 'image_text' learns from: set "
                "--config.data.name=pairs, and config.data.path to images with captions"
            )
        if not captions:
            raise BadImage(example.name, "it has no caption")
        caption = captions[int(draw * len(captions))]
        try:
            tokens = self.encode(caption)
        except TextError as error:
            raise BadImage(example.name, str(error)) from None
        out[:] = tokens
        if not self.count(tokens):
            raise BadImage(example.name, f"its caption {caption!r} has no tokens")

    def encode(self, text: str) -> np.ndarray:
        """(length,) int32. Raises `TextError` for a text that the tokenizer does not take."""
        tokenizer, (end, pad) = self._tokenizer, self._ends
        begin = [tokenizer.begin] if self._options.text == "clip" and tokenizer.begin >= 0 else []
        try:
            encoded = tokenizer.encode(text.lower())
        except Exception as error:  # Each package has other types of errors.
            raise TextError(
                f"the text {text!r} cannot be made into tokens: {reason(error)}"
            ) from None
        numbers = [*begin, *encoded][: self.length - 1]
        tokens = np.full(self.length, pad, np.int32)
        tokens[: len(numbers) + 1] = [*numbers, end]
        return tokens

    def count(self, tokens: np.ndarray) -> int:
        """How many of the tokens (length,) of a text are none of the special ones."""
        special = (*self._ends, self._tokenizer.begin)
        return int(np.isin(tokens, special, invert=True).sum())


def _special(options: Any, tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens that end and pad a text."""
    end = tokenizer.end if options.text_end < 0 else options.text_end
    pad = tokenizer.pad if options.text_pad < 0 else options.text_pad
    return end, end if pad < 0 else pad


def for_run(config: Any, options: Any) -> Any:
    """The config of a run that learns from captions, with all that follows from its tokenizer.

    Args:
      config: the run's.
      options: of its objective.

    Raises:
      ConfigError: the tokenizer cannot be used, has other tokens than the model's table, or something of the config
        does not go with captions.
    """
    data, name = config.data, f"the objective {config.objective.name!r}"
    if not options.tokenizer:  # of a sum without a term that learns from captions
        return config
    if config.accumulate != 1:
        raise ConfigError(
            f"config.accumulate = {config.accumulate}: {name} compares all pairs of a batch, and parts of it would be "
            "another loss; set it to 1, and a smaller batch_size or more devices"
        )
    if data.native_tokens:
        raise ConfigError(
            f"{name} takes images of one size: set config.data.native_tokens to nothing"
        )
    if config.pseudo.teacher:
        raise ConfigError(f"{name} needs no labels: set config.pseudo.teacher=''")
    if "loss" in dict(named_entries("eval.evaluators", config.eval.evaluators)):
        raise ConfigError(
            f"config.eval.evaluators: 'loss' has no captions, which {name} needs; name retrieval or zero_shot"
        )
    if options.tokenizer != "bytes":
        options = dataclasses.replace(options, tokenizer=places.absolute(options.tokenizer, FIELD))
    tokenizer = open_tokenizer(options.tokenizer)
    check_vocabulary(options, tokenizer)
    end, pad = _special(options, tokenizer)
    if end < 0:
        raise ConfigError(
            f"{options.tokenizer} has no token that ends a text ({', '.join(_END)}): set config.objective.text_end"
        )
    changes = {name: getattr(options, name) for name in ("tokenizer", "text", "text_length")}
    changes |= {
        "vocabulary": options.vocabulary or tokenizer.size,
        "text_end": end,
        "text_pad": pad,
        "tokenizer_digest": tokenizer.digest,
    }
    return dataclasses.replace(config, objective=dataclasses.replace(config.objective, **changes))


def check_vocabulary(options: Any, tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` for a tokenizer whose tokens the text tower does not have."""
    if options.vocabulary and tokenizer.size > options.vocabulary:
        raise ConfigError(
            f"{FIELD}: {options.tokenizer} has {tokenizer.size:,} tokens, and config.objective.vocabulary = "
            f"{options.vocabulary:,}, as the text tower's table: take the tokenizer that it was trained with"
        )
    if options.tokenizer_digest not in ("", tokenizer.digest):
        raise ConfigError(
            f"{FIELD}: {options.tokenizer} has {tokenizer.size:,} tokens that are not those, or not in the order, of "
            f"the tokenizer that the text tower was trained with (config.objective.tokenizer_digest = "
            f"{options.tokenizer_digest!r}, here {tokenizer.digest!r}): take that one"
        )


def captions_of(source: Source, index: int) -> tuple[str, ...]:
    """The captions of an image, which is not read where the source knows them without it."""
    captions = getattr(source, "captions", None)
    if captions:
        return captions(index)
    label = source[index].label
    return label if _are_captions(label) else ()


def _are_captions(label: Label) -> bool:
    return isinstance(label, tuple) and all(isinstance(text, str) for text in label)


@functools.lru_cache(8)
def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer that `config.objective.tokenizer` names.

    Raises:
      ConfigError: there is none, it cannot be read, or a package for it is missing.
    """
    if path == "bytes":
        return Tokenizer(
            lambda text: [byte + 3 for byte in text.encode()],
            259,
            digest=path,
            pad=0,
            end=1,
            begin=2,
        )
    place = pathlib.Path(path).expanduser()
    if place.is_dir():
        names = [name for name in _FILES if (place / name).exists()]
        if not names:
            raise ConfigError(f"{FIELD} = {path!r} has none of {', '.join(_FILES)}")
        place /= names[0]
    if not place.is_file():
        hint = places.nearest_existing(path)
        raise ConfigError(
            f"{FIELD} = {path!r} is no file{hint}: it must be a tokenizer.json, a SentencePiece .model, or 'bytes'"
        )
    return (_sentencepiece if place.suffix == ".model" else _tokenizers)(place)


def _tokenizers(path: pathlib.Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(f"{FIELD} = {path}: to read it, run: {pip_install('text')}") from None
    try:
        theirs = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # of a type of Rust's own
        raise ConfigError(f"{FIELD}: {path} is no tokenizer.json: {error}") from None
    theirs.no_truncation()
    theirs.no_padding()

    clean = _cleaning(path)

    def encode(text: str) -> list[int]:
        return theirs.encode(clean(text), add_special_tokens=False).ids

    tokens = [(number, token) for token, number in theirs.get_vocab().items()]
    digest = fingerprint.digest(sorted(tokens))
    return Tokenizer(encode, len(tokens), digest, **_numbers(path, theirs.token_to_id))


def _sentencepiece(path: pathlib.Path) -> Tokenizer:
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(f"{FIELD} = {path}: to read it, run: {pip_install('text')}") from None
    try:
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{FIELD}: {path} is no model of SentencePiece: {error}") from None

    def number_of(piece: str) -> int | None:
        number = theirs.piece_to_id(piece)
        return number if theirs.id_to_piece(number) == piece else None

    size = theirs.vocab_size()
    digest = fingerprint.digest(list(enumerate(theirs.id_to_piece(list(range(size))))))
    special = _numbers(path, number_of)
    if size == _SIGLIP and not _stated(path):
        special["pad"] = special["end"]
    clean = _cleaning(path)
    return Tokenizer(lambda text: theirs.encode(clean(text)), size, digest, **special)


def _stated(path: pathlib.Path) -> dict[str, Any]:
    """What tokenizer_config.json beside a file says; {} where there is none."""
    stated = path.with_name("tokenizer_config.json")
    return json.loads(stated.read_text()) if stated.exists() else {}


def _cleaning(path: pathlib.Path) -> Callable[[str], str]:
    """What happens to a text before it is split into tokens: transformers' SiglipTokenizer removes punctuation."""
    if not str(_stated(path).get("tokenizer_class", "")).startswith("SiglipTokenizer"):
        return str
    return lambda text: " ".join(text.translate(_NO_PUNCTUATION).split())


def _numbers(path: pathlib.Path, number_of: Callable[[str], int | None]) -> dict[str, int]:
    """The special tokens: as tokenizer_config.json beside the file says, or else the usual ones."""
    names = _stated(path)

    def find(field: str, usual: tuple[str, ...]) -> int:
        name = names.get(field)
        name = name.get("content") if isinstance(name, dict) else name
        numbers = (number_of(token) for token in ((name,) if name else usual))
        return next((number for number in numbers if number is not None), -1)

    return {
        "pad": find("pad_token", _PAD),
        "end": find("eos_token", _END),
        "begin": find("bos_token", _BEGIN),
    }
