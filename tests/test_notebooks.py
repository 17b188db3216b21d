"""The notebooks run, from the first cell to the last, on small data in place of what their first cells name."""

import json
import pathlib
import shutil

import matplotlib
import numpy as np
import pytest
from PIL import Image

from vit_jax.recipes import shipped


def cells(name: str) -> list[tuple[str, bool]]:
    """The code of a notebook, and of each cell whether it is the one to change."""
    notebook = json.loads((shipped.notebooks_folder() / f"{name}.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code)
    return [("".join(c["source"]), "parameters" in c["metadata"].get("tags", ())) for c in code]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, finished_run) -> pathlib.Path:
    """Some photos of two classes, and a small model that was trained on digits."""
    folder = tmp_path_factory.mktemp("notebooks")
    random = np.random.default_rng(0)
    for name, low in (("day", 120), ("night", 0)):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(low, low + 120, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")
    shutil.copytree(finished_run.workdir, folder / "digits")
    return folder


@pytest.fixture
def run_notebook(folder, monkeypatch):
    """`run_notebook(name, **parameters)`: what its cells have defined in the end."""
    matplotlib.use("Agg")
    monkeypatch.chdir(folder)

    def run(name: str, **parameters) -> dict:
        names = {}
        for code, is_to_change in cells(name):
            exec(code, names)
            names |= parameters if is_to_change else {}
        return names

    return run


def test_photos_are_learned_and_what_is_saved_is_used(run_notebook, folder, compilation_cache):
    changes = {
        "data.image_size": 32, "duration": "12 steps", "optim.warmup": "1 steps", "batch_size": 16, "accumulate": 1,
        "log.every": "2 steps", "compilation_cache": compilation_cache, "log.tensorboard": False,
        "model.dtype": "float32", "audit.every": 0,
    }  # fmt: skip
    names = run_notebook("fine_tune", photos="photos", checkpoint="digits", changes=changes)
    assert set(names["run"].classes) == {"day", "night"} and len(names["losses"]) > 3
    assert (folder / "mine" / "model.safetensors").exists()


def test_layers_and_attention_are_shown(run_notebook, folder):
    images = sorted(map(str, (folder / "photos" / "day").iterdir()))[:3]
    names = run_notebook("look_inside", checkpoint="digits", images=images)
    assert names["read"].shape == (3, 4, 4) and len(names["features"]) == 2
    np.testing.assert_allclose(names["read"].sum((1, 2)), 1, atol=1e-5)


def test_the_notebooks_are_copied_and_those_of_the_user_are_kept(tmp_path, command):
    (tmp_path / "fine_tune.ipynb").write_text("mine")
    code, out, err = command("tutorial", tmp_path)
    assert code == 0 and f"jupyter lab {tmp_path}/fine_tune.ipynb" in out, err
    assert (tmp_path / "fine_tune.ipynb").read_text() == "mine"
    assert json.loads((tmp_path / "look_inside.ipynb").read_text())["nbformat"] == 4
    code, _, err = command("tutorial", tmp_path / "fine_tune.ipynb")
    assert code == 2 and "fine_tune.ipynb is a file, not a folder" in err
