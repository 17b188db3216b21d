"""What answers depend on beside the weights travels with a model: through every format, through a merge and through
adapters.
"""

import csv
import dataclasses
import json
import logging
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests import lazily
from tests.models.conftest import parameters
from tests.models.conftest import run as forward
from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import averaging, formats, loading
from vit_jax.models import classifier, lora, registry
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.prediction.images import find_images
from vit_jax.prediction.predict import predict_files

torch, transformers = lazily.Package("torch"), lazily.Package("transformers")

NAMES = ("rain", "snow", "fog")
# What answers depend on, by the fact's name.
FACTS = {
    "sigmoid": dict(probabilities="sigmoid"),
    "softmax": dict(probabilities="softmax"),
    "native sizes": dict(settings={"data.native_tokens": 9}),
    "order of pixels": dict(settings={"data.permute": "patches", "data.permute_patch": 8}),
    "range of values": dict(settings={"data.max_value": 4095}),
    "thresholds": dict(probabilities="sigmoid", settings={"eval.thresholds": [0.3, 0.5, 0.75]}),
    "all": dict(
        probabilities="sigmoid",
        settings={"data.native_tokens": 6, "data.max_value": 1023, "eval.thresholds": [0.2, 0, 1]},
    ),
}
FILES = {
    "orbax": "model",
    "huggingface": "model",
    "timm": "model",
    "timm file": "model.safetensors",
}


def of_model(**fields) -> formats.LoadedCheckpoint:
    """A model of three classes with weights that hide nothing, which every format can hold."""
    config = registry.model_config(
        "ViT-Ti/16", width=16, depth=2, heads=2, mlp_dim=24, patch=8, image_size=32, num_classes=3,
        activation="gelu",
    )  # fmt: skip
    prepared = Preprocessing(32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    return formats.LoadedCheckpoint(config, parameters(config), NAMES, prepared, **fields)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    """Photos of other aspects, and one of 16 bits that uses 12."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number, (height, width) in enumerate(((32, 32), (24, 48), (60, 20))):
        pixels = random.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return sorted(map(str, folder.iterdir()))


def answers(path, photos) -> np.ndarray:
    """(photos, classes), in the order of the names."""
    run = vit_jax.load_run(path)
    found = [dict(zip(p.names, p.probabilities, strict=True)) for p in run(photos, topk=3)]
    return np.array([[by_name[name] for name in NAMES] for by_name in found])


def described_config(path) -> dict:
    """The config of a run that would have given the model, as JSON has it."""
    description = loading.describe_checkpoint(formats.read_checkpoint(path))
    return json.loads(json.dumps(description["config"]))


@pytest.mark.parametrize("fact", slow_unless(["all", "order of pixels"], FACTS))
def test_every_format_gives_back_what_answers_depend_on(fact, tmp_path):
    checkpoint = of_model(**FACTS[fact])
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "orbax")
    config = described_config(tmp_path / "ours")
    for name, file in FILES.items():
        path = tmp_path / name / file
        vit_jax.convert(tmp_path / "ours", path, name.split()[0])
        again = formats.read_checkpoint(path)
        assert again.settings == checkpoint.settings, name
        assert again.classes == NAMES, name
        assert again.preprocessing == checkpoint.preprocessing, name
        assert formats.probabilities_of(again) == formats.probabilities_of(checkpoint), name
        described = described_config(path)
        assert described["data"] == config["data"], name
        assert described["eval"] == config["eval"], name
        assert described["objective"] == config["objective"], name


@pytest.mark.slow
@pytest.mark.parametrize("fact", FACTS)
def test_every_format_gives_the_same_probabilities(fact, photos, tmp_path):
    checkpoint = of_model(**FACTS[fact])
    formats.write_checkpoint(checkpoint, tmp_path / "ours", "orbax")
    expected = answers(tmp_path / "ours", photos)
    plain = dataclasses.replace(checkpoint, probabilities="", settings={})
    formats.write_checkpoint(plain, tmp_path / "plain", "orbax")
    if fact not in ("softmax", "range of values"):  # the photos have 8 bits
        assert np.abs(expected - answers(tmp_path / "plain", photos)).max() > 1e-3
    for name, file in FILES.items():
        path = tmp_path / name / file
        vit_jax.convert(tmp_path / "ours", path, name.split()[0])
        np.testing.assert_allclose(answers(path, photos), expected, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("form", ["official", "big_vision"])
def test_a_file_of_tensors_alone_says_what_it_does_not_hold(form, tmp_path, caplog):
    config = dataclasses.replace(of_model().model_config, activation="gelu_tanh", epsilon=1e-6)
    checkpoint = dataclasses.replace(of_model(**FACTS["all"]), model_config=config)
    with caplog.at_level(logging.WARNING):
        formats.write_checkpoint(checkpoint, tmp_path / "model.npz", form)
    (line,) = [r.getMessage() for r in caplog.records if "has no place for" in r.getMessage()]
    for missing in (
        "--classes",
        "--config.objective.loss=sigmoid",
        "--config.data.native_tokens=6",
    ):
        assert missing in line


def test_settings_of_a_later_version_are_refused_by_name(tmp_path):
    formats.write_checkpoint(of_model(), tmp_path / "model", "huggingface")
    stated = tmp_path / "model/config.json"
    content = json.loads(stated.read_text()) | {"vit_jax": {"settings": {"data.depth": "map"}}}
    stated.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="later version: .* config.data.depth = 'map'"):
        formats.read_checkpoint(tmp_path / "model")


def adapted(checkpoint: formats.LoadedCheckpoint, base: pathlib.Path) -> formats.LoadedCheckpoint:
    """A model with adapters on a base, as a run with LoRA gives it: the adapters and the head are random."""
    layers = ("encoder/.*/query", "encoder/.*/value")
    found, random = lora.Adapters(2, layers, (classifier.HEADS,)), np.random.default_rng(1)
    frozen, trained = found.split(checkpoint.params)
    trained |= {"adapters": found.init(checkpoint.params, jax.random.key(0))}
    trained = jax.tree.map(lambda x: 0.3 * random.standard_normal(x.shape, np.float32), trained)
    heads = [name for name in patterns.names(checkpoint.params) if name.startswith("head")]
    unmerged = formats.Unmerged(trained["adapters"], tuple(heads), str(base))
    return dataclasses.replace(
        checkpoint, params=lora.whole(frozen, trained), adapters=unmerged, layout={}
    )


def test_adapters_on_a_run_of_ours_are_read_with_what_their_run_says(tmp_path):
    """The base is a checkpoint of ours, of other classes, and its own answers are softmax."""
    base = dataclasses.replace(of_model(), classes=("a", "b", "c"))
    formats.write_checkpoint(base, tmp_path / "base", "orbax")
    checkpoint = adapted(of_model(**FACTS["all"]), tmp_path / "base")
    formats.write_checkpoint(checkpoint, tmp_path / "peft", "peft")
    again = formats.read_checkpoint(tmp_path / "peft")
    assert (again.classes, again.probabilities, again.settings) == (
        NAMES,
        "sigmoid",
        checkpoint.settings,
    )
    expected, found = patterns.named(checkpoint.params), patterns.named(again.params)
    for name, array in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), array, atol=1e-6, err_msg=name)
    run = vit_jax.load_run(tmp_path / "peft")
    head = patterns.named(registry.split(run.model)[1].params)["head/kernel"]
    np.testing.assert_allclose(head, expected["head/kernel"], atol=1e-6)
    assert run.classes == NAMES
    assert run.config.objective.loss == "sigmoid"
    assert run.config.data.native_tokens == 6


def test_an_average_has_what_its_models_have_and_unlike_ones_are_refused(tmp_path):
    for name, fact in (("a", "all"), ("b", "all"), ("c", "sigmoid")):
        formats.write_checkpoint(of_model(**FACTS[fact]), tmp_path / name, "orbax")
    alike = averaging.read_alike([tmp_path / "a", tmp_path / "b"])
    formats.write_checkpoint(averaging.average(alike), tmp_path / "merged", "orbax")
    merged = formats.read_checkpoint(tmp_path / "merged")
    assert merged.settings == FACTS["all"]["settings"]
    assert merged.probabilities == "sigmoid"
    with pytest.raises(ConfigError, match="the settings of its answers is"):
        averaging.read_alike([tmp_path / "a", tmp_path / "c"])


def test_other_libraries_compute_the_same_logits_and_are_told_of_sigmoids(tmp_path):
    checkpoint = of_model(probabilities="sigmoid")
    formats.write_checkpoint(checkpoint, tmp_path / "model", "huggingface")
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path / "model").eval()
    assert model.config.problem_type == "multi_label_classification"
    images = np.random.default_rng(0).standard_normal((2, 32, 32, 3)).astype(np.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(images).permute(0, 3, 1, 2)).logits.sigmoid()
    ours = jax.nn.sigmoid(forward(checkpoint.model_config, checkpoint.params, images).logits)
    np.testing.assert_allclose(theirs, ours, atol=1e-6)


def test_thresholds_that_convert_keeps_decide_what_is_predicted(photos, tmp_path, capsys):
    """A table of thresholds is kept in a checkpoint of ours, and by that in a folder of transformers."""
    formats.write_checkpoint(of_model(probabilities="sigmoid"), tmp_path / "ours", "orbax")
    plain = vit_jax.load_run(tmp_path / "ours")(photos, topk=3)
    first = dict(zip(plain[0].names, plain[0].probabilities, strict=True))
    # Of the first photo snow is decided for alone; no photo has fog or rain.
    cuts = {"fog": 1.0, "rain": 1.0, "snow": first["snow"] - 1e-4}
    (tmp_path / "thresholds.csv").write_text(
        "class,threshold\n" + "".join(f"{name},{cut}\n" for name, cut in cuts.items())
    )
    vit_jax.convert(
        tmp_path / "ours", tmp_path / "kept", "orbax", thresholds=tmp_path / "thresholds.csv"
    )
    vit_jax.convert(tmp_path / "kept", tmp_path / "folder", "huggingface")
    run = vit_jax.load_run(tmp_path / "folder")
    assert run.config.eval.thresholds == tuple(cuts[name] for name in NAMES)
    found = run(photos, topk=1)
    for before, after in zip(plain, found, strict=True):
        rows = zip(before.names, before.probabilities, strict=True)
        listed = {n: p for i, (n, p) in enumerate(rows) if i == 0 or p >= cuts[n]}
        assert dict(zip(after.names, after.probabilities, strict=True)) == pytest.approx(listed)
        assert after.decided == tuple(p >= cuts[name] for name, p in listed.items())
    assert dict(zip(found[0].names, found[0].decided, strict=True))["snow"]

    def printed(form: str) -> str:
        predict_files(run, find_images(photos), topk=1, batch_size=2, form=form)
        return capsys.readouterr().out

    names = [[n for n, yes in zip(p.names, p.decided, strict=True) if yes] for p in found]
    text = [line.split("  ")[-1] for line in printed("text").splitlines() if line[0] == " "]
    assert text == [name for some in names for name in some or ["none"]]
    rows = list(csv.DictReader(printed("csv").splitlines()))
    assert [row["class"] for row in rows] == [name for some in names for name in some or [""]]
    answers = [json.loads(line)["predictions"] for line in printed("jsonl").splitlines()]
    assert [[one["class"] for one in a if one["decided"]] for a in answers] == names


def test_thresholds_are_for_sigmoids_and_for_the_classes_of_the_model(tmp_path):
    formats.write_checkpoint(of_model(), tmp_path / "softmax", "orbax")
    formats.write_checkpoint(of_model(probabilities="sigmoid"), tmp_path / "sigmoid", "orbax")
    table = tmp_path / "thresholds.csv"
    table.write_text("class,threshold\nrain,0.5\nsnow,0.5\nfog,0.5\n")
    with pytest.raises(ConfigError, match="thresholds are for sigmoids"):
        vit_jax.convert(tmp_path / "softmax", tmp_path / "out", "orbax", thresholds=table)
    table.write_text("class,threshold\nrain,0.5\n")
    with pytest.raises(ConfigError, match="0 lines for the class 'snow'"):
        vit_jax.convert(tmp_path / "sigmoid", tmp_path / "out", "orbax", thresholds=table)
    assert not (tmp_path / "out").exists()
