"""Every recipe with every argument that it documents: it builds, fits on a mesh, and says what its
paper says.
"""

import functools
import itertools
import pathlib
import re
import types

import jax
import numpy as np
import pytest

from vit_jax import optim, recipes
from vit_jax.base import durations, patterns, schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import walk
from vit_jax.config import CHECKPOINT, config_class
from vit_jax.devices import meshes
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.objectives.networks import OWN, model_config_of
from vit_jax.recipes.user_files import load_config
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.upkeep import announce

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
# Besides those in the commands of the docstrings.
ARGUMENTS = {
    "vit_i21k": [
        "B/32",
        "L/16",
        "L/32",
        "B/16,augreg",
        "Ti/16,augreg",
        "B/8,medium2",
        "L/16,strong1",
    ],
    "vit_i1k": ["B/32", "S/16", "L/16", "S/32,augreg", "B/16,none", "B/16,strong2"],
    "vit_jft": ["B/16", "B/32", "L/32", "H/14"],
    "vit_s16_i1k": ["150", "300"],
    "deit": ["Ti", "B"],
    "feed_forward": ["Ti/16", "L/32"],
    "cross_vit": ["Ti", "18"],
    "deit3": ["B/16", "L/16", "H/14", "S/16,384", "L/16,384"],
    "deit3_i21k": ["S/16", "B/16", "H/14"],
    "rope_vit": ["B/16", "L/16", "S/16,learned"],
    "vit5": ["B/16", "L/16", "L/16,384"],
    "t2t_vit": ["7", "10", "12", "19", "24", "t-14", "t-19", "t-24"],
    "scaling_vit": [
        "s/28",
        "s/16",
        "Ti/16",
        "S/32",
        "S/16",
        "B/32",
        "B/28",
        "B/16",
        "L/16",
        "G/14",
    ],
    "finetune": [
        "cifar100",
        "imagenet2012",
        "oxford_iiit_pet",
        "oxford_flowers102",
        "imagenet2012,big_vision",
    ],
    "linear_probe": ["imagenet2012", "vtab/dtd"],
    "axial": ["ViT-B/32", "smoke-resnet"],
    "efficientnet": ["B7", "B3,noisy"],
    "speedrun": [
        "cifar10,muon",
        "cifar10,small_images",
        "cifar10,whole_images",
        "cifar10,growing_images",
    ],
    "bit_hyperrule": [
        "cifar100",
        "imagenet2012",
        "oxford_iiit_pet",
        "oxford_flowers102",
    ],
}
# Images to train on, by data set and split; ImageNet-21k and JFT as the ViT paper rounds them.
EXAMPLES = {
    "imagenet2012": {"train": 1_281_167, "train[:99%]": 1_268_355, "train[:98%]": 1_255_544},
    "imagenet21k": {"full[51200:]": 14_000_000},
    "jft300m": {
        "train": 303_000_000,
        "train[:30%]": 90_900_000,
        "train[:10%]": 30_300_000,
        "train[:3%]": 9_090_000,
    },
}


def recipe(name: str, *argument: str):
    config = load_config(":".join([str(RECIPES[name]), *argument]))
    if config.init_from == CHECKPOINT:  # which is not here
        config.init_from, config.model.name = "", config.model.name or "ViT-B/16"
        config.data.mean = config.data.std = (0.5, 0.5, 0.5)
        config.data.interpolation = "bilinear"
        if config.model.rope_rescale:
            config.model.update(dict(rope="centred", position="none"))
    return config


def sizes_of(config) -> dict[str, int]:
    examples = EXAMPLES.get(config.data.name, {}).get(config.data.train_split, 2000)
    return {"batch_size": config.batch_size, "examples_per_epoch": examples}


def build(config):
    return assemble(
        resolve(config),
        num_classes=config.model.num_classes or 10,
        examples_per_epoch=sizes_of(config)["examples_per_epoch"],
    )


def schedule_of(config) -> types.SimpleNamespace:
    """Of `build(config)` the model's config, the length of the run and its learning rate, which need no model;
    that `assemble` has the same is asserted below.
    """
    config, sizes = resolve(config), sizes_of(config)
    total = durations.steps(config.duration, **sizes)
    to_steps = functools.partial(durations.steps, total_steps=total, **sizes)
    return types.SimpleNamespace(
        model_config=model_config_of(config, config.model.num_classes or 10),
        total_steps=total,
        learning_rate=lambda step: (
            config.optim.lr
            * optim.schedule(config.optim, total_steps=total, to_steps=to_steps)(step)
        ),
    )


def body_of(config) -> str:
    """What decides which parameters a run has and how they are stored: all but the number of classes."""
    model = {
        k: v for k, v in config.model.items() if k not in ("num_classes", "dropout", "drop_path")
    }
    names = (
        "name",
        "freeze",
        "lr_rules",
        "weight_decay_rules",
        "layer_decay",
        "ema",
        "moment_dtype",
    )
    objective = config.objective.to_dict() | {"teacher": ""}
    parts = (config.optim[name] for name in names)
    data = config.data.image_size, config.data.views
    return repr((model, objective, *parts, *data, config.mesh.fsdp))


def documented(name: str) -> list[str]:
    """The arguments in the commands of a recipe's docstring."""
    return re.findall(rf"--config=configs/{name}\.py:(\S+)", RECIPES[name].read_text())


def cases(build: bool) -> list:
    """Each recipe alone, and with each of its arguments: those in `ARGUMENTS` are slow, and to build also those
    of the docstrings.
    """
    quick = [(name,) for name in RECIPES]
    given = [(name, argument) for name in RECIPES for argument in documented(name)]
    others = [(name, argument) for name, arguments in ARGUMENTS.items() for argument in arguments]
    quick, slow = (quick, given + others) if build else (quick + given, others)
    return quick + [pytest.param(case, marks=pytest.mark.slow) for case in slow]


def lr(assembly, step: int) -> float:
    return float(assembly.learning_rate(step))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """`teacher(classes)` is the path of a checkpoint."""
    folder = tmp_path_factory.mktemp("teachers")

    def make(classes: int) -> str:
        path = folder / f"{classes}.npz"
        if not path.exists():
            config = registry.model_config("ViT-mu/16", image_size=32, num_classes=classes)
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), registry.abstract(config)[1])
            formats.write_checkpoint(formats.LoadedCheckpoint(config, zeros), path, "official")
        return str(path)

    return make


def with_teacher(config, teacher):
    """The config, with a checkpoint for the teacher that the command line would name."""
    if config.objective.name == "features":
        config.objective.teachers = (teacher(10),)
    elif config.objective.teacher == "":
        config.objective.teacher = teacher(config.model.num_classes or 10)
    return config


def mesh_of_eight(config):
    sizes = {"data": 2, "fsdp": 4} if config.mesh.fsdp == 1 else {"data": -1}
    return meshes.make_mesh(config.mesh.to_dict() | sizes)


@pytest.mark.parametrize("case", cases(build=False), ids=":".join)
def test_a_recipe_resolves_and_its_batch_and_schedule_fit(case, teacher):
    config = with_teacher(recipe(*case), teacher)
    schedule, mesh = schedule_of(config), mesh_of_eight(config)
    assert config.batch_size % (config.accumulate * mesh.shape["data"] * mesh.shape["fsdp"]) == 0
    assert lr(schedule, schedule.total_steps - 1) <= np.float32(config.optim.lr)


# Bodies that were built; those that differ in their data and schedule alone are built once.
BUILT = set()


@pytest.mark.parametrize("case", cases(build=True), ids=":".join)
def test_a_recipe_builds_and_its_state_fits_on_eight_devices(case, teacher):
    config = with_teacher(recipe(*case), teacher)
    if (body := body_of(config)) in BUILT:
        return
    schedule, mesh = schedule_of(config), mesh_of_eight(config)
    BUILT.add(body)
    assembly = build(config)
    assert (assembly.model_config, assembly.total_steps) == (
        schedule.model_config, schedule.total_steps,
    )  # fmt: skip
    for step in (0, schedule.total_steps // 3, schedule.total_steps):
        assert lr(assembly, step) == lr(schedule, step)
    state = assembly.abstract_state(mesh)
    of_model = {name: tree for name, tree in state.params.items() if name != OWN}
    assert sum(p.size for p in jax.tree.leaves(of_model)) == registry.count_parameters(
        assembly.model_config
    )
    leaves = zip(patterns.names(of_model), jax.tree.leaves(of_model), strict=True)
    wide = ("mlp/up/kernel", "conv2/kernel", "conv3/kernel", "layers/expand/kernel")
    kernel = max((x for name, x in leaves if name.endswith(wide)), key=lambda x: x.size)
    parts = mesh.shape["fsdp"] if kernel.size >= config.mesh.fsdp_min_size else 1
    assert announce.unreached_options(assembly, state.params) == []
    assert np.prod(kernel.sharding.shard_shape(kernel.shape)) == kernel.size / parts


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_headed_by_its_command_and_names_only_fields_there_are(name):
    text = RECIPES[name].read_text()
    head = text.split('"""')[1]
    assert f"vit_jax train --config=configs/{name}.py" in head and "--workdir=" in head
    assert set(re.findall(r"--config\.([\w.]+\w)", text)) <= {
        field for field, _ in walk(config_class())
    }
    assert "get_config" in text and len(text.splitlines()) < 100


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (("vit_i21k", "B/61"), "there is no model 'B/61'; did you mean 'B/16'?"),
        (("vit_i21k", "B/16,ligth2"), "there is no level 'ligth2'; did you mean 'light2'?"),
        (("vit_i21k", "B/16,light2,3"), "3 parts, but the recipe takes MODEL,LEVEL"),
        (
            ("vit_i21k", "S/16"),
            "ViT Table 3 has B/16, B/32, L/16, L/32 on ImageNet-21k; for S/16 say a level",
        ),
        (("vit_i21k", "H/14,augreg"), "big_vision chose no level for H/14"),
        (("vit_i1k", "B-16"), "did you mean 'B/16'?"),
        (("vit_i1k", "B/8,augreg"), "big_vision chose no level for B/8"),
        (("deit3", "H/14,384"), "the authors have no H/14 at 384 pixels"),
        (("vit5", "S/16,384"), "the authors have no S/16 at 384 pixels"),
        (("best", "B/16,100"), "takes 100 v5e chip-hours or fewer. There is 83.8 % from 149 hours"),
        (("best", "B/16,many"), "HOURS = 'many' is no number of v5e chip-hours, such as 150"),
        (("best", "H/14"), "there is no size 'H/14'"),
        (("vit_jft", "H/16"), "there is no model 'H/16'; did you mean"),
        (("vit_s16_i1k", "200"), "there is no epochs '200'; did you mean '300'?"),
        (("scaling_vit", "g/16"), "there is no model 'g/16'; did you mean"),
        (("mixer", "S/16,imagenet2012"), "Mixer Table 4 has B, L on imagenet2012, and no S"),
        (("bit", "S,R50"), "there is no model 'R50'; did you mean 'R50x"),
        (("vit_jft", "R200x3"), "there is no model 'R200x3'; did you mean"),
        (("positions", "smoke,2d"), "there is no position '2d'"),
        (("positions", "smoke,learned,layer"), "there is no place 'layer'; did you mean 'layers'?"),
        (("feed_forward", "L/16"), "there is no size 'L/16'; did you mean 'B/16'?"),
        (("cross_vit", "15†"), "there is no size '15†'; did you mean '15'?"),
        (("finetune", "cifar"), "there is no task 'cifar'; did you mean 'cifar10'?"),
        (("finetune", "cifar10,bigvision"), "there is no source 'bigvision'; did you mean"),
        (
            ("finetune", "vtab/dtd,big_vision"),
            "transfer.py has no vtab/dtd, only cifar10, cifar100",
        ),
        (("finetune", "vtab"), "there is no task 'vtab'; did you mean 'vtab/"),
        (("finetune", "vtab/dtt"), "there is no task 'vtab/dtt'; did you mean 'vtab/dtd'?"),
        (("linear_probe", "cifar"), "there is no task 'cifar'; did you mean 'cifar10'?"),
        (("bit_hyperrule", "cars"), "'cars' is neither one of cifar10, cifar100"),
        (("bit_hyperrule", "5000,32"), "nor IMAGES,HEIGHTxWIDTH: 8144,700x483"),
    ],
    ids=str,
)
def test_an_unknown_argument_is_refused_with_the_nearest(case, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        recipe(*case)


def test_vit_on_imagenet21k_is_table_3_of_its_paper():
    config = recipe("vit_i21k", "B/16")
    assembly = schedule_of(config)
    assert assembly.total_steps == round(90 * 14_000_000 / 4096) == 307_617
    # Linear from 1e-3 after 10,000 steps of warm-up, to 1e-5.
    expected = {
        0: 0,
        5000: 5e-4,
        10_000: 1e-3,
        10_000 + 297_617: 1e-5,
        200_000: 1e-5 + 99e-5 * (1 - 190_000 / 297_617),
    }
    for step, value in expected.items():
        np.testing.assert_allclose(lr(assembly, step), value, rtol=1e-5, err_msg=str(step))
    assert (config.optim.weight_decay, config.optim.weight_decay_by, config.optim.clip) == (
        0.03,
        "lr",
        0.0,
    )
    assert (config.optim.b1, config.optim.b2, config.model.dropout) == (0.9, 0.999, 0.1)
    # Body and tanh layer of 86,389,248 parameters, 21,843 classes (ViT §3.1).
    body, tanh, head = 85_798_656, 768 * 768 + 768, 768 * 21_843 + 21_843
    assert registry.count_parameters(assembly.model_config) == body + tanh + head


def test_the_augreg_recipe_differs_only_by_its_level():
    none, light2 = recipe("vit_i21k", "B/16,none"), recipe("vit_i21k", "B/16,light2")
    augment = {"randaugment_layers": 2, "randaugment_magnitude": 10.0, "mixup": 0.2}
    none.augment.update(augment)
    assert none == light2 == recipe("vit_i21k", "B/16,augreg")
    assembly = schedule_of(light2)
    assert assembly.total_steps == round(300 * 14_000_000 / 4096)
    # Cosine, half-way between warm-up and end; decay 0.1 of the peak rate, as big_vision counts it.
    np.testing.assert_allclose(lr(assembly, (10_000 + assembly.total_steps) // 2), 5e-4, rtol=1e-3)
    assert (light2.optim.weight_decay, light2.optim.weight_decay_by, light2.optim.lr) == (
        1e-4,
        "schedule",
        1e-3,
    )
    assert light2.optim.moment_dtype == "bfloat16" and not light2.model.representation


@pytest.mark.parametrize(
    ("level", "values"),
    {
        "none": (0, 0, 0), "light1": (2, 0, 0), "light2": (2, 10, 0.2), "medium1": (2, 15, 0.2),
        "medium2": (2, 15, 0.5), "strong1": (2, 20, 0.5), "strong2": (2, 20, 0.8),
    }.items(),
)  # fmt: skip
def test_augmentation_levels_are_those_of_augreg(level, values):
    augment = recipe("vit_i1k", f"B/16,{level}").augment
    assert (augment.randaugment_layers, augment.randaugment_magnitude, augment.mixup) == values
    assert len(recipes.AUGMENTATION) == 7


@pytest.mark.parametrize(
    ("name", "levels"),
    {
        "vit_i1k": {"Ti/16": 0, "S/32": 15, "S/16": 15, "B/32": 15, "B/16": 15, "L/16": 15},
        "vit_i21k": {"Ti/16": 10, "S/32": 10, "S/16": 0, "B/32": 10, "B/16": 10, "L/16": 15},
    }.items(),
)
def test_augreg_takes_the_level_of_the_model(name, levels):
    for model, magnitude in levels.items():
        augment = recipe(name, f"{model},augreg").augment
        if name == "vit_i21k" and model in ("Ti/16", "S/32"):
            assert (augment.randaugment_layers, augment.mixup) == (0, 0.0)
        else:
            assert (augment.randaugment_layers, augment.randaugment_magnitude) == (2, magnitude)
    assert recipe("vit_i1k", "S/32,augreg").augment.mixup == 0.2
    assert recipe("vit_i1k", "S/16,augreg").augment.mixup == 0.5


def test_vit_on_imagenet_is_the_last_row_of_table_3():
    config = recipe("vit_i1k", "B/16")
    config.data.train_split = "train"
    assembly = schedule_of(config)
    assert assembly.total_steps == 93_835  # "93.8k"
    np.testing.assert_allclose(lr(assembly, 10_000), 3e-3, rtol=1e-6)
    np.testing.assert_allclose(lr(assembly, 93_835), 0, atol=1e-9)
    assert (config.optim.weight_decay, config.optim.clip, config.model.dropout) == (0.3, 1.0, 0.1)
    assert registry.count_parameters(assembly.model_config) == 87_158_248


@pytest.mark.parametrize(
    ("model", "steps", "rate"),
    [
        ("B/16", 517_822, 8e-4),
        ("B/32", 517_822, 8e-4),
        ("L/32", 517_822, 6e-4),
        ("L/16", 517_822, 4e-4),
        ("H/14", 1_035_645, 3e-4),
    ],
)
def test_vit_on_jft_is_table_3_of_its_paper(model, steps, rate):
    config = recipe("vit_jft", model)
    assembly = schedule_of(config)
    assert abs(assembly.total_steps - steps) <= 1
    np.testing.assert_allclose(lr(assembly, 10_000), rate, rtol=1e-6)
    middle = 10_000 + (assembly.total_steps - 10_000) // 2
    np.testing.assert_allclose(lr(assembly, middle), (rate + 1e-5) / 2, rtol=1e-4)
    assert (config.optim.weight_decay, config.model.dropout or 0.0, config.model.num_classes) == (
        0.1,
        0.0,
        18_291,
    )


@pytest.mark.parametrize(("epochs", "steps"), [("90", 111_477), ("150", 185_794), ("300", 371_588)])
def test_the_better_plain_vit_is_that_of_its_paper(epochs, steps):
    config = recipe("vit_s16_i1k", epochs)
    assembly = schedule_of(config)
    assert assembly.total_steps == round(int(epochs) * 1_268_355 / 1024) == steps
    np.testing.assert_allclose(lr(assembly, 10_000), 1e-3, rtol=1e-6)
    augment = config.augment
    assert (augment.randaugment_layers, augment.randaugment_magnitude, augment.mixup) == (
        2,
        10,
        0.2,
    )
    # No class token and no learned positions; a tanh layer and 1,000 classes on top of S/16's
    # 21,665,664.
    count = 21_665_664 - 384 - 197 * 384 + 384 * 384 + 384 + 384 * 1000 + 1000
    assert registry.count_parameters(assembly.model_config) == count


@pytest.mark.parametrize(
    ("size", "headless"), [("Ti", 5_524_416), ("S", 21_665_664), ("B", 85_798_656)]
)
def test_deit_is_that_of_its_paper(size, headless):
    config = recipe("deit", size)
    assembly = schedule_of(config)
    width = assembly.model_config.width
    assert registry.count_parameters(assembly.model_config) == headless + 1000 * (width + 1)
    assert assembly.total_steps == round(300 * 1_281_167 / 1024)
    warmup = round(5 * 1_281_167 / 1024)
    np.testing.assert_allclose(lr(assembly, warmup), 1e-3, rtol=1e-3)
    np.testing.assert_allclose(lr(assembly, assembly.total_steps), 1e-5, rtol=1e-3)
    assert config.data.repeats == 3 and config.objective.label_smoothing == 0.1
    assert (config.optim.weight_decay, config.optim.clip, config.model.drop_path) == (0.05, 0, 0.1)
    # trunc_normal_(std=0.02) of its code; its bounds of ±2 cut nothing.
    assert assembly.model_config.head_init == "normal"
    augment = config.augment
    assert (augment.mixup, augment.cutmix, augment.mix_switch, augment.erasing) == (
        0.8,
        1.0,
        0.5,
        0.25,
    )
    assert (augment.randaugment_kind, augment.randaugment_layers) == ("timm-inc1", 2)
    assert (augment.randaugment_magnitude, augment.randaugment_std) == (9, 0.5)


@pytest.mark.parametrize(
    ("size", "name", "rate", "decay"),
    [
        ("7", "T2T-ViT-7", 1e-3, 0.03),
        ("t-14", "T2T-ViT_t-14", 5e-4, 0.05),
        ("24", "T2T-ViT-24", 5e-4, 0.065),
    ],
)
def test_t2t_vit_is_that_of_its_authors(size, name, rate, decay):
    config = recipe("t2t_vit", size)
    assembly = schedule_of(config)
    assert (config.model.name, config.batch_size) == (name, 512)
    assert assembly.total_steps == round(310 * 1_281_167 / 512)
    warmup = round(10 * 1_281_167 / 512)
    np.testing.assert_allclose(lr(assembly, warmup), rate, rtol=1e-3)
    np.testing.assert_allclose(lr(assembly, assembly.total_steps), 1e-5, rtol=1e-3)
    assert (config.optim.weight_decay, config.optim.ema) == (decay, 0.99996)
    assert (config.model.drop_path, assembly.model_config.head_init) == (0.1, "normal")
    assert (config.augment.mixup, config.augment.cutmix, config.augment.erasing) == (0.8, 1, 0.25)


def test_positions_have_a_run_on_digits_for_every_network_of_table_8_of_the_vits_paper():
    rows = [("none", None), ("relative", "layers"), ("relative", "shared")]
    rows += itertools.product(("learned", "learned2d", "sincos2d"), ("stem", "layers", "shared"))
    found = {}
    for kind, place in rows:
        config = recipe("positions", ",".join(filter(None, ("smoke", kind, place))))
        assert config.data.name == "digits"
        model = resolve(config).model
        found[kind, place] = (model.position, model.position_at)
    assert len(found) == 12
    assert all(found[k, p] == (k, p or "auto") for k, p in found)
    paper, plain = recipe("positions", "B/16,learned2d,layers"), recipe("vit_jft", "B/16")
    plain.model.update({"position": "learned2d", "position_at": "layers"})
    assert paper == plain


@pytest.mark.parametrize(
    ("arguments", "steps", "rate", "values"),
    [
        ("B/16,imagenet2012", 300 * 1_268_355 / 4096, 1e-3, (0.1, 0.1, 2, 15, 0.5)),
        ("B/16,imagenet21k", 300 * 14_000_000 / 4096, 1e-3, (0.1, 0.1, 2, 10, 0.2)),
        ("L/16,imagenet21k", 300 * 14_000_000 / 4096, 1e-3, (0.1, 0.1, 2, 20, 0.5)),
        ("S/32,jft300m", 5 * 303_000_000 / 4096, 3e-3, (0.03, 0, 0, 0, 0)),
        ("H/14,jft300m", 14 * 303_000_000 / 4096, 1e-3, (0.03, 0, 0, 0, 0)),
    ],
)
def test_mixers_are_trained_as_table_4_of_their_paper_says(arguments, steps, rate, values):
    config = recipe("mixer", arguments)
    assembly, augment = schedule_of(config), config.augment
    assert assembly.total_steps == round(steps)
    np.testing.assert_allclose(lr(assembly, 10_000), rate, rtol=1e-6)
    np.testing.assert_allclose(lr(assembly, assembly.total_steps), 1e-5, rtol=1e-3)
    layers, magnitude = augment.randaugment_layers, augment.randaugment_magnitude
    assert (
        config.optim.weight_decay, config.model.drop_path, layers, magnitude, augment.mixup
    ) == values  # fmt: skip
    assert (config.optim.clip, config.batch_size) == (1, 4096)


@pytest.mark.parametrize(
    ("model", "name", "rate"),
    [
        ("R50x2", "BiT-R50x2", 1e-3),
        ("R152x1", "BiT-R152x1", 6e-4),
        ("R50+L/32", "R50+ViT-L/32", 2e-4),
        ("R50+B/16", "R50+ViT-B/16", 8e-4),
    ],
)
def test_resnets_and_hybrids_are_on_jft_what_vits_are(model, name, rate):
    config, vit = recipe("vit_jft", model), recipe("vit_jft", "B/16")
    assert config.model.name == name
    np.testing.assert_allclose(lr(schedule_of(config), 10_000), rate, rtol=1e-6)
    rest = {
        "model": 0,
        "optim": 0,
        "mesh": 0,
    }  # the mesh is where parameters lie: it follows the size
    assert {**config, **rest} == {**vit, **rest}
    assert config.model.head_bias == -10 and (config.model.representation or 0) in (0, 768, 1024)


@pytest.mark.parametrize(
    ("arguments", "epochs", "examples", "falls"),
    [
        ("S,R50x1", 90, 1_281_167, (30, 60, 80)),
        ("M,R101x3", 90, 14_000_000, (30, 60, 80)),
        ("L,R152x4", 40, 303_000_000, (10, 23, 30, 37)),
    ],
)
def test_bit_is_trained_as_its_paper_says(arguments, epochs, examples, falls):
    config = recipe("bit", arguments)
    assembly = schedule_of(config)
    epoch = examples / 4096
    assert assembly.total_steps == round(epochs * epoch)
    np.testing.assert_allclose(lr(assembly, 5000), 0.48, rtol=1e-6)
    for i, fall in enumerate(falls):
        found = [lr(assembly, round(fall * epoch) + step) for step in (-2, 2)]
        np.testing.assert_allclose(found, [0.48 / 10**i, 0.48 / 10 ** (i + 1)], rtol=1e-5)
    assert (config.optim.weight_decay, config.optim.weight_decay_by) == (1e-4, "gradient")
    assert (config.optim.name, config.optim.b1, config.optim.clip) == ("sgd", 0.9, 0)


@pytest.mark.parametrize("size", ["Ti/16", "B/16", "L/32"])
def test_feed_forward_only_networks_are_trained_as_deit_with_dropout(size):
    config, deit = recipe("feed_forward", size), recipe("deit", "S")
    deit.model.update({"name": f"FF-{size}", "dropout": 0.1})
    assert config == deit
    assert schedule_of(config).total_steps == round(300 * 1_281_167 / 1024)


def test_dynamic_vit_is_that_of_its_authors():
    config = recipe("dynamic_vit", "T2T-14")
    assembly = schedule_of(config)
    assert (config.model.name, config.batch_size) == ("DVT-T2T-ViT-14", 512)
    assert assembly.total_steps == round(310 * 1_281_167 / 512)
    np.testing.assert_allclose(lr(assembly, round(20 * 1_281_167 / 512)), 5e-4, rtol=1e-3)
    np.testing.assert_allclose(lr(assembly, assembly.total_steps), 1e-5, rtol=1e-3)
    assert (config.optim.weight_decay, config.optim.ema) == (0.05, 0.99996)
    assert (config.model.drop_path, config.objective.label_smoothing) == (0.1, 0.1)
    assert (config.augment.mixup, config.augment.cutmix, config.augment.erasing) == (0.8, 1, 0.25)
    smaller = recipe("dynamic_vit", "T2T-12")
    found = smaller.batch_size, smaller.optim.lr, smaller.optim.weight_decay
    assert found == (1024, 2e-3, 0.03)


@pytest.mark.parametrize(
    ("model", "headless", "batch"),
    [("g/14", 1_036_448_384, 16_384), ("G/14", 1_881_132_416, 16_384), ("B/16", 92_884_224, 4096)],
)
def test_scaling_vit_is_that_of_its_paper(model, headless, batch):
    config = recipe("scaling_vit", model)
    assembly = build(config)
    width = assembly.model_config.width
    assert registry.count_parameters(assembly.model_config) == headless + 29_593 * (width + 1)
    assert (config.batch_size, assembly.total_steps) == (batch, 1_000_000)
    for step, value in {
        10_000: 8e-4, 20_000: 8e-4 / 2**0.5, 950_000: 8e-4 / 95**0.5, 975_000: 8e-4 / 97.5**0.5 / 2, 1_000_000: 0,
    }.items():  # fmt: skip
        np.testing.assert_allclose(
            lr(assembly, step), value, rtol=1e-5, atol=1e-12, err_msg=str(step)
        )
    names = patterns.names(
        assembly.abstract_state(meshes.make_mesh({"data": -1, "fsdp": 1, "tensor": 1})).params
    )
    rules = config.optim.weight_decay_rules
    decay = {
        name: config.optim.weight_decay * patterns.first_match(rules, name, 0.0) for name in names
    }
    assert decay["head/kernel"] == 3.0 and decay["encoder/layers/mlp/up/kernel"] == 0.03
    assert decay["head/bias"] == decay["position"] == decay["pool/probe"] == 0.0


def test_adafactor_keeps_the_state_of_scaling_vit_small():
    assembly = build(recipe("scaling_vit", "g/14"))
    state = assembly.abstract_state(meshes.make_mesh({"data": 1, "fsdp": 8, "tensor": 1}))
    count = sum(p.size for p in jax.tree.leaves(state.params))
    assert (
        2 < sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state)) / count < 2.1
    )
    assert (
        sum(p.size for p in jax.tree.leaves(state.params) if p.sharding.is_fully_replicated)
        < 0.01 * count
    )


@pytest.mark.parametrize(
    ("task", "train", "steps", "warmup", "rate"),
    [
        ("cifar10", "train[:98%]", 10_000, 500, 0.01),
        ("cifar100", "train[:98%]", 10_000, 500, 0.03),
        ("imagenet2012", "train[:99%]", 20_000, 500, 0.03),
        ("oxford_iiit_pet", "train[:90%]", 500, 100, 0.03),
        ("oxford_flowers102", "train[:90%]", 500, 100, 0.03),
        *((task, "train800+val200", 2500, 200, 0.01) for task in ("vtab/dtd", "vtab/kitti")),
    ],
)
def test_fine_tuning_is_table_4_of_the_vit_paper(task, train, steps, warmup, rate):
    config = recipe("finetune", task)
    assembly = schedule_of(config)
    assert (config.data.train_split, assembly.total_steps) == (train, steps)
    np.testing.assert_allclose(
        [lr(assembly, warmup), lr(assembly, (warmup + steps) // 2)], [rate, rate / 2], rtol=1e-6
    )
    optim = config.optim
    assert (optim.name, optim.b1, optim.weight_decay, optim.clip) == ("sgd", 0.9, 0.0, 1.0)
    assert (config.batch_size, config.data.image_size, config.data.eval_crop) == (
        512,
        384,
        "resize",
    )
    cut = ("resize", False) if task.startswith("vtab/") else ("inception", True)
    assert config.data.name == task
    assert (config.data.train_crop, config.augment.flip) == cut


def test_fine_tuning_keeps_momenta_in_bfloat16_and_no_tanh_layer():
    config = recipe("finetune", "cifar10")
    state = build(config).abstract_state(meshes.make_mesh(config.mesh))
    momenta = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert {x.dtype.name for x in momenta} == {"bfloat16"}
    assert len(momenta) == len(jax.tree.leaves(state.params))
    assert "representation" not in state.params


@pytest.mark.parametrize(
    ("task", "rate", "crop"),
    [
        ("cifar10", 0.003, "random"),
        ("cifar100", 0.01, "random"),
        ("imagenet2012", 0.03, "inception"),
        ("oxford_iiit_pet", 0.003, "inception"),
        ("oxford_flowers102", 0.003, "inception"),
    ],
)
def test_big_vision_fine_tunes_with_its_own_rates_and_crops(task, rate, crop):
    config = recipe("finetune", f"{task},big_vision")
    data = config.data
    assert (config.optim.lr, data.train_crop, data.resize) == (rate, crop, 448)
    assert (data.eval_crop, data.eval_resize, data.image_size) == ("central", 448, 384)


def test_a_linear_probe_trains_the_head_and_nothing_else():
    assembly = build(recipe("linear_probe", "cifar10"))
    state = assembly.abstract_state(meshes.make_mesh({"data": -1, "fsdp": 1, "tensor": 1}))
    # Two moments of 768 x 10 weights and 10 biases are all that is kept.
    moments = [x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sorted(moments) == [(10,), (10,), (768, 10), (768, 10)]
    assert recipe("linear_probe", "vtab/dtd").data == recipe("finetune", "vtab/dtd").data


@pytest.mark.parametrize(
    ("argument", "steps", "warmup", "falls", "mixup", "resize", "size"),
    [
        ("cifar10", 10_000, 500, (3000, 6000, 9000), 0.1, 160, 128),
        ("cifar100", 10_000, 500, (3000, 6000, 9000), 0.1, 160, 128),
        ("imagenet2012", 20_000, 500, (6000, 12_000, 18_000), 0.1, 448, 384),
        ("oxford_iiit_pet", 500, 100, (200, 300, 400), 0.0, 448, 384),
        ("oxford_flowers102", 500, 100, (200, 300, 400), 0.0, 448, 384),
        ("19999,95x96", 500, 100, (200, 300, 400), 0.0, 160, 128),
        ("20000,96x96", 10_000, 500, (3000, 6000, 9000), 0.1, 448, 384),
        ("499999,32x32", 10_000, 500, (3000, 6000, 9000), 0.1, 160, 128),
        ("500000,32x32", 20_000, 500, (6000, 12_000, 18_000), 0.1, 160, 128),
    ],
)
def test_the_hyperrule_is_that_of_the_bit_paper(
    argument, steps, warmup, falls, mixup, resize, size
):
    config = recipe("bit_hyperrule", argument)
    assembly = schedule_of(config)
    assert (assembly.total_steps, config.augment.mixup) == (steps, mixup)
    assert (config.data.resize, config.data.image_size, config.batch_size) == (resize, size, 512)
    np.testing.assert_allclose(lr(assembly, warmup // 2), 0.0015, rtol=1e-6)
    for n, fall in enumerate(falls):
        before_and_after = [lr(assembly, fall - 1), lr(assembly, fall)]
        np.testing.assert_allclose(before_and_after, [0.003 / 10**n, 0.0003 / 10**n], rtol=1e-5)
    assert (config.optim.name, config.optim.b1, config.optim.weight_decay) == ("sgd", 0.9, 0.0)


def test_cross_vit_is_that_of_its_paper():
    config = recipe("cross_vit", "18-dagger")
    assembly = schedule_of(config)
    assert registry.count_parameters(assembly.model_config) == 44_266_976
    steps = 1_281_167 / 4096
    assert (config.batch_size, assembly.total_steps) == (4096, round(300 * steps))
    warmup = round(30 * steps)
    np.testing.assert_allclose(
        [lr(assembly, warmup), lr(assembly, assembly.total_steps)], [0.004, 1e-5], rtol=1e-5
    )
    assert (config.optim.weight_decay, config.model.drop_path, config.data.repeats) == (
        0.05,
        0.1,
        3,
    )
    assert recipe("cross_vit", "15").data.repeats == 1


def test_a_folder_of_images_needs_nothing_but_its_path():
    config = recipe("folder")
    assert (config.data.name, config.data.path, config.model.num_classes) == ("folder", "", None)
    assert schedule_of(config).total_steps == 100 * 2000 / 64


def test_a_run_begun_before_recipes_said_how_it_starts_may_go_on():
    """What acts on the first state alone is nothing to a run that resumes."""
    assert {"init_channels", "model.head_init"} <= set(schema.may_change(config_class()))
