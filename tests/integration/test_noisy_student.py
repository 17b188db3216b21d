"""Teachers that label images for their students, in whole runs."""

import jax
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.data import sources
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.studies.sweep import run_all
from vit_jax.training import loop, pseudo_labels, with_data
from vit_jax.training.assembly import resolve


def write_teacher(path, seed):
    config = registry.model_config(
        "ViT-mu/16", image_size=32, num_classes=10, width=32, depth=1, heads=2, mlp_dim=64
    )
    random = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: random.normal(size=x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    formats.write_checkpoint(formats.LoadedCheckpoint(config, params), path, "official")


def student(tiny_config, teacher, **fields):
    return tiny_config(**{
        "data__name": "digits_few", "data__train_split": "few_0", "pseudo__teacher": str(teacher),
        "pseudo__split": "rest_0[:200]", "pseudo__confidence": 0.2, "pseudo__per_class": 5,
    } | fields)  # fmt: skip


def labelled(config, workdir):
    config = resolve(config, workdir)
    source = sources.open_train(config.data)
    return pseudo_labels.add(source, with_data.assembly_for(config, source), workdir)


def test_a_teacher_labels_once_and_another_is_refused(tiny_config, tmp_path, monkeypatch):
    write_teacher(tmp_path / "teacher.npz", 0)
    config = student(tiny_config, tmp_path / "teacher.npz")
    found = labelled(config, tmp_path / "run")
    assert len(found) % 100 == 0 and found[len(found) - 1].label.shape == (10,)
    # The same teacher in another place; nothing is labelled again.
    monkeypatch.setattr(pseudo_labels, "_ask", None)
    (tmp_path / "teacher.npz").rename(tmp_path / "moved.npz")
    config.pseudo.teacher = str(tmp_path / "moved.npz")
    assert labelled(config, tmp_path / "run").fingerprint() == found.fingerprint()
    config.pseudo.confidence = 0.25
    with pytest.raises(ConfigError, match="pseudo_labels.npz was made with other confidence"):
        labelled(config, tmp_path / "run")
    write_teacher(tmp_path / "moved.npz", 1)
    with pytest.raises(ConfigError, match="was made by another teacher than config.pseudo.teacher"):
        labelled(config, tmp_path / "run")


def test_what_a_teacher_cannot_label_is_refused(tiny_config, tmp_path):
    write_teacher(tmp_path / "teacher.npz", 0)
    config = student(tiny_config, tmp_path / "teacher.npz", objective__name="masked_patches")
    config.augment.mixup = 0.0
    with pytest.raises(ConfigError, match="only an objective that learns from labels"):
        labelled(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="config.pseudo.teacher = .* is the run itself"):
        labelled(student(tiny_config, tmp_path / "run"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_rounds_that_are_stopped_end_as_if_they_were_not(
    tiny_config, tmp_path, monkeypatch, stop_after
):
    teacher = tiny_config(data__name="digits_few", data__train_split="few_0", duration="4 steps")
    one = student(tiny_config, "teacher", duration="8 steps", pseudo__confidence=0.0)
    two = student(
        tiny_config, "round_1", duration="4 steps", pseudo__confidence=0.0, pseudo__soft=False
    )
    runs = {"teacher": teacher, "round_1": one, "round_2": two}
    whole = run_all(runs, tmp_path / "whole")
    assert all(0 <= whole[name]["accuracy"] <= 1 for name in runs)
    for step in (3, 5):  # in the teacher, then in the first round
        stop_after(step)
        with pytest.raises(loop.Interrupted):
            run_all(runs, tmp_path / "parts")
    monkeypatch.undo()
    parts = run_all(runs, tmp_path / "parts")
    assert {n: r["accuracy"] for n, r in parts.items()} == {
        n: r["accuracy"] for n, r in whole.items()
    }
    for name in runs:
        states = [
            reading.read_weights(tmp_path / kind / name).params for kind in ("whole", "parts")
        ]
        jax.tree.map(np.testing.assert_array_equal, *states)
