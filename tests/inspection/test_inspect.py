"""`vit_jax inspect`: what a model did with images against its captured weights, any family, bad images
and checkpoints.
"""

import dataclasses
import io
import json
import re

import jax
import numpy as np
import pytest
from PIL import Image

from tests.inspection import references
from tests.models.conftest import parameters, statistics
from tests.models.test_contract import COMMON, FAMILIES, TINY
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.inspection import observe, run
from vit_jax.inspection.contract import InspectOptions
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.models.layout import layouts
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.models.registry import Weights
from vit_jax.prediction import output_names

PLAIN = dict(
    image_size=(8, 12), patch=4, depth=2, width=16, mlp_dim=32, heads=2, num_classes=5,
    dtype_on_cpu="same",
)  # fmt: skip


def checkpoint(path, config):
    """A directory of ours with random weights."""
    weights = Weights(parameters(config), statistics(config))
    prepared = Preprocessing(config.image_size)
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, weights.params, None, prepared, {}, weights.variables),
        path,
        "orbax",
    )
    return path


def photos(folder, count=3, size=(20, 30)):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(0, 256, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def look(config, count=5, batch_size=2, shown=3):
    """What is observed, and the weights (L, n, H, T, T) that the model captured, with its blocks."""
    config = observe.for_inspection(config)
    weights = Weights(parameters(config), statistics(config))
    data = default_config().data
    data.update(mean=(0.5,) * 3, std=(0.5,) * 3)
    shape = (count, *config.height_width, 3)
    images = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    definition = registry.abstract(config)[0]
    batches = (images[i : i + batch_size] for i in range(0, count, batch_size))
    found = observe.observe(definition, weights, config, data, batches, shown=shown)
    details = observe.details(definition, weights, config, data, images[:shown])
    forward = observe.make_forward(definition, config, data, capture=True)
    captured = jax.device_get(jax.jit(forward)(weights, images).intermediates)
    return found, details, captured


@pytest.mark.parametrize(
    "options",
    [
        dict(distilled=True, registers=2),
        pytest.param(dict(pool="mean"), marks=pytest.mark.slow),
        pytest.param(dict(position="relative", registers=1), marks=pytest.mark.slow),
        pytest.param(dict(parallel=True, qk_norm=True, pool="map"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_observed_of_a_vit_is_that_of_its_captured_weights_in_float64(options):
    config = registry.model_config("ViT-mu/16", **PLAIN | options)
    found, details, captured = look(config)
    (stream,), weights = found.streams.values(), captured["attention"]
    size, first = (8.0, 12.0), config.tokens - 6
    distances = [
        [[references.distance(head, (2, 3), size) for head in image] for image in layer]
        for layer in weights
    ]
    np.testing.assert_allclose(stream.distance, distances, rtol=1e-5)
    np.testing.assert_allclose(stream.entropy, references.entropy(weights), rtol=1e-5)
    rollouts = np.stack([references.rollout(weights[:, image]) for image in range(5)])
    of_reader = rollouts[:, 0] if config.pool == "token" else rollouts[:, first:].mean(1)
    np.testing.assert_allclose(stream.rollout[-1], of_reader[:3, first:], rtol=1e-5)
    np.testing.assert_allclose(stream.mean_rollout[-1], of_reader[:, first:].mean(0), rtol=1e-5)
    read = weights[..., 0, :] if config.pool == "token" else weights[..., first:, :].mean(-2)
    np.testing.assert_allclose(stream.read, read[:, :3, :, first:], rtol=1e-5)
    np.testing.assert_allclose(stream.mean_read, read[..., first:].mean((1, 2)), rtol=1e-5)
    # The chosen place, the middle, is in the second row and column.
    np.testing.assert_allclose(stream.chosen, weights[:, :3, :, first + 4, first:], rtol=1e-5)
    blocks = captured["blocks"].astype(np.float64)
    np.testing.assert_allclose(found.norms["blocks"], np.linalg.norm(blocks, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.channels["blocks"], blocks.std((1, 2)), rtol=1e-5, atol=1e-6)
    similar = np.mean([references.similarity(weights[:, image]) for image in range(3)], axis=0)
    np.testing.assert_allclose(details.similarity["attention"], similar, rtol=1e-5)
    assert details.ranks["blocks"].shape == (2, 3) and found.tokens.shape == (3, 6, 16)


def test_no_more_than_one_layers_weights_are_held():
    size = dict(image_size=64, patch=4, width=16, mlp_dim=32, heads=8, num_classes=5)
    config = observe.for_inspection(registry.model_config("ViT-mu/16", depth=12, **size))
    data = default_config().data
    data.update(mean=(0.5,) * 3, std=(0.5,) * 3)
    definition, like = registry.abstract_weights(config)
    images = jax.ShapeDtypeStruct((8, 64, 64, 3), np.uint8)
    look = observe.make_look(definition, config, data)
    plain = jax.jit(observe.make_forward(definition, config, data))
    held = [
        function.lower(like, images).compile().memory_analysis().temp_size_in_bytes
        for function in (look, plain)
    ]
    assert held[0] <= 1.3 * held[1]


def test_the_page_needs_no_network_and_names_the_images_that_cannot_be_read(tmp_path, command):
    config = registry.model_config("ViT-mu/16", **PLAIN)
    folder = photos(tmp_path / "photos")
    (folder / "empty.png").write_bytes(b"")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:200])
    wide = np.random.default_rng(0).integers(0, 2**16, (20, 20), np.uint16)
    Image.fromarray(wide).save(folder / "wide.png")
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "moving.gif", save_all=True, append_images=frames[1:])
    code, out, err = command(
        "inspect", f"--checkpoint={checkpoint(tmp_path / 'model', config)}",
        f"--images={folder}/*", f"--out={tmp_path / 'report'}", "--shown=2", "--json",
    )  # fmt: skip
    result = json.loads(out.splitlines()[-1])
    assert code == 1 and result["images"] == 5
    assert sorted(name.rsplit("/")[-1] for name in result["unreadable"]) == ["cut.png", "empty.png"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "empty.png cannot be read" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page) and "http" not in page
    for name in re.findall(r"data:image/png;base64,([\w+/=]+)", page)[:1]:
        import base64

        assert Image.open(io.BytesIO(base64.b64decode(name))).width > 100
    numbers = np.load(tmp_path / "report" / "numbers.npz")
    assert numbers["Attention distance/attention/distance"].shape == (2, 5, 2)
    read = [name.rsplit("/")[-1] for name in numbers["images"]]
    assert read == ["0.png", "1.png", "2.png", "moving.gif", "wide.png"]
    assert [name.rsplit("/")[-1] for name in numbers["unreadable"]] == ["cut.png", "empty.png"]
    assert numbers["logits"].shape == (5, 5) and list(numbers["classes"]) == list("01234")
    assert (tmp_path / "report" / "attention_overlays.png").exists()
    before = {file.name: file.read_bytes() for file in (tmp_path / "report").iterdir()}
    code, _, err = command(
        "inspect", f"--checkpoint={tmp_path / 'model'}", f"--images={folder}/0.png",
        f"--out={tmp_path / 'report'}", "--shown=1",
    )  # fmt: skip
    assert (
        code == 2 and "was made with other arguments (images, options): name another place" in err
    )
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "report").iterdir()}


class Loaded(Exception):
    """The model would be loaded now."""


@pytest.fixture
def before_loading(monkeypatch):
    def load(*_):
        raise Loaded

    monkeypatch.setattr(run, "load_for_images", load)


def test_a_report_is_replaced_by_the_same_command_alone(tmp_path, monkeypatch, before_loading):
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 2)
    out = tmp_path / "report"
    with pytest.raises(Loaded):
        run.inspect("model", ["photos/*.png"], out)
    for name in ("report.html", "filters.png"):
        (out / name).write_bytes(b"mine")
        with pytest.raises(ConfigError, match=f"{name} is there and would be replaced"):
            run.inspect("model", ["photos/*.png"], out)
        (out / name).unlink()
    (out / "notes.txt").write_bytes(b"mine")
    made_by = output_names.command_arguments(
        "model",
        images=[str(tmp_path / "photos/*.png")],
        options=dataclasses.asdict(InspectOptions()),
        settings=[],
        model={},
    )
    (out / "inspect.json").write_text(json.dumps(made_by))
    (out / "report.html").write_bytes(b"of the first run")
    with pytest.raises(Loaded):
        run.inspect("model", ["photos/*.png"], "report")
    with pytest.raises(ConfigError, match="other arguments \\(checkpoint\\): name"):
        run.inspect("another", ["photos/*.png"], out)
    with pytest.raises(ConfigError, match="other arguments \\(images, options\\): name"):
        run.inspect("model", ["photos/1.png"], out, options=InspectOptions(shown=1))
    assert (out / "report.html").read_bytes() == b"of the first run"


@pytest.mark.parametrize(
    "arguments, words, code",
    [
        (["--images={folder}/*.webp"], "matches no file", 2),
        (["--images={folder}/none.png"], "none of 1 images can be read", 1),
        (["--images={folder}", "--patch=2,0"], "--patch must be two numbers", 2),
        (["--images={folder}", "--threshold=0.5"], "the model has 1 exits", 2),
        (["--images={folder}", "--out={folder}/0.png"], "is a file, not a folder", 2),
        (["--images={folder}", "--checkpoint={folder}"], "no checkpoint of a known format", 1),
    ],
)
def test_what_cannot_be_inspected_is_said(tmp_path, command, arguments, words, code):
    folder = photos(tmp_path / "photos", 1)
    config = registry.model_config("ViT-mu/16", **PLAIN)
    model = checkpoint(tmp_path / "model", config)
    said = [argument.format(folder=folder) for argument in arguments]
    found, _, err = command("inspect", f"--checkpoint={model}", f"--out={tmp_path / 'out'}", *said)
    assert found == code and words in err


def test_each_branch_of_a_crossvit_is_observed_on_its_own_grid():
    small, large = (16, 24), (8, 12)  # 4 x 6 and 2 x 3 patches
    name, own, _ = TINY["crossvit"]
    own = own | dict(image_size=small, large_image_size=large, patch=4, small_patch=4)
    found, _, captured = look(registry.model_config(name, **COMMON | own), count=2)
    for name, grid in (("small_attention", (4, 6)), ("attention", (2, 3))):
        stream, weights = found.streams[name], captured[name]
        assert weights.shape[-1] == 1 + grid[0] * grid[1] and stream.layout.grid == grid
        expected = [
            [[references.distance(head, grid, small) for head in image] for image in layer]
            for layer in weights
        ]
        np.testing.assert_allclose(stream.distance, expected, rtol=1e-5)
        np.testing.assert_allclose(stream.read, weights[..., 0, 1:], rtol=1e-5, atol=1e-7)


def sections(family, tmp_path, **options):
    name, own, _ = TINY[family]
    config = registry.model_config(name, **COMMON | own | options)
    model = checkpoint(tmp_path / family, config)
    images = [str(photos(tmp_path / "photos"))]
    return run.inspect(model, images, tmp_path / "report")["sections"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_inspected_and_what_has_no_meaning_is_said(family, tmp_path):
    found = sections(family, tmp_path)
    with_attention = layouts(registry.model_config(TINY[family][0])) and family not in (
        "mixer", "resnet", "feed_forward", "efficientnet", "axial_resnet",
    )  # fmt: skip
    assert ("no attention weights" in found["Attention distance"]) != with_attention
    assert len(found) == len(run.QUANTITIES)


def test_a_mixer_without_a_head_has_no_attention_and_no_classes_to_keep(tmp_path):
    found = sections("mixer", tmp_path, num_classes=0)
    assert "no attention weights" in found["Attention distance"]
    assert "it has no head" in found["Mixing of tokens, and permutations"]


@pytest.mark.slow
def test_a_mixer_with_permuted_weights_takes_permuted_images_as_its_own(tmp_path):
    found = sections("mixer", tmp_path)["Mixing of tokens, and permutations"]
    assert float(re.search(r"differ by at most (\S+)\. ", found)[1]) < 1e-4
