"""Tokens of texts, and the vectors of their towers, beside transformers' own tokenizers and models."""

import json

import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers
from flax import nnx

from tests import lazily
from tests.interchange import test_text_towers as towers
from vit_jax.data import texts
from vit_jax.interchange import formats, saved_objectives
from vit_jax.models import registry
from vit_jax.objectives.contract import ObjectiveContext
from vit_jax.objectives.image_text.image_text import ImageText, ImageTextOptions

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")

# Fifty texts with punctuation, capitals, accents, other alphabets, odd spaces, and more tokens than fit.
TEXTS = [
    "a dog",
    "A Dog",
    "A DOG AND A CAT.",
    "a dog, and a cat",
    "two dogs!",
    "the cat-sat on (the) mat",
    "DOGS & CATS: both?",
    "naïve café…",
    "NAÏVE CAFÉ",
    "cafe\u0301",
    "Ångström",
    "straße",
    "STRASSE",
    "İstanbul",
    "Ünder über",
    "it's 50% off",
    "they'll won't I'M",
    "",
    " ",
    "  spaces\tand\nlines ",
    "a_b",
    "“quoted” dog",
    "‘single’",
    "dog " * 40,
    "cat, " * 30,
    "#dog @cat",
    "...",
    "!",
    "a  b",
    "1 2 3",
    "1234567890",
    "3.14",
    "$5",
    "C++",
    "C#",
    "e-mail@dog.com",
    "http://a.b/c?d=e",
    "<b>bold</b>",
    "&amp; &lt;",
    "日本語",
    "犬と猫。",
    "Привет, мир!",
    "αβγ ΑΒΓ",
    "😀 a dog",
    "👨\u200d👩\u200d👧",
    "a\u00a0b",
    "\u200ba",
    "ﬁsh",
    "x" * 100,
    "A photo of a dog. A photo of a cat.",
]
LENGTH = 16


def clip_tokenizer(folder):
    """A tokenizer of CLIP's kind: its alphabet of bytes, its ends of words, and merges that were learned here."""
    learned = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix="</w>"))
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        end_of_word_suffix="</w>",
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator([text.lower() for text in TEXTS] * 3, trainer)
    learned.save(str(folder / "learned.json"))
    model = json.loads((folder / "learned.json").read_text())["model"]
    vocabulary = dict(model["vocab"])
    for byte in tokenizers.pre_tokenizers.ByteLevel.alphabet():
        vocabulary.setdefault(f"{byte}</w>", len(vocabulary))
    for special in ("<|startoftext|>", "<|endoftext|>"):
        vocabulary[special] = len(vocabulary)
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[tuple(m) for m in model["merges"]])


def siglip_tokenizer(folder):
    """A tokenizer of SigLIP's kind: a model of SentencePiece, here with bytes for what it has not seen."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS if text.strip()] * 5),
        model_prefix=str(folder / "spiece"),
        vocab_size=450,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return transformers.SiglipTokenizer(str(folder / "spiece.model"))


def siglip2_tokenizer(folder):
    """A tokenizer of Gemma's kind, lower-cased, set as SigLIP 2 publishes it: it ends texts and pads right."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{b:02X}>" for b in range(256))]
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, limit_alphabet=60, show_progress=False
    )
    learned.train_from_iterator([text.lower() for text in TEXTS] * 3, trainer)
    learned.save(str(folder / "learned.json"))
    model = json.loads((folder / "learned.json").read_text())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return transformers.Siglip2Tokenizer(
        vocab=model["vocab"], merges=merges, add_eos_token=True, padding_side="right"
    )


CASES = {
    "CLIP": (clip_tokenizer, "clip"),
    "CLIP with exact GELU": (clip_tokenizer, "clip with gelu"),
    "SigLIP": (siglip_tokenizer, "siglip"),
    "SigLIP 2": (siglip2_tokenizer, "siglip"),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_fifty_texts_and_their_vectors_are_those_of_transformers(case, tmp_path):
    make, kind = CASES[case]
    tokenizer = make(tmp_path)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = towers.build(
        kind,
        vocab_size=len(tokenizer),
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(tmp_path / "model")
    encoded = tokenizer(TEXTS, padding="max_length", max_length=LENGTH, truncation=True)
    with torch.no_grad():
        vectors = model.get_text_features(torch.tensor(encoded.input_ids)).pooler_output
        expected = torch.nn.functional.normalize(vectors, dim=-1)

    checkpoint = formats.read_checkpoint(tmp_path / "model")
    saved = saved_objectives.find_saved(checkpoint, ImageText)
    options = ImageTextOptions(**saved.options | {"tokenizer": str(tmp_path / "tokenizer")})
    rows = texts.TextRows(options)
    tokens = np.stack([rows.encode(text) for text in TEXTS])
    np.testing.assert_array_equal(tokens, encoded.input_ids)

    context = ObjectiveContext(checkpoint.model_config, (), (), total_steps=1, to_steps=int)
    objective = ImageText(options, context)
    definition = registry.split(nnx.eval_shape(lambda: objective.make_modules(nnx.Rngs(0))))[0]
    own = nnx.merge(definition, *towers.jax_arrays(saved.read()))
    computed = jax.jit(objective.text_vectors)(own, tokens)
    np.testing.assert_allclose(computed, expected, atol=1e-5)
