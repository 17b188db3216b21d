"""Models pushed to a server that speaks the hub's protocol, by the hub's own client, and what timm and transformers
load of them.
"""

import json
import logging
import shutil

import numpy as np
import pytest
from huggingface_hub import constants

import vit_jax
from tests import lazily, without_torchvision
from tests.integration.conftest import TINY
from tests.models.conftest import parameters
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.config import default_config
from vit_jax.interchange import formats, model_card
from vit_jax.models import registry

torch = lazily.Package("torch")
transformers = lazily.Package("transformers")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, compilation_cache):
    """A ViT that both libraries have, trained on a folder whose path nobody needs to know."""
    folder = tmp_path_factory.mktemp("very_secret")
    config = vit_jax.load_config("digits")
    config.update_from_flattened_dict(TINY | {
        "compilation_cache": compilation_cache, "log.tensorboard": False, "model.pool": "token",
        "model.position": "learned", "duration": "4 steps", "data.cache": str(folder / "cache"),
    })  # fmt: skip
    vit_jax.train(config, folder / "run")
    return folder / "run"


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)


def torch_logits(model, images) -> np.ndarray:
    with torch.no_grad():
        found = model.eval()(torch.tensor(images).permute(0, 3, 1, 2))
    return getattr(found, "logits", found).numpy()


@pytest.mark.slow
def test_what_is_pushed_gives_timm_the_same_logits(hub, token, workdir, images):
    run = vit_jax.load_run(workdir)
    result = run.push("me/digits", format="timm", private=True, license="apache-2.0")
    assert result["url"].endswith("/me/digits") and hub.visibility["me/digits"] == "private"
    assert set(hub.repositories["me/digits"]) == {"README.md", "config.json", "model.safetensors"}
    timm = without_torchvision.timm_models()
    model = timm.create_model("hf-hub:me/digits", pretrained=True)
    expected = np.asarray(run.model(images).logits)
    np.testing.assert_allclose(torch_logits(model, images), expected, atol=1e-5)
    assert model.pretrained_cfg["label_names"] == list("0123456789")
    assert tuple(model.pretrained_cfg["mean"]) == (0.5, 0.5, 0.5)
    # And ours is the same again.
    again = vit_jax.load_run("hf://me/digits")
    np.testing.assert_allclose(again.model(images).logits, expected, atol=1e-5)
    assert again.classes == run.classes


def test_what_is_pushed_gives_transformers_the_same_logits(hub, token, workdir, images):
    run = vit_jax.load_run(workdir)
    run.push("me/digits-hf", format="huggingface")
    names = {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"}
    assert set(hub.repositories["me/digits-hf"]) == names
    model = transformers.ViTForImageClassification.from_pretrained("me/digits-hf")
    expected = np.asarray(run.model(images).logits)
    np.testing.assert_allclose(torch_logits(model, images), expected, atol=1e-5)
    assert model.config.id2label[7] == "7"


def test_the_card_has_data_metrics_and_recipe_and_nothing_of_this_machine(hub, token, workdir):
    vit_jax.load_run(workdir).push("me/digits", license="mit")
    card = hub.repositories["me/digits"]["README.md"].decode()
    accuracy = json.loads((workdir / "result.json").read_text())["accuracy"]
    for text in (
        "license: mit",
        "`digits`",
        f"| accuracy | {accuracy:.4g} |",
        "config.batch_size = 32",
    ):
        assert text in card
    assert "config.model.depth = 2" in card and 'timm.create_model("hf-hub:me/digits"' in card
    everything = b"".join(hub.repositories["me/digits"].values())
    assert b"very_secret" not in everything and b"compilation_cache" not in everything
    exec(card.split("```python")[-1].partition("```")[0], {"config": default_config()})


def test_a_dry_run_prints_the_files_and_asks_nothing_of_the_hub(hub, workdir, command, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    code, out, err = command("push", workdir, "me/digits", "--dry_run")
    assert code == 0, err
    assert "model.safetensors" in out and "nothing was uploaded" in out and "## Evaluation" in out
    assert hub.asked == []


def test_the_token_is_never_logged(hub, monkeypatch, workdir, caplog, capfd, command):
    monkeypatch.setenv("HF_TOKEN", "secret-and-more")
    with caplog.at_level(logging.DEBUG):
        code, out, err = command("push", workdir, "me/digits")
        assert code == 0, err
        monkeypatch.setenv("HF_TOKEN", "wrong-token")
        code, out2, err2 = command("push", workdir, "me/other")
    assert code == 2 and "does not allow writing to me/other" in err2
    for text in (out, err, out2, err2, caplog.text):
        assert "secret-and-more" not in text and "wrong-token" not in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digits", "'digits' is not OWNER/NAME"),
        ("a/b/c", "is not OWNER/NAME"),
        ("me/x", "needs a token"),
    ],
)
def test_a_bad_name_or_no_token_is_refused_before_anything_is_asked(
    hub, workdir, monkeypatch, tmp_path, name, message
):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=message):
        vit_jax.load_run(workdir).push(name)
    assert hub.asked == []


def test_a_repository_with_another_model_is_kept_unless_it_is_to_be_overwritten(
    hub, token, workdir
):
    run = vit_jax.load_run(workdir)
    run.push("me/digits")
    run.push("me/digits")  # the same model again
    theirs = dict(hub.repositories["me/digits"])
    theirs["config.json"] = theirs["config.json"].replace(
        b'"num_classes": 10', b'"num_classes": 37'
    )
    hub.repositories["me/pets"] = dict(theirs)
    with pytest.raises(ConfigError, match="holds another model .num_classes 37 there, 10 here"):
        run.push("me/pets")
    assert hub.repositories["me/pets"] == theirs
    run.push("me/pets", overwrite=True)
    assert hub.repositories["me/pets"] == hub.repositories["me/digits"] | {
        "README.md": hub.repositories["me/pets"]["README.md"]
    }


def test_files_that_were_there_before_stay_and_are_listed(hub, token, workdir, command):
    hub.repositories["me/digits"] = {".gitattributes": b"", "old/model.bin": b"1", "README.md": b""}
    code, out, err = command("push", workdir, "me/digits", "--overwrite")
    assert code == 0, err
    assert "had these files before, which stay: old/model.bin." in out
    assert hub.repositories["me/digits"]["old/model.bin"] == b"1"
    assert vit_jax.load_run(workdir).push("me/new")["kept"] == []


def test_a_card_that_somebody_wrote_or_edited_stays_unless_it_is_to_be_overwritten(
    hub, token, workdir, caplog
):
    run, files = vit_jax.load_run(workdir), hub.repositories
    run.push("me/digits")
    card = files["me/digits"]["README.md"]
    assert run.push("me/digits", license="mit")["kept"] == []
    assert b"license: mit" in files["me/digits"]["README.md"]  # nobody had edited the other
    edited = (b"", b"Mine.", card + b"Mine.\n", card.replace(b"Recipe", b"My recipe"))
    for number, theirs in enumerate(edited):
        name = f"me/edited-{number}"
        files[name] = files["me/digits"] | {"README.md": theirs}
        result = run.push(name)
        assert result["kept"] == ["README.md"] and "README.md" not in result["files"]
        assert files[name]["README.md"] == theirs
        assert f"{name} has a README.md that was written or edited by hand" in caplog.text
    run.push("me/edited-0", overwrite=True)
    assert model_card.is_ours(files["me/edited-0"]["README.md"].decode())


def test_what_cannot_be_pushed_says_why(hub, token, tmp_path, command):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    code, _, err = command("push", tmp_path / "begun", "me/x")
    assert code == 1 and "has no checkpoint yet" in err
    run = vit_jax.load_run(_axial(tmp_path))
    with pytest.raises(CheckpointError, match="timm: .*huggingface: "):
        run.push("me/x")
    assert hub.asked == []


def _axial(tmp_path):
    """A checkpoint of a model that neither library has."""
    config = registry.model_config(
        "Axial-ViT-B/32", depth=1, width=16, heads=2, mlp_dim=16, image_size=64, num_classes=2
    )
    checkpoint = formats.LoadedCheckpoint(config, parameters(config))
    formats.write_checkpoint(checkpoint, tmp_path / "axial", "orbax")
    return tmp_path / "axial"


def test_the_card_of_any_checkpoint_has_the_evaluation_of_that_checkpoint(workdir, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copytree(workdir / "checkpoints" / "4", run / "checkpoints" / "4")
    (run / "result.json").write_text('{"step": 8, "accuracy": 0.875}')
    lines = [{"step": 4, "eval/accuracy": 0.125}, {"step": 4, "loss": 3.5}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "| accuracy | 0.125 |" in card_of(run / "checkpoints" / "4")
    (run / "metrics.jsonl").unlink()
    assert "## Evaluation" not in card_of(run)
    (run / "best.json").write_text('{"step": 4, "metric": "accuracy", "value": 0.25}')
    assert "| accuracy | 0.25 |" in card_of(run)
    # What was copied out of its run stands beside another's figures.
    shutil.copytree(run / "checkpoints" / "4", tmp_path / "out" / "my_model")
    (tmp_path / "result.json").write_text('{"step": 4, "accuracy": 0.5}')
    assert "## Evaluation" not in card_of(tmp_path / "out" / "my_model")


def card_of(path) -> str:
    return vit_jax.load_run(path).push("me/model", dry_run=True)["card"]


def test_a_card_has_few_rows_for_many_classes():
    metrics = {"mean_iou": 0.5, **{f"iou/{n}": n / 100 for n in range(30)}, "pq": 0.25}
    assert list(model_card._rows(metrics)) == [
        "| mean_iou | 0.5 |", "| iou of 30 classes | 0 to 0.29 |", "| pq | 0.25 |",
    ]  # fmt: skip
