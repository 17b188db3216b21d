"""Class folders that are numbers, judged by a checkpoint that has no names of classes: they have two orders."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import save_file

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.labels.classes import UnknownNames, with_classes
from vit_jax.data.options import Data
from vit_jax.interchange.loading import load_run

from .test_tar import write_tar

NUMBERS = UnknownNames(map(str, range(12)))


def folders(root, names):
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "0.jpg").write_bytes(b"x")
    return sources.open_source(Data(name="folder", path=str(root), holdout=0.0), "train")


@pytest.mark.parametrize("first", [0, 5])
def test_the_order_of_numbered_folders_is_asked_and_taken_as_it_is_set(first, tmp_path):
    names = [str(first + i) for i in range(12)]
    source = folders(tmp_path, names)
    assert list(source.classes) == names
    with pytest.raises(ConfigError, match=r"class_order=numbers for .* or =texts for "):
        with_classes(source, NUMBERS)
    assert with_classes(source, NUMBERS, "numbers").numbers == tuple(range(12))
    by_text = with_classes(source, NUMBERS, "texts")
    assert [by_text.numbers[names.index(name)] for name in sorted(names)] == list(range(12))


def test_the_order_of_numbered_folders_in_a_tar_file_is_asked_too(tmp_path):
    names = [f"stage{i}" for i in range(12)]
    write_tar(tmp_path / "a.tar", {f"{name}/0.jpg": b"x" for name in names})
    source = sources.open_source(
        Data(name="tar", path=str(tmp_path / "a.tar"), holdout=0.0), "train"
    )
    with pytest.raises(ConfigError, match=r"class_order=numbers for .* or =texts for "):
        with_classes(source, NUMBERS)
    beside = {f"{i}.jpg": b"x" for i in range(12)} | {f"{i}.cls": b"%d" % i for i in range(12)}
    write_tar(tmp_path / "b.tar", beside)
    labelled = sources.open_source(
        Data(name="tar", path=str(tmp_path / "b.tar"), holdout=0.0), "train"
    )
    assert with_classes(labelled, NUMBERS) is labelled  # class numbers, which are the model's


def test_nothing_is_asked_where_there_is_one_order_or_classes_have_names(tmp_path):
    source = folders(tmp_path / "a", [f"{i:02}" for i in range(12)])
    assert with_classes(source, NUMBERS).numbers == tuple(range(12))
    source = folders(tmp_path / "b", list(NUMBERS))
    own = tuple(NUMBERS)  # of a run that was trained here
    assert with_classes(source, own) is source
    (tmp_path / "a.csv").write_text("path,label\n" + "".join(f"{i}.png,{i}\n" for i in range(12)))
    config = Data(name="folder", path=str(tmp_path / "a.csv"), holdout=0.0)
    listed = sources.open_source(config, "train")
    assert with_classes(listed, NUMBERS) is listed  # class numbers, which are the model's


def test_a_bare_file_has_no_names_of_classes(tmp_path):
    rng = np.random.default_rng(0)
    width, shapes = 8, {}
    shapes |= {"cls_token": (1, 1, width), "pos_embed": (1, 5, width), "norm.weight": (width,)}
    shapes |= {"patch_embed.proj.weight": (width, 3, 4, 4), "patch_embed.proj.bias": (width,)}
    shapes |= {"norm.bias": (width,), "head.weight": (12, width), "head.bias": (12,)}
    block = {"norm1": (width,), "norm2": (width,), "attn.qkv": (3 * width, width)}
    block |= {"attn.proj": (width, width), "mlp.fc1": (2 * width, width)}
    block |= {"mlp.fc2": (width, 2 * width)}
    for name, shape in block.items():
        shapes |= {f"blocks.0.{name}.weight": shape, f"blocks.0.{name}.bias": shape[:1]}
    tensors = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "bare.safetensors")
    options = {"heads": 1, "activation": "gelu"}
    run = load_run(str(tmp_path / "bare.safetensors"), model_options=options)
    assert isinstance(run.classes, UnknownNames) and run.classes == NUMBERS
    assert not isinstance(
        dataclasses.replace(run, classes=tuple(run.classes)).classes, UnknownNames
    )


def test_classes_are_the_same_however_their_accents_are_stored(tmp_path):
    source = folders(tmp_path, ["ca\u0301scara", "moss"])
    renamed = with_classes(source, ("moss", "c\u00e1scara"))
    assert renamed.classes == ("moss", "c\u00e1scara")
    assert [renamed[i].label for i in range(2)] == [1, 0]
    assert with_classes(source, source.classes) is source
