"""A folder as phones and people leave it: what is wrong with it is said before the first step, and copies of an image
are on one side of training and test.
"""

import io
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataError
from vit_jax.data.sources import examined, fingerprint, stored_index

HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99)


def encoded(seed, mode="RGB", **options):
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, len(mode)), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, "JPEG", **options)
    return file.getvalue()


def rotated(seed):
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(seed, exif=exif)


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


@pytest.fixture
def phone(tmp_path):
    """30 photos of two classes, six copies of some, two of them in the other class, and what else phones leave."""
    photos = {f"{'cat' if i < 15 else 'dog'}/IMG_{i}.jpg": encoded(i) for i in range(30)}
    copies = {f"cat/IMG_{i} (1).jpg": encoded(i) for i in range(4)}
    both = {f"dog/IMG_{i}.jpg": encoded(i) for i in (5, 6)}
    odd = {
        "cat/empty.jpg": b"",
        "dog/cut.jpg": encoded(50)[:-200],
        "dog/photo.heic": HEIC,
        "dog/print.jpg": encoded(51, "CMYK"),
        "dog/upright.jpg": rotated(52),
        "cat/Füße im Grün.jpg": encoded(53),
        "cat/🐈.jpg": encoded(54),
        "cat/._IMG_1.jpg": b"\0\5\26\7AppleDouble",
    }
    write(tmp_path / "photos", photos | copies | both | odd)
    return tmp_path / "photos"


def data(root, **fields):
    options = {"name": "folder", "holdout": 0.3, "examine": True, "on_bad_image": "skip"}
    return Data(path=str(root), **options | fields)


def contents(source):
    return {
        (source.root + "/" + path): open(source._path(i), "rb").read()
        for i, path in enumerate(source.paths)
    }


@pytest.fixture
def no_heic(monkeypatch):
    found = examined.importlib.util.find_spec
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)
    monkeypatch.setattr(
        examined.importlib.util, "find_spec", lambda name: None if "heif" in name else found(name)
    )


def test_what_is_wrong_is_listed_with_counts_before_an_image_is_asked_for(phone, caplog, no_heic):
    train = sources.open_train(data(phone))
    sources.open_eval(data(phone))
    assert (
        "3 of 43 images cannot be read: cat/empty.jpg: it is empty (0 bytes); dog/cut.jpg: its end is"
        in caplog.text
    )
    assert f"dog/photo.heic: HEIC needs pillow-heif: {pip_install('heic')}" in caplog.text
    assert (
        "6 images are copies of others, byte for byte: cat/IMG_0 (1).jpg = cat/IMG_0.jpg; "
        in caplog.text
    )
    conflict = "cat/IMG_5.jpg (cat) = dog/IMG_5.jpg (dog); cat/IMG_6.jpg (cat) = dog/IMG_6.jpg (dog). Remove"
    assert (
        "4 images, of which 2 differ, have several labels" in caplog.text
        and conflict in caplog.text
    )
    assert (
        caplog.text.count("cannot be read") == 1 and "copies of training images" not in caplog.text
    )
    assert train.problems.keys() <= {"cat/empty.jpg", "dog/cut.jpg", "dog/photo.heic"}


@pytest.mark.parametrize("by", ["file", "class"])
def test_no_copy_is_on_the_other_side(phone, by):
    for share in (0.1, 0.3, 0.5):
        train, test = (
            set(
                contents(
                    sources.open_source(data(phone, holdout=share, holdout_by=by), split)
                ).values()
            )
            for split in ("train", "test")
        )
        assert train and test and not train & test
    apart = {
        split: contents(sources.open_source(data(phone, holdout=0.5, examine=False), split))
        for split in ("train", "test")
    }
    assert set(apart["train"].values()) & set(apart["test"].values())  # so they were by name


def test_more_images_move_none_and_neither_do_other_names(phone):
    before = {os.path.basename(p) for p in sources.open_source(data(phone), "test").paths}
    write(phone, {f"cat/more{i}.jpg": encoded(100 + i) for i in range(10)})
    write(phone, {"dog/again.jpg": encoded(20)})
    (phone / "dog/IMG_21.jpg").rename(phone / "dog/IMG_21 best.jpg")
    after = {os.path.basename(p) for p in sources.open_source(data(phone), "test").paths}
    old = {name.replace(" best", "") for name in after if not name.startswith(("more", "again"))}
    assert old == before and ("again.jpg" in after) == ("IMG_20.jpg" in after)


def test_lists_are_examined_too(phone):
    rows = [f"photos/{p.parent.name}/{p.name},{p.parent.name}" for p in phone.rglob("*.jpg")]
    table = phone.parent / "list.csv"
    table.write_text("\n".join(["path,label", *rows]), "utf-8")
    train, test = (
        set(contents(sources.open_source(data(table), split)).values())
        for split in ("train", "test")
    )
    assert not train & test


def test_copies_in_given_splits_stay_there_and_are_counted(tmp_path, caplog):
    write(tmp_path, {f"train/a/{i}.jpg": encoded(i) for i in range(4)})
    write(tmp_path, {f"test/a/{i}.jpg": encoded(i + 2) for i in range(4)})
    sources.open_eval(data(tmp_path))
    assert "2 of 4 images of 'test' are copies of training images" in caplog.text
    assert "test/a/0.jpg = train/a/2.jpg; test/a/1.jpg = train/a/3.jpg" in caplog.text


def test_too_many_or_by_default_any_are_an_error_before_the_first_step(phone, no_heic):
    with pytest.raises(
        DataError, match=r"3 training images cannot be read, more than .* = 2 \(cat/empty"
    ):
        sources.open_train(data(phone, holdout=0.0, max_bad_images=2))
    with pytest.raises(BadImage, match=r"cat/empty.jpg cannot be read: it is empty .*='skip'"):
        sources.open_train(data(phone, holdout=0.0, on_bad_image="error"))
    shutil.rmtree(phone / "cat")
    for path in phone.rglob("*.jpg"):
        path.write_bytes(HEIC)
    with pytest.raises(DataError, match="none of the .* training images can be read.*HEIC needs"):
        sources.open_train(data(phone, holdout=0.0))


def test_an_empty_class_is_refused_by_its_name(phone):
    (phone / "bird").mkdir()
    with pytest.raises(ConfigError, match="bird has no images"):
        sources.open_train(data(phone))


def test_images_of_more_pixels_than_allowed_are_among_the_bad(phone):
    with pytest.raises(DataError, match="it has 32 x 32 pixels, more than config.data.max_pixels"):
        sources.open_train(data(phone, max_pixels=100, max_bad_images=3))


def test_what_was_found_is_kept_beside_the_files_and_only_others_are_read_again(
    phone, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(phone.parent / "cache"))
    monkeypatch.setattr(stored_index, "_SMALL", 0)
    read, reader = [], examined._read
    monkeypatch.setattr(examined, "_read", lambda file: read.append(file.path) or reader(file))
    first = sources.open_train(data(phone))
    assert len(read) == 43 and (phone / stored_index.INDEX).exists()
    read.clear()
    (phone / "cat/IMG_3.jpg").write_bytes(encoded(99))
    (phone / "dog/IMG_22.jpg").unlink()
    again = sources.open_train(data(phone))
    assert read == [f"{phone}/cat/IMG_3.jpg"] and first.sketch() != again.sketch()
    read.clear()
    assert sources.open_train(data(phone)).sketch() == again.sketch() and not read
    assert "files are not used" not in caplog.text  # the index is ours


def test_sketches_tell_how_much_two_sets_have_in_common():
    numbers = np.random.default_rng(0).integers(0, 2**63, 4000).astype(np.uint64)

    def changes(old, new):
        return fingerprint.changes(
            fingerprint.sketch(old), len(old), fingerprint.sketch(new), len(new)
        )

    assert changes(numbers[:200], numbers[3:210]) == (3, 10)  # few: exact
    assert changes(numbers, numbers) == (0, 0) and changes(numbers[:9], numbers[9:20]) == (9, 11)
    lost, gained = changes(numbers[:2000], numbers[100:2100])
    assert lost == gained and 40 <= lost <= 160
