"""The guide's files as a user would run them, from outside of the package: nothing but the pages is used."""

import ast
import dataclasses
import json
import pathlib
import re

import cv2
import jax
import numpy as np
import pytest

import vit_jax
from tests.repeats import slow_unless
from vit_jax import evaluation, objectives
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.checkpoints import reading
from vit_jax.data import sources
from vit_jax.data.augmentation import own, patches, pipeline
from vit_jax.inspection import run as inspecting
from vit_jax.models import positions, registry
from vit_jax.models.contract import PatchBatch
from vit_jax.optim import options, preconditioners, schedules
from vit_jax.recipes import user_files
from vit_jax.training.actions import ACTIONS
from vit_jax.training.assembly import resolve
from vit_jax.training.verdicts import EndRun

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
BLOCKS = re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(), re.S)
FILES = {path.stem: path.read_text() for path in sorted((DOCS / "extending").glob("*.py"))}
GUESTS = ("my_data", "my_evaluator", "my_model", "my_objective", "my_optimizer")
SLOW = "my_term"  # tests/objectives/test_sum.py has its loss
TABLES = (
    objectives.OBJECTIVES, evaluation.EVALUATORS, sources.OPENERS, preconditioners.PRECONDITIONERS,
    positions.KINDS, ACTIONS, options.SCHEDULES, schedules.SHAPES, own.AUGMENTATIONS,
)  # fmt: skip
TINY = {"width": 32, "depth": 1, "heads": 2, "mlp_dim": 32}
CHANGES = {
    "duration": "2 steps", "batch_size": 32, "optim.warmup": "1 steps", "optim.ema": 0.9, "log.tensorboard": False,
    "audit.every": 0,
}  # fmt: skip
# The registered files of a run, as `config.py` in its folder had them up to version 0.2.
EARLIER = """from vit_jax.config import default_config
from vit_jax.user_files import register

register({path!r})


def get_config():
    config = default_config()
    config.model.name = 'Pool-Ti/4'
    return config
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compilation_cache):
    path = tmp_path_factory.mktemp("mine")
    CHANGES["compilation_cache"] = compilation_cache
    for name, code in FILES.items():
        (path / f"{name}.py").write_text(code)
    families, tables = list(registry.GUESTS), [dict(table) for table in TABLES]
    quantities = list(inspecting.QUANTITIES)
    yield path
    registry.GUESTS[:], inspecting.QUANTITIES[:] = families, quantities
    for table, was in zip(TABLES, tables, strict=True):
        table.clear()
        table.update(was)


def tiny(folder: pathlib.Path, name: str):
    """A page's config, of a few steps of a small model."""
    config = vit_jax.load_config(str(folder / f"{name}.py"))
    model = {"name": "Pool-Ti/4"} if name == "my_model" else TINY
    config.update_from_flattened_dict(CHANGES | {f"model.{key}": x for key, x in model.items()})
    return config


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """(result, folder) of a run of each page, by the name of its file."""
    found = {}

    def run(name: str):
        if name not in found:
            workdir = tmp_path_factory.mktemp(name)
            found[name] = vit_jax.train(tiny(folder, name), workdir), workdir
        return found[name]

    return run


def all_but_the_objective(folder: pathlib.Path):
    """The config of a run of a page's model with the data, the evaluator and the optimizer of the others."""
    config = tiny(folder, "my_model")
    for name, section in (("my_data", "data"), ("my_evaluator", "eval"), ("my_optimizer", "optim")):
        config[section] = tiny(folder, name)[section]
    return config


@pytest.fixture(scope="module")
def together(folder, tmp_path_factory):
    """(result, folder) of that run."""
    workdir = tmp_path_factory.mktemp("together")
    return vit_jax.train(all_but_the_objective(folder), workdir), workdir


def test_the_pages_train_together_and_their_model_is_read_again(together):
    result, workdir = together
    assert result["step"] == 2 and result["examples"] == 128
    assert 0 <= result["balanced/lowest"] <= result["balanced/mean"] <= 1
    assert result["best"]["step"] == 2
    run = vit_jax.load_run(workdir)
    assert run.classes == ("darker", "brighter")
    output = run.model(np.zeros((1, 32, 32, 3), np.float32), capture=True)
    assert output.features.shape == (1, 32)
    assert output.intermediates["mixed"].shape == (2, 1, 64, 32)


# Of the others a quick test trains together.
@pytest.mark.parametrize("name", slow_unless(["my_objective"], [*GUESTS, SLOW]))
def test_the_file_of_a_page_trains_and_its_model_is_read_again(runs, name):
    result, workdir = runs(name)
    assert result["step"] == 2
    assert np.isfinite(result["loss" if name == "my_objective" else "accuracy"])
    assert ("balanced/lowest" in result) == (name == "my_evaluator")
    assert "objective" not in reading.read_weights(workdir).params
    model = vit_jax.load_run(workdir).model
    images = np.random.default_rng(0).standard_normal((1, 32, 32, 3), np.float32)
    assert model(images).features.shape == (1, 32)


def test_a_run_with_a_pages_optimizer_resumes_with_its_state(folder, together):
    result, workdir = together
    resumed = vit_jax.train(all_but_the_objective(folder), workdir)
    assert resumed["step"] == 2 and resumed["accuracy"] == result["accuracy"]


def test_operations_of_a_family_without_a_formula_are_counted_in_its_program(folder):
    vit_jax.load_config(str(folder / "my_model.py"))
    config = registry.model_config("Pool-Ti/4", image_size=32, num_classes=10)
    assert config.block_flops() is None and config.flops() is None
    patches, mlps, head = 2 * 64 * 48 * 32, 2 * (2 * 2 * 64 * 32 * 64), 2 * 32 * 10
    assert registry.count_flops(config) == patches + mlps + head


def test_the_recipe_that_a_run_writes_registers_its_files(folder, runs):
    _, workdir = runs("my_objective")
    text = (workdir / "config.py").read_text()
    assert f"register_file({str(folder / 'my_objective.py')!r})" in text
    assert imported(text) == {"vit_jax.extend"}
    assert user_files.registered_by(workdir / "config.py") == [str(folder / "my_objective.py")]
    assert vit_jax.load_config(str(workdir / "config.py")).objective.name == "rotation"


def test_a_recipe_that_an_earlier_version_wrote_registers_its_files(folder, tmp_path):
    recipe, path = tmp_path / "config.py", str(folder / "my_model.py")
    recipe.write_text(EARLIER.format(path=path))
    assert user_files.registered_by(recipe) == [path]
    assert vit_jax.load_config(str(recipe)).model.name == "Pool-Ti/4"


def test_a_guests_checkpoint_read_without_its_file_names_it(folder, together, command, monkeypatch):
    _, workdir = together
    guests = [one for one in registry.GUESTS if "Pool-Ti/4" in one.VARIANTS]
    assert guests
    monkeypatch.setattr(registry, "GUESTS", [])
    for name in ("evaluate", "show", "predict"):
        arguments = [workdir] if name == "show" else [f"--checkpoint={workdir}"]
        code, _, err = command(name, *arguments, *(["a.jpg"] if name == "predict" else []))
        assert code == 2, err
        assert "'Pool-Ti/4'" in err and f"--register={folder / 'my_model.py'}" in err


def test_models_lists_a_guest_as_markdown_too(folder, command, monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", LazyTable({}))  # counting all others takes long
    code, out, err = command("models", "--markdown", f"--register={folder / 'my_model.py'}")
    assert code == 0 and "| Pool-S/4 |" in out, err


def test_a_checkpoint_is_judged_by_a_guests_evaluator(folder, finished_run, command):
    workdir = finished_run.workdir
    code, out, err = command(
        "evaluate", f"--checkpoint={workdir}", f"--register={folder / 'my_evaluator.py'}",
        "--config.eval.evaluators=('balanced',)",
    )  # fmt: skip
    assert code == 0 and "balanced/lowest" in out, err


RIGHT = "        best = examples.logits.argmax(-1)\n"
WRONG = {
    "signature": ("def score(self, examples: Logits)", "def score(self, logits, targets)", "targets"),
    "two values": (RIGHT, f"        logits, targets = examples\n{RIGHT}", "too many values to unpack"),
    "shape": ("[:, None], axis=-1", ", axis=-1", "dimension"),
    "no numbers": ('float(np.mean(accuracies))', 'accuracies', "the metric 'mean' is"),
    "names": ('return "mean", "lowest"', 'return ("mean",)', "metrics() gives ('mean',)"),
    "call": ("def metrics(self)", "def __call__(self, trained): ...\n\n    def metrics(self)", "too many positional"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_evaluator_ends_a_run_before_it_starts(folder, tmp_path, mistake):
    before, after, message = WRONG[mistake]
    code = FILES["my_evaluator"]
    assert before in code
    (tmp_path / "wrong_evaluator.py").write_text(code.replace(before, after))
    config = tiny(tmp_path, "wrong_evaluator")
    with pytest.raises(ConfigError) as error:
        vit_jax.train(config, tmp_path / "run")
    text = str(error.value)
    assert "'balanced' (Balanced of wrong_evaluator.py) fails before the run" in text
    assert message in text and "Expected: " in text
    assert not (tmp_path / "run").exists()


FEATURES = '''
import numpy as np
from vit_jax.extend import FeatureEvaluator, load_config, register_evaluator

class Length(FeatureEvaluator):
    def score(self, features, labels):
        return {"mean": np.linalg.norm(features, axis=-1).mean(), "examples": len(labels)}

register_evaluator("length", Length)

def get_config():
    config = load_config("digits")
    config.eval.evaluators = ("length",)
    return config
'''  # fmt: skip


def test_an_evaluator_of_features_judges_all_examples(folder, tmp_path):
    (tmp_path / "length.py").write_text(FEATURES)
    config = all_but_the_objective(folder)
    config.eval = tiny(tmp_path, "length").eval
    result = vit_jax.train(config, tmp_path / "run")
    assert result["length/examples"] == 128 and result["length/mean"] > 0


def test_a_guests_quantity_is_on_the_page_of_an_inspection(
    folder, finished_run, monkeypatch, tmp_path
):
    workdir = finished_run.workdir
    monkeypatch.setattr(inspecting, "QUANTITIES", [])
    user_files.register(str(folder / "my_quantity.py"))
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((32, 32, 3), np.uint8))
    result = inspecting.inspect(workdir, [str(tmp_path / "a.png")], tmp_path / "out")
    (text,) = result["sections"].values()
    count = len(jax.tree.leaves(reading.read_weights(workdir).params))
    assert f"The largest of {count} parameters" in text


def test_a_guests_action_writes_among_the_metrics_until_it_ends_the_run(folder, tmp_path):
    config = tiny(folder, "my_action")
    config.log.every = "1 steps"
    log_memory = ACTIONS["memory"]

    class LogOnce(log_memory):
        def after_step(self, progress):
            super().after_step(progress)
            raise EndRun("one step is enough")

    ACTIONS["memory"] = LogOnce
    result = vit_jax.train(config, tmp_path)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    (used,) = [line["memory/most_gib"] for line in lines if "memory/most_gib" in line]
    assert 0.05 < used < 100 and result["step"] == 1
    saved = reading.newest_description(tmp_path)
    assert saved["ended"] == "one step is enough"
    assert saved["actions"] == {"memory": {"most": used}}
    ACTIONS["memory"] = log_memory


def test_an_action_with_other_parameters_is_refused_before_the_first_step(
    folder, tmp_path, monkeypatch
):
    config = tiny(folder, "my_action")
    monkeypatch.setattr(ACTIONS["memory"], "state", lambda self: {})
    with pytest.raises(ConfigError, match="'memory': its method state is called with .progress."):
        vit_jax.train(config, tmp_path / "run")


def test_positions_without_a_table_are_refused_by_their_name(folder):
    positions.register("nothing", type("Nothing", (positions.Position,), {}))
    with pytest.raises(
        ConfigError, match="model.position=nothing: its class has no method `table`"
    ):
        vit_jax.create_model("ViT-mu/8", position="nothing", image_size=16)(
            np.zeros((1, 16, 16, 3))
        )


def test_a_guests_positions_are_right_in_every_layout(folder):
    config = tiny(folder, "my_position")
    assert config.model.position == "rings"
    model_config = registry.model_config("ViT-mu/8", position="rings", image_size=(32, 24))
    rings = positions.of(model_config)
    rows, columns = np.divmod(np.arange(12), 3)
    expected = np.hypot((rows + 0.5) / 4 - 0.5, (columns + 0.5) / 3 - 0.5)
    table = np.asarray(rings.table(None, np.float32))[0]
    np.testing.assert_allclose(table[:, 0], np.sin(2 * np.pi * expected), atol=1e-6)
    # Spread over the patches in steps of other sizes, and of an image of its own size.
    spread = np.asarray(rings.table(None, np.float32, (8, 6)))[0]
    np.testing.assert_allclose(spread, table, atol=1e-5)
    native = PatchBatch(np.zeros((1, 12, 1)), np.array([[3, 4]], np.int32))
    turned = np.asarray(rings.at(None, table[None], native))[0]
    assert turned.shape == table.shape
    np.testing.assert_allclose(turned[1], table[3], atol=1e-6)  # (0, 1) of 3 × 4 is (1, 0) of 4 × 3
    assert vit_jax.create_model("ViT-mu/8", position="rings", image_size=32)


def test_a_guests_augmentation_changes_every_layout_of_images_or_is_refused(folder, monkeypatch):
    config = resolve(tiny(folder, "my_augmentation"))
    off = dict.fromkeys(("mixup", "cutmix", "erasing", "color_jitter"), 0.0)
    noisy = dataclasses.replace(config.augment, flip=False, **off)
    plain = dataclasses.replace(noisy, own=())
    pixels = np.random.default_rng(0).integers(60, 200, (64, 8, 8, 3), np.uint8)
    normalization = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}
    key = jax.random.key(0)

    def strengths(function, images, **more):
        """The standard deviation of what is added to each image, in 255."""
        changed, unchanged = (
            function(images, {}, key, choice, **normalization, **more)[0]
            for choice in (noisy, plain)
        )
        tell = lambda x: np.asarray(getattr(x, "patches", x)).reshape(64, -1)  # noqa: E731
        return (tell(changed) - tell(unchanged)).std(axis=1)

    native = PatchBatch(pixels.reshape(64, 4, 48), np.full((64, 2), 2, np.int32))
    for found in (
        strengths(pipeline.augment, pixels),
        strengths(pipeline.augment, native, layout=patches.Patches(3)),
    ):
        assert 6 < found.mean() < 14 and found.min() < 4 and found.max() > 15
    monkeypatch.setattr(type(own.AUGMENTATIONS["noise"]), "needs_whole_images", True)
    with pytest.raises(ConfigError, match="config.augment.own has 'noise'.*needs_whole_images"):
        pipeline.check_native_sizes(noisy, "config.data.native_tokens")
    monkeypatch.setattr(type(own.AUGMENTATIONS["noise"]), "moves_pixels", True)
    with pytest.raises(ConfigError, match="'noise', which moves pixels.*`move`"):
        pipeline.check_masks(noisy)
    with pytest.raises(
        ConfigError, match="no augmentation 'noisy' is registered; did you mean 'noise'"
    ):
        pipeline.check_augmentation(dataclasses.replace(noisy, own=("noisy",)), 3)


def test_a_guests_schedule_falls_to_its_end_and_an_option_that_it_does_not_read_is_refused(folder):
    config = resolve(tiny(folder, "my_schedule"))
    optim = dataclasses.replace(config.optim, warmup="4 steps")
    steps = {"total_steps": 20, "to_steps": lambda duration: int(duration.split()[0])}
    relative = schedules.schedule(optim, **steps)
    end = optim.lr_end / optim.lr
    expected = [0.0, 0.5, 1.0, end + (1 - end) * (1 - np.sqrt(0.5)), end]
    found = [float(relative(step)) for step in (0, 2, 4, 12, 20)]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    optim = dataclasses.replace(optim, cooldown="2 steps")
    with pytest.raises(ConfigError, match="cooldown has no use with the early schedule"):
        schedules.schedule(optim, **steps)


def test_the_guides_callback_ends_a_run(folder, monkeypatch, tmp_path):
    (code,) = [code for code in BLOCKS if "callbacks=" in code]
    monkeypatch.chdir(tmp_path)
    config = all_but_the_objective(folder)
    config.eval.every = "1 steps"
    monkeypatch.setattr(vit_jax, "load_config", lambda name: config, raising=False)
    assert "> 0.99" in code
    exec(code.replace("> 0.99", "> -1.0"), {})
    assert reading.find_checkpoint(tmp_path / "DIR").name == "1"  # of 2 steps


def imported(code: str) -> set[str]:
    """The modules of the package that a file imports from."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return {name for name in names if name.split(".")[0] == "vit_jax"}


def test_the_guide_has_a_file_for_each_guest_which_imports_the_public_surface_alone():
    assert set(FILES) == {
        *GUESTS,
        SLOW,
        "my_action",
        "my_augmentation",
        "my_position",
        "my_quantity",
        "my_schedule",
    }
    assert all(imported(code) == {"vit_jax.extend"} for code in FILES.values())
