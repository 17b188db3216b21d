"""The guide's files as a user would run them, from outside of the package."""

import pathlib
import re

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax import evaluation, objectives
from vit_jax.base.lazy_table import LazyTable
from vit_jax.checkpoints import reading
from vit_jax.data import sources
from vit_jax.models import registry
from vit_jax.optim import preconditioners

GUIDE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "extending.md"
FILES = {
    re.match(r'"""(\w+)\.py', code)[1]: code
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
}
TABLES = (
    objectives.OBJECTIVES, evaluation.EVALUATORS, sources.OPENERS, preconditioners.PRECONDITIONERS,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine")
    for name, code in FILES.items():
        (path / f"{name}.py").write_text(code)
    families, tables = list(registry.GUESTS), [dict(table) for table in TABLES]
    yield path
    registry.GUESTS[:] = families
    for table, was in zip(TABLES, tables, strict=True):
        table.clear()
        table.update(was)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_guide_trains_and_resumes(folder, tmp_path, name):
    config = vit_jax.load_config(str(folder / f"{name}.py"))
    config.update_from_flattened_dict({
        "duration": "6 steps", "log.every": "2 steps", "checkpoint.every": "3 steps", "optim.ema": 0.9,
        "batch_size": 32, "accumulate": 2, "log.tensorboard": False, "model.name": "Patches-S/4",
    })  # fmt: skip
    result = vit_jax.train(config, tmp_path)
    assert result["step"] == 6 and np.isfinite(
        result["loss" if name == "my_objective" else "accuracy"]
    )
    weights = reading.read_weights(tmp_path)
    assert "objective" not in weights.params and int(weights.variables["trained"]) > 0
    state = reading.read_parts(
        reading.find_checkpoint(tmp_path),
        {"model_variables": {"trained": jax.ShapeDtypeStruct((), np.int32)}},
    )
    # Every part of every batch has counted.
    assert int(state["model_variables"]["trained"]) == 12
    assert ("length/mean" in result) == (name == "my_evaluator")
    run = vit_jax.load_run(tmp_path)
    assert run.model(np.zeros((1, 32, 32, 3), np.float32)).features.shape == (1, 32)


def test_a_guests_checkpoint_read_without_its_file_names_it(folder, tmp_path, command, monkeypatch):
    config = vit_jax.load_config(str(folder / "my_objective.py"))
    config.update_from_flattened_dict({
        "duration": "1 steps", "batch_size": 8, "log.tensorboard": False, "model.name": "Patches-S/4",
    })  # fmt: skip
    vit_jax.train(config, tmp_path)
    guests = [one for one in registry.GUESTS if "Patches-S/4" in one.VARIANTS]
    assert guests
    monkeypatch.setattr(registry, "GUESTS", [])
    for name in ("evaluate", "show", "predict"):
        arguments = [tmp_path] if name == "show" else [f"--checkpoint={tmp_path}"]
        code, _, err = command(name, *arguments, *(["a.jpg"] if name == "predict" else []))
        assert code == 2, err
        assert "'Patches-S/4'" in err and f"--register={folder / 'my_family.py'}" in err


def test_models_lists_a_guest_as_markdown_too(folder, command, monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", LazyTable({}))  # counting all others takes long
    code, out, err = command("models", "--markdown", f"--register={folder / 'my_family.py'}")
    assert code == 0 and "| Patches-S/4 |" in out, err


def test_the_guide_has_a_file_for_each_contract():
    assert set(FILES) == {
        "my_family", "my_objective", "my_evaluator", "my_source", "my_optimizer",
    }  # fmt: skip
