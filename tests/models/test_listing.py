"""The table of models: counts against the published dimensions, sizes that do not fit, and its
text.
"""

import json
import pathlib

import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.interchange import listing
from vit_jax.models import published, registry

COUNTED = {
    "ViT-Ti/16": 5_717_416, "ViT-S/32": 22_878_952, "ViT-S/16": 22_050_664, "ViT-B/32": 88_224_232,
    "ViT-B/16": 86_567_656, "ViT-B/8": 86_576_872,
    "ViT-L/32": 306_535_400, "ViT-L/16": 304_326_632, "ViT-H/14": 632_045_800,
    "ViT-g/14": 1_012_611_432, "ViT-G/14": 1_844_440_680,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    names = [*COUNTED, "ViT-s/28", "ViT-s/16", "CrossViT-S"]
    return {row["name"]: row for row in listing.model_rows(names=names)}


@pytest.mark.slow
def test_every_listed_model_has_a_row_and_the_page_of_the_docs_is_what_the_command_prints():
    rows = listing.model_rows()
    assert [row["name"] for row in rows] == registry.variants()
    assert all(tuple(row) == listing.COLUMNS for row in rows)
    page = pathlib.Path(__file__).resolve().parents[2] / "docs/models.md"
    assert page.read_text() == listing.page(rows) + "\n", (
        "vit_jax models --markdown > docs/models.md"
    )


def test_the_page_of_the_docs_is_what_the_command_prints_but_for_parameters():
    def without_parameters(page: str) -> list[list[str]]:
        cells = [line.split(" | ") for line in page.splitlines()]
        return [row[:1] + row[2:] if len(row) == 3 else row for row in cells]

    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    printed = listing.page(listing.model_rows(parameters=False)) + "\n"
    assert without_parameters(page) == without_parameters(printed), (
        "vit_jax models --markdown > docs/models.md"
    )


@pytest.mark.parametrize(("name", "parameters"), COUNTED.items())
def test_parameters_are_the_exact_counts_of_the_published_dimensions(rows, name, parameters):
    assert rows[name]["parameters"] == parameters


@pytest.mark.parametrize(
    ("name", "gflops"),
    {
        "ViT-s/28": 0.7, "ViT-s/16": 2.2, "ViT-Ti/16": 2.5, "ViT-S/32": 2.3, "ViT-S/16": 9.2, "ViT-B/32": 8.7,
        "ViT-B/16": 35.1,
        "ViT-L/16": 122.9, "ViT-g/14": 533.1, "ViT-G/14": 965.3,
    }.items(),
)  # fmt: skip
def test_flops_are_those_of_scaling_vit_table_2(rows, name, gflops):
    """It counts attention pooling where we have a class token, so to 3 %."""
    assert rows[name]["gflops"] == pytest.approx(gflops, rel=0.03)


def test_tokens_include_the_class_token(rows):
    assert [rows[f"ViT-{name}"]["tokens"] for name in ("B/32", "B/16", "B/8", "H/14")] == [
        50,
        197,
        785,
        257,
    ]


def test_a_model_that_the_images_do_not_fit_is_counted_at_the_next_smaller_size(monkeypatch):
    monkeypatch.setattr(registry, "variants", lambda: ["ViT-B/16", "ViT-H/14"])
    rows = {row["name"]: row for row in listing.model_rows(384)}
    assert (rows["ViT-B/16"]["image_size"], rows["ViT-B/16"]["tokens"]) == (384, 577)
    assert (rows["ViT-H/14"]["image_size"], rows["ViT-H/14"]["tokens"]) == (378, 27 * 27 + 1)


def test_a_model_is_listed_at_the_size_that_it_was_published_with_unless_another_is_asked_for(
    rows, monkeypatch
):
    row = rows["CrossViT-S"]
    assert (row["image_size"], row["parameters"], row["gflops"]) == (240, 26_856_272, 11.23)
    monkeypatch.setattr(registry, "variants", lambda: ["CrossViT-S"])
    assert [row["image_size"] for row in listing.model_rows(224)] == [216]


def test_images_smaller_than_a_patch_are_refused():
    with pytest.raises(
        ConfigError,
        match="ViT-mu/16: no size up to 8 fits: image size 8 cannot be split into patches",
    ):
        listing.model_rows(8)


def test_the_text_is_aligned_and_the_rows_are_json(rows):
    lines = listing.text(list(rows.values())).splitlines()
    heading, *body = lines[: len(rows) + 1]
    assert heading.split()[0] == "name" and len({len(line) for line in lines[: len(rows) + 1]}) == 1
    assert "ViT-B/16" in body[4] and "86,567,656" in body[4] and "35.13" in body[4]
    assert json.loads(json.dumps(list(rows.values()))) == list(rows.values())


def test_a_family_without_heads_has_a_gap_there(rows):
    row = rows["ViT-B/16"] | {"name": "other", "heads": None}
    assert listing.text([row]).splitlines()[1].endswith(" -")


def test_published_names_that_work_have_a_row_with_how_their_images_are_prepared():
    rows = {row["name"]: row for row in listing.published_table()}
    assert len(rows) > 480
    assert rows["vit_base_patch16_dinov3.lvd1689m"] == {
        "name": "vit_base_patch16_dinov3.lvd1689m", "model": "ViT-B/16", "family": "vit", "depth": 12, "width": 768,
        "image_size": 256, "eval_crop": "torchvision", "eval_resize": 256, "interpolation": "bicubic",
        "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225),
        "source": "hf://timm/vit_base_patch16_dinov3.lvd1689m",
    }  # fmt: skip
    hybrid = rows["vit_small_r26_s32_384.augreg_in21k_ft_in1k"]
    assert (hybrid["family"], hybrid["model"]) == ("hybrid", "R26+ViT-S/32")
    # Which create_model does not know.
    assert rows["tf_efficientnet_b8.ap_in1k"]["model"] == ""
    assert not [name for name in rows if name.startswith("vit_base_mci")]
    radio = rows["naflexvit_huge_patch16_radio_v4.c_radio"]
    assert (radio["family"], radio["model"]) == ("radio", "C-RADIOv4-H/16")
    assert "vit_tiny_patch16_224.augreg_in21k" in listing.published_text(list(rows.values()))
    assert published.nearest_published("vit_base_patch16_dinov4.lvd1689m").endswith(
        "dinov3.lvd1689m'?"
    )
