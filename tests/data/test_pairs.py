"""Pairs of images and captions, and captions as tokens."""

import dataclasses
import json
import pickle

import cv2
import numpy as np
import pytest
import sentencepiece
import tensorflow_datasets as tfds
import tokenizers

from tests import lazily
from tests.data.test_tar import image, write_tar
from tests.data.tiny_tfds import write_tfds
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import sources, texts
from vit_jax.data.batches import TrainBatches
from vit_jax.data.options import Data
from vit_jax.data.preparation.tokenizer import train_tokenizer
from vit_jax.data.record import BadImage, Record
from vit_jax.models.registry import Weights
from vit_jax.objectives.contract import ObjectiveContext, SavedObjective
from vit_jax.objectives.image_text.image_text import ImageText, ImageTextOptions
from vit_jax.training.assembly import resolve

transformers = lazily.Package("transformers")

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


def test_captions_of_coco_are_read_as_tfds_prepares_them(tmp_path):
    features = tfds.features
    objects = {"label": features.ClassLabel(num_classes=3), "is_crowd": np.bool_}
    coco = {
        "captions": features.Sequence({"id": np.int64, "text": tfds.features.Text()}),
        "image": features.Image(),
        "image/filename": features.Text(),
        "image/id": np.int64,
        "objects": features.Sequence(objects),
    }
    examples = [
        {
            "captions/id": [7],
            "captions/text": [f" a dog {i}".encode(), b"one  dog"],
            "image/id": [i],
        }
        | {"image/filename": b"a.jpg", "objects/label": [0], "objects/is_crowd": [0]}
        for i in range(3)
    ]
    splits = {"train": examples, "val": examples[:1]}
    png = write_tfds(tmp_path / "coco_captions/2014/1.1.0", coco, splits)
    for below in ("2014", "2014/1.1.0"):
        source = opened(tmp_path / "coco_captions" / below)
        assert len(source) == 3 and source.classes == () and not source.multi_label
        records = pickle.loads(pickle.dumps(source)).read([2, 0])
        assert [r.label for r in records] == [("a dog 2", "one dog"), ("a dog 0", "one dog")]
        assert records[0].image == png
    assert len(opened(tmp_path / "coco_captions/2014", "test")) == 1
    with pytest.raises(ConfigError, match="has variants, .*2014"):
        opened(tmp_path / "coco_captions")


def test_captions_of_tfds_that_are_none_are_refused(tmp_path):
    image_alone = {"image": tfds.features.Image()}
    write_tfds(tmp_path / "a/1.0.0", image_alone, [{}])
    with pytest.raises(ConfigError, match="has no captions, .* it has: image"):
        opened(tmp_path / "a")
    one = image_alone | {"caption": tfds.features.Text()}
    write_tfds(tmp_path / "b/1.0.0", one, [{"caption": b"a \xff"}, {"caption": b"a dog"}])
    source = opened(tmp_path / "b")
    assert source[1].label == ("a dog",)
    with pytest.raises(BadImage, match="record 0.*its caption cannot be read"):
        source.read([0])


def test_a_place_without_pairs_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither tar files nor a list .* captions.csv"):
        opened(tmp_path / "empty")
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


def test_a_vocabulary_is_known_by_its_tokens_and_their_order(tmp_path):
    tokens = {token: number for number, token in enumerate(["<pad>", "<eos>", "a", "b"])}
    swapped = tokens | {"a": 3, "b": 2}
    digests = []
    for i, vocabulary in enumerate((tokens, tokens, swapped)):
        model = tokenizers.models.BPE(vocab=vocabulary, merges=[])
        tokenizers.Tokenizer(model).save(path := str(tmp_path / f"{i}.json"))
        digests.append(texts.open_tokenizer(path).digest)
    assert digests[0] == digests[1] != digests[2]
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    pieces = [texts.open_tokenizer(piece_model(tmp_path / name)).digest for name in "ab"]
    assert pieces[0] == pieces[1] not in digests


def test_a_text_tower_of_another_vocabulary_continues_without_its_table_of_tokens():
    like = Weights({"text": {"token_table": np.ones((3, 2)), "position": np.ones((1, 4, 2))}}, {})
    context = ObjectiveContext(default_config().model, (), (), total_steps=1, to_steps=int)
    for digest, reset in (("of these", []), ("of others", ["text/token_table"]), ("", [])):
        own = ImageText(ImageTextOptions(tokenizer_digest="of these"), context)
        saved = SavedObjective(ImageText, {"tokenizer_digest": digest}, lambda: like)
        taken, why = own.continue_from(saved, like)
        assert list(why) == reset and "text/position" in taken, digest


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
        (dict(eval=dict(evaluators=("loss",))), "'loss' has no captions"),
        (dict(eval=dict(evaluators=(("loss", {}),))), "'loss' has no captions"),
        (dict(objective=dict(tokenizer="bits")), "bits' is no file"),
        (dict(objective=dict(vocabulary=100)), "has 259 tokens"),
        (dict(objective=dict(tokenizer_digest="0123")), "tokens that are not those"),
        (dict(objective=dict(tokenizer=str(tmp_path))), "has none of tokenizer.json"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_with(**fields)
    objective = resolve_with().objective
    assert objective.vocabulary == 259 and objective.tokenizer_digest == "bytes"
    rows = texts.TextRows(ImageTextOptions(text_length=4))
    assert rows.encode("a" * 10_000).tolist() == [100, 100, 100, 1]
    out = np.empty(4, np.int32)
    with pytest.raises(BadImage, match="it has no caption"):
        rows.fill(out, Record(b"", (), "a.png"), 0.0)
    with pytest.raises(ConfigError, match="set --config.data.name=pairs"):
        rows.fill(out, Record(b"", 3, "a.png"), 0.0)
    with pytest.raises(BadImage, match="has no tokens"):
        rows.fill(out, Record(b"", ("",), "a.png"), 0.0)


@pytest.mark.parametrize("text", ["cut \ud83d", "\ude00 begins late", "\udcff of no UTF-8"])
def test_a_caption_that_was_cut_inside_of_a_character_is_a_fault_of_its_image(text):
    """JSON may say half of an emoji, "\\ud83d", which is no character."""
    rows, out = texts.TextRows(ImageTextOptions(text_length=4)), np.empty(4, np.int32)
    with pytest.raises(BadImage, match="image a.png cannot be read: the text '.*ud.*tokens"):
        rows.fill(out, Record(b"", (text,), "a.png"), 0.0)
    with pytest.raises(texts.TextError, match="cannot be made into tokens"):
        rows.encode(text)


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


PUNCTUATED = [
    "A dog, and a cat.", "Two dogs!", "the cat-sat on (the) mat", "DOGS & CATS: both?", "naïve café…", "it's 50% off",
    "", "  spaces\tand\nlines ", "a_b", "“quoted” dog", "dog " * 40, "#dog @cat", "...",
]  # fmt: skip


def test_tokens_of_a_siglip_folder_are_those_of_transformers(tmp_path):
    pieces = piece_model(tmp_path)
    processor = transformers.SiglipTokenizer(
        pieces, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )
    processor.save_pretrained(tmp_path / "folder")
    rows = texts.TextRows(ImageTextOptions(tokenizer=str(tmp_path / "folder"), text_length=16))
    for text in PUNCTUATED:
        ids = processor(text, padding="max_length", max_length=16, truncation=True).input_ids
        assert rows.encode(text).tolist() == ids, text


def test_a_bare_model_of_siglips_size_pads_by_the_token_that_ends_a_text(tmp_path, monkeypatch):
    pieces = piece_model(tmp_path)
    monkeypatch.setattr(texts, "_SIGLIP", 290)
    texts.open_tokenizer.cache_clear()
    row = texts.TextRows(ImageTextOptions(tokenizer=pieces, text_length=16)).encode("a dog")
    assert row[-1] == 1 and 0 not in row
    texts.open_tokenizer.cache_clear()
