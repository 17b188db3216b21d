"""Pairs of images and captions, and captions as tokens."""

import dataclasses
import json
import pickle

import cv2
import numpy as np
import pytest
import sentencepiece

from tests import lazily
from tests.data.test_tar import image, write_tar
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import sources, texts
from vit_jax.data.batches import TrainBatches
from vit_jax.data.options import Data
from vit_jax.data.preparation.tokenizer import train_tokenizer
from vit_jax.data.record import BadImage, Record
from vit_jax.objectives.image_text.image_text import ImageTextOptions
from vit_jax.training.assembly import resolve

tokenizers = lazily.Package("tokenizers")

ODD = (
    "", " ", "a", "A Dog!", "naïve café", "香蕉 and 🍌", "x" * 300, "tab\tnew\nline", "<eos>", "<pad> in text", "ß ﬁ İ",
    "1,234.5%", "don't", "\u200b", "é", "é", "a  b", "日本語" * 40, "�", "🏳️‍🌈",
)  # fmt: skip


def opened(path, split="train", holdout=0.0):
    return sources.open_source(Data(name="pairs", path=str(path), holdout=holdout), split)


def folder_of(path, files=4):
    path.mkdir(exist_ok=True)
    for i in range(files):
        (path / f"{i}.png").write_bytes(image(10 * i))
    return path


def test_lists_of_both_kinds_and_tars_give_the_same_pairs(tmp_path, caplog):
    folder, lines = folder_of(tmp_path / "csv"), folder_of(tmp_path / "jsonl")
    rows = [
        ("0.png", "a dog"),
        ("0.png", "one  dog,\n lying"),
        ("1.png", "a cat"),
        ("2.png", " "),
        ("3.png", "a bird"),
    ]
    quoted = "".join(f'{file},"{text}"\n' for file, text in rows)
    (folder / "captions.csv").write_text(f"path,caption\n{quoted}")
    fields = {}
    for file, text in rows:
        fields.setdefault(file, []).append(text)
    text = "\n".join(json.dumps({"file_name": f, "captions": c}) for f, c in fields.items())
    (lines / "metadata.jsonl").write_text(text)
    members = {f"{i}.png": image(10 * i) for i in range(4)}
    members |= {
        "0.json": json.dumps({"captions": fields["0.png"]}).encode(),
        "1.txt": b"a cat",
        "3.txt": b"a bird",
    }
    write_tar(tmp_path / "a.tar", members | {"9.txt": b"of no image"})
    expected = [(0, ("a dog", "one dog, lying")), (1, ("a cat",)), (3, ("a bird",))]
    for place in (folder, folder / "captions.csv", lines, tmp_path / "a.tar"):
        source = opened(place)
        assert len(source) == 3 and source.classes == ()
        records = pickle.loads(pickle.dumps(source)).read(range(3))
        for index, (record, (number, captions)) in enumerate(zip(records, expected, strict=True)):
            assert record.image == image(10 * number) and record.label == captions
            assert source.captions(index) == captions == source[index].label
    assert "1 images have no caption" in caplog.text and "1 captions have no image" in caplog.text


def test_a_tar_file_that_is_gone_costs_its_own_pairs_alone(tmp_path):
    for name in "ab":
        pair = {f"{name}.png": image(10), f"{name}.txt": b"a dog"}
        write_tar(tmp_path / f"train-{name}.tar", pair)
    source = opened(tmp_path)
    (tmp_path / "train-b.tar").unlink()
    with pytest.raises(BadImage, match=r"train-b\.tar, byte \d+ cannot be read: No such file"):
        source.read([0, 1])
    assert source.read([0])[0].label == ("a dog",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("path,label\n0.png,a\n", "must begin with the column names path and caption"),
        ("path,caption\n0.png,\n", "has no image with a caption"),
        ("path,caption\n0.png,a, b\n", "line 2: 2 values are needed"),
        ("path,caption,split\n0.png,a,train\n0.png,b,test\n", "is in two splits"),
    ],
)
def test_lists_that_are_none_are_refused(tmp_path, content, message):
    (folder_of(tmp_path / "a") / "captions.csv").write_text(content)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "a")


def test_a_place_without_pairs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        opened(tmp_path / "nothing.csv")
    write_tar(tmp_path / "a.tar", {"0.png": image(1)})
    with pytest.raises(ConfigError, match="has no pairs"):
        opened(tmp_path / "a.tar")


def bpe(path):
    """A tokenizer of a few captions."""
    folder = folder_of(path)
    (folder / "captions.csv").write_text(
        "path,caption\n0.png,A dog and a dog\n1.png,a cat and dogs\n"
    )
    result = train_tokenizer(str(folder), str(path / "tokenizer.json"), 300)
    assert result["captions"] == 2 and 259 < result["tokens"] <= 300
    return path / "tokenizer.json"


def piece_model(path):
    prefix = path / "spiece"
    sentences = iter(["a dog and a cat", "two dogs", "the cat sat on the mat"] * 20)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_prefix=str(prefix), vocab_size=290, model_type="bpe", byte_fallback=True,
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>", minloglevel=2,
    )  # fmt: skip
    return f"{prefix}.model"


def test_tokens_are_those_of_the_packages(tmp_path):
    random = np.random.default_rng(0)
    letters = [chr(c) for c in (*range(32, 127), 0xE9, 0x3B1, 0x4E2D, 0x1F34C, 0x301)]
    strings = [*ODD, *("".join(random.choice(letters, n)) for n in random.integers(1, 60, 1000))]
    path = bpe(tmp_path / "a")
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.enable_truncation(15)
    pieces = piece_model(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_file=pieces)
    for name, encode in (
        (str(path), lambda text: theirs.encode(text.lower()).ids),
        (str(path.parent), lambda text: theirs.encode(text.lower()).ids),
        (pieces, lambda text: processor.encode(text.lower())[:15]),
        ("bytes", lambda text: [b + 3 for b in text.lower().encode()][:15]),
    ):
        rows = texts.TextRows(ImageTextOptions(tokenizer=name, text_length=16))
        for text in strings:
            ids = encode(text)
            assert rows.encode(text).tolist() == [*ids, 1, *[0] * (15 - len(ids))], (name, text)
    clip = texts.TextRows(ImageTextOptions(text="clip", text_length=4))
    assert clip.encode("ab").tolist() == [2, 100, 101, 1] and clip.encode("abc").tolist() == [
        2,
        100,
        101,
        1,
    ]


def test_a_caption_is_drawn_by_seed_and_step(tmp_path):
    folder = folder_of(tmp_path / "a", 1)
    rows = "".join(f"0.png,{text}\n" for text in "abcd")
    (folder / "captions.csv").write_text(f"path,caption\n{rows}")
    config = resolve_with(data=dict(path=str(folder), holdout=0.0))
    source = opened(folder)

    def drawn(step, seed=0):
        batches = TrainBatches(source, dataclasses.replace(config, seed=seed), range(8))
        batches.fill(batch := batches.empty(step), step, slice(0, 8))
        return batch["tokens"][:, 0].tolist()

    first = drawn(0)
    assert first == drawn(0) and len(set(first)) > 1 and set(first) <= {b + 3 for b in b"abcd"}
    assert drawn(1) != first != drawn(0, seed=1)


def resolve_with(data=(), objective=(), **fields):
    config = default_config()
    config.objective.update(dict(name="image_text", text_length=8) | dict(objective))
    config.model.update(dict(name="ViT-mu/16", pool="map"))
    config.data.update(
        dict(name="pairs", path="x", image_size=32, mean=(0.5,) * 3, std=(0.5,) * 3) | dict(data)
    )
    config.update(dict(batch_size=8, duration="2 steps") | fields)
    return resolve(config)


def test_what_does_not_go_with_captions_is_refused(tmp_path):
    for fields, message in (
        (dict(accumulate=2), "config.accumulate = 2"),
        (dict(objective=dict(tokenizer="bits")), "bits' is no file"),
        (dict(objective=dict(vocabulary=100)), "has 259 tokens"),
        (dict(objective=dict(tokenizer=str(tmp_path))), "has none of tokenizer.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_with(**fields)
    assert resolve_with().objective.vocabulary == 259
    rows = texts.TextRows(ImageTextOptions(text_length=4))
    out = np.empty(4, np.int32)
    with pytest.raises(BadImage, match="it has no caption"):
        rows.fill(out, Record(b"", (), "a.png"), 0.0)
    with pytest.raises(ConfigError, match="set --config.data.name=pairs"):
        rows.fill(out, Record(b"", 3, "a.png"), 0.0)
    with pytest.raises(BadImage, match="has no tokens"):
        rows.fill(out, Record(b"", ("",), "a.png"), 0.0)


def test_digits_have_captions_that_say_colour_and_digit():
    source = sources.open_source(Data(name="digit_pairs"), "train[6:12]+test[:6]")
    assert len(source) == 12 and source[1].label == ("one in red", "a red one")
    assert cv2.cvtColor(source[2].image, cv2.COLOR_RGB2HSV)[..., 1].max() > 100


def test_scenes_have_captions_that_name_their_digits_and_some_are_empty():
    pairs = sources.open_source(Data(name="digit_scene_pairs"), "train[:4]+test[:11]")
    things = sources.open_source(Data(name="digit_things"), "train[:4]+test[:11]")
    empty = [index for index in range(15) if pairs[index].label == ("nothing",)]
    assert empty == [0, 4, 14] and not pairs[4].image.any()
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    for index in set(range(15)) - set(empty):
        label_map = things[index].label
        digits = sorted((value & 255) - 1 for value in np.unique(label_map) if value)
        assert pairs.captions(index) == (" and ".join(names[digit] for digit in digits),)
        assert np.array_equal(pairs[index].image, things[index].image)
