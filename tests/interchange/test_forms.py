"""Every command that takes a checkpoint, with every form of one that docs/checkpoints.md names."""

import itertools
import shutil

import pytest
from etils import epath

from tests.integration.conftest import write_image
from tests.repeats import slow_unless
from vit_jax.interchange import loading
from vit_jax.serving.limits import Limits
from vit_jax.serving.run import serve

COMMANDS = {
    "show": ("show", "{}"),
    "convert": ("convert", "{}", "{out}", "--to=orbax"),
    "push": ("push", "{}", "me/other", "--dry_run"),
    "predict": ("predict", "--checkpoint={}", "{image}", "--csv"),
    "evaluate": ("evaluate", "--checkpoint={}", "--config.data.name=digits"),
    "export": ("export", "--checkpoint={}", "--to=stablehlo", "--out={out}.zip"),
    "inspect": ("inspect", "--checkpoint={}", "--images={image}", "--out={out}"),
    "exits": ("exits", "--checkpoint={}", "--budgets=1", "--config.data.name=digits"),
}  # fmt: skip
FORMS = ("WORKDIR", "best", "last", "@STEP", "copied", "folder", "file", "hub", "bucket")
QUICK = [
    ("convert", "@STEP"), ("exits", "copied"), ("export", "last"), ("push", "best"),
    ("show", "hub"), ("show", "bucket"), ("predict", "file"),
]  # fmt: skip


class Served(Exception):
    """Ends a server that takes requests."""


@pytest.fixture(scope="module")
def run(finished_run, tmp_path_factory):
    """A run whose best evaluation was its last."""
    workdir = tmp_path_factory.mktemp("forms") / "run"
    shutil.copytree(finished_run.workdir, workdir)
    (workdir / "best.json").write_text('{"step": 12, "metric": "accuracy", "value": 0.5}')
    return workdir


@pytest.fixture
def form(run, hub, tmp_path, request):
    """`form(name)`: the argument that names the run's last checkpoint so."""

    def make(name: str) -> str:
        checkpoint = run / "checkpoints" / "12"
        match name:
            case "WORKDIR":
                return str(run)
            case "best" | "last":
                return str(run / name)
            case "@STEP":
                return f"{run}@12"
            case "copied":
                return str(shutil.copytree(checkpoint, tmp_path / "my_model"))
            case "bucket":
                target = epath.Path(request.getfixturevalue("bucket")) / "my_model"
                for path in checkpoint.rglob("*"):
                    if path.is_file():
                        (target / path.relative_to(checkpoint)).write_bytes(path.read_bytes())
                return str(target)
            case "file":
                loading.convert(run, tmp_path / "m.safetensors", "timm", activation="gelu")
                return str(tmp_path / "m.safetensors")
        loading.convert(run, tmp_path / "model", "timm")
        if name == "hub":
            files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
            hub.repositories["me/model"] = files
            return "hf://me/model"
        return str(tmp_path / "model")

    return make


@pytest.mark.parametrize(
    ("name", "of_checkpoint"), slow_unless(QUICK, [*itertools.product(COMMANDS, FORMS)])
)
def test_every_command_takes_every_form_of_a_checkpoint(
    command, form, tmp_path, name, of_checkpoint
):
    write_image(tmp_path / "x.png")
    places = {"out": tmp_path / "out", "image": tmp_path / "x.png"}
    path = form(of_checkpoint)
    code, out, err = command(*(part.format(path, **places) for part in COMMANDS[name]))
    if name == "exits":  # the form is understood, and the model has none
        assert code == 2 and "exit" in err and "does not exist" not in err
        return
    assert code == 0, err
    assert out


@pytest.mark.slow
@pytest.mark.parametrize("of_checkpoint", FORMS)
def test_every_form_of_a_checkpoint_is_served(form, of_checkpoint):
    def announce(result):
        assert result["url"].startswith("http://")
        raise Served

    with pytest.raises(Served):
        serve(
            form(of_checkpoint), host="127.0.0.1", port=0, batch_size=1, limits=Limits(), announce=announce
        )  # fmt: skip
