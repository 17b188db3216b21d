"""Every option reaches what it claims to: of two runs that differ in it, each group of parameters that it is for
differs, alone and beside what other parts of a run do to parameters; or the second run is refused or warned about.

Parameters are compared array by array, those of a stack layer by layer.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import optax
import pytest

from tests.models.conftest import parameters
from tests.training import tiny_objectives
from tests.training.option_cases import OF_STEPS, OPTIM, OTHERS, Case
from vit_jax.base import patterns, schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import Optim, default_config
from vit_jax.interchange import formats
from vit_jax.optim.options import ELEMENTWISE, is_of_matrices
from vit_jax.training.assembly import assemble, resolve
from vit_jax.training.upkeep import announce

UPDATES, TOTAL, LATE, EXAMPLES = 3, 6, 1, 80
# What changes nothing by its nature, and why.
UNCHANGING = {
    "optim.matrix_dtype": "CPUs multiply in float32 whatever it says: tests/optim/test_preconditioners.py",
    "dino.gram_teacher": "read when a run begins: tests/objectives/test_gram.py",
    "dino.collapse_steps": "when to warn: tests/objectives/test_dino.py",
    "distill.teacher": "read when a run begins: tests/objectives/test_distill.py",
    "image_text.tokenizer": "makes the tokens of a batch: tests/objectives/test_image_text.py",
    "image_text.tokenizer_digest": "compared when a run begins",
    "image_text.text_pad": "written into the tokens of a batch",
    "sum.tokenizer": "as of image_text",
    "sum.tokenizer_digest": "as of image_text",
    "sum.text_pad": "as of image_text",
    "segmentation.enlarge": "for predictions: tests/objectives/test_segmentation.py",
    "eval.batch_size": "evaluations do not depend on it: tests/evaluation",
    "checkpoint.keep_for_followers": "what others may hold: tests/integration/test_follow.py",
    "checkpoint.max_failures": "of saves that fail: tests/integration/test_save_faults.py",
    "checkpoint.commit_minutes": "of processes that wait: tests/integration/test_pods.py",
}
MODEL = {
    "model.name": "ViT-mu/8", "model.width": 16, "model.depth": 2, "model.heads": 2, "model.mlp_dim": 24,
    "model.head_init": "normal", "data.image_size": 16, "data.mean": (0.5,) * 3, "data.std": (0.5,) * 3,
    "data.interpolation": "bilinear", "augment.flip": False, "batch_size": 8, "duration": f"{TOTAL} steps",
}  # fmt: skip
USUAL = {"lr": 0.01, "schedule": "constant", "clip": 0.0}
FROZEN = ("embedding/.*", "encoder/layers[:1]/.*", "encoder/norm/.*")
TERMS = (("supervised", {}), ("masked_patches", {"start": f"{LATE} steps"}))
SETTINGS = {
    "alone": {},
    "adapters": {"lora.lora_rank": 2},
    "frozen parts": {"optim.freeze": FROZEN},
    "accumulation": {"accumulate": 2},
    "late term": {"objective.name": "sum", "objective.terms": TERMS},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The checkpoint that adapters are for."""
    folder = tmp_path_factory.mktemp("base") / "model"
    model_config = assemble(
        resolve(config_of({})), num_classes=3, examples_per_epoch=EXAMPLES
    ).model_config
    model = formats.LoadedCheckpoint(model_config, parameters(model_config))
    formats.write_checkpoint(model, folder, "orbax")
    return folder


def config_of(fields: dict, **optim):
    config = default_config()
    config.update_from_flattened_dict(MODEL)
    config.objective.name = fields.get("objective.name", "supervised")
    config.update_from_flattened_dict(fields)
    config.optim.update(USUAL | optim)
    return config


def assembled(setting: str, base, optim: dict):
    fields = dict(SETTINGS[setting])
    if setting == "adapters":
        fields["init_from"] = str(base)
    if "freeze" in optim:
        optim = optim | {"freeze": (*fields.pop("optim.freeze", ()), *optim["freeze"])}
    config = config_of(fields, **optim)
    return assemble(resolve(config), num_classes=3, examples_per_epoch=EXAMPLES)


@functools.cache
def updated(setting: str, base, optim: tuple) -> tuple[dict, list, list]:
    """(parameters by name and layer, learning rates, warnings) after some updates by gradients that are drawn."""
    assembly = assembled(setting, base, dict(optim))
    like, _ = jax.eval_shape(assembly.networks.init, jax.random.key(0))
    random = np.random.default_rng(0)
    params = drawn(like, random)
    state = assembly.optimizer.init(params)
    for count in range(UPDATES):
        grads = drawn(like, random)
        if setting == "late term" and count < LATE:
            grads["objective"] = jax.tree.map(np.zeros_like, grads["objective"])
        updates, state = assembly.optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    rates = [float(assembly.learning_rate(count)) for count in range(TOTAL)]
    return by_layer(params), rates, announce.warnings(assembly.config, EXAMPLES)


def drawn(like, random) -> dict:
    return jax.tree.map(lambda p: random.standard_normal(p.shape).astype(np.float32), like)


def by_layer(params) -> dict[str, np.ndarray]:
    """Arrays by name, those of a stack by the number of their layer too."""
    arrays = {}
    for name, array in patterns.named(params).items():
        if patterns.is_stacked(name):
            arrays |= {f"{name}[{i}]": np.asarray(layer) for i, layer in enumerate(array)}
        else:
            arrays[name] = np.asarray(array)
    return arrays


def is_frozen(setting: str, name: str) -> bool:
    """Whether a setting holds a parameter, or layer."""
    if setting != "frozen parts":
        return False
    return name.startswith(("embedding/", "encoder/norm/")) or name.endswith("[0]")


def differences(setting: str, case: Case, first: dict, second: dict) -> list[str]:
    """What is not as the case claims."""
    wrong = []
    for name, array in first.items():
        claimed = re.fullmatch(case.claims, name.partition("[")[0]) and not is_frozen(setting, name)
        if np.array_equal(array, second[name]) == bool(claimed):
            wrong.append(f"{name} {'stays' if claimed else 'changes'}")
    return wrong


def check(setting: str, option: str, case: Case, base, caplog, run) -> None:
    """Fails unless the option changes what it claims, or is refused or warned about by its name."""
    first, second = (tuple(fields.items()) for fields in case.runs(option))
    if setting == "adapters" and is_of_matrices(dict(first).get("name", "adamw")):
        with pytest.raises(ConfigError, match="adapters do not count"):
            run(setting, base, first)
        return
    before = run(setting, base, first)
    caplog.clear()
    try:
        after = run(setting, base, second)
    except ConfigError as error:
        assert option in str(error)
        return
    wrong = differences(setting, case, before[0], after[0])
    said = any(option in message for message in (*caplog.messages, *after[2]))
    assert said or not wrong, wrong
    assert not case.rate or before[1] != after[1], "the logged learning rate stays"


def test_every_option_of_optimizers_is_tried():
    named = {f"optim.{field.name}" for field in schema.options(Optim)}
    tried = {f"optim.{name}" for name in (*OPTIM, *OF_STEPS)}
    left = {name for name in UNCHANGING if name.startswith("optim.")}
    assert tried | left == named and not tried & left
    assert len(UNCHANGING) <= 15


def optimizer_cases() -> list:
    """(setting, option) of all; beside other parts of a run, and of optimizers of matrices, they take long."""
    cases = []
    for setting in SETTINGS:
        for option, case in OPTIM.items():
            marks = []
            if setting != "alone" or is_of_matrices(case.base.get("name", "adamw")):
                marks.append(pytest.mark.slow)
            cases.append(pytest.param(setting, option, marks=marks))
    return cases


# Options that all optimizers share, or several.
SHARED = (
    "b1", "b2", "eps", "moment_dtype", "clip", "weight_decay", "weight_decay_by", "weight_decay_rules", "lr",
    "lr_rules", "warmup", "layer_decay", "freeze",
)  # fmt: skip
NAMES = (*ELEMENTWISE, "muon", "adamuon", "normuon", "shampoo", "soap")
# Of lion's updates only signs are seen, few of which are others after so few updates; LARS divides most gradients by
# their length.
NOT_SEEN = [("lion", "b1"), ("lion", "moment_dtype"), ("lion", "clip"), ("lars", "clip")]


def shared_cases() -> list[tuple[str, str]]:
    """(name, option) of the options that an optimizer reads."""
    fields = {field.name: field for field in schema.options(Optim)}
    return [
        (name, option)
        for name in NAMES
        for option in SHARED
        if schema.is_read(fields[option], Optim(name=name)) and (name, option) not in NOT_SEEN
    ]


def claims_of(name: str, option: str) -> str:
    """What an option claims to change with this optimizer."""
    is_for_others = is_of_matrices(name) and option in ("b1", "b2")
    if is_for_others or (name, option) == ("muon", "eps"):
        return OTHERS
    return OPTIM[option].claims


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), shared_cases())
def test_an_option_reaches_the_parameters_of_every_optimizer_that_reads_it(
    name, option, base, caplog
):
    case = OPTIM[option]
    base_fields = {"name": name, **case.base}
    of_name = dataclasses.replace(case, base=base_fields, claims=claims_of(name, option))
    check("alone", option, of_name, base, caplog, updated)


@pytest.mark.parametrize(("setting", "option"), optimizer_cases())
def test_an_option_of_optimizers_changes_what_it_claims(setting, option, base, caplog):
    check(setting, option, OPTIM[option], base, caplog, updated)


@functools.cache
def stepped(setting: str, base, optim: tuple) -> tuple[dict, list, list]:
    """As `updated`, of the parameters that are evaluated after whole steps."""
    fields = SETTINGS[setting] | {f"optim.{name}": value for name, value in optim}
    if setting == "adapters":
        fields = fields | {"init_from": str(base)}
    assembly = tiny_objectives.assembled("supervised", base, fields)
    state = tiny_objectives.stepped(assembly, UPDATES)
    kept = {"params": {}, "params_objective": {}, "ema": {}, "ema_objective": {}}
    for name, array in state.items():
        part, _, rest = name.partition("/")
        if part in kept:
            kept[part][rest] = array
    own = {f"objective/{name}": x for name, x in kept["params_objective"].items()}
    own |= {f"objective/{name}": x for name, x in kept["ema_objective"].items()}
    params = by_layer((kept["ema"] or kept["params"]) | own)
    return params, [], announce.warnings(assembly.config, EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("option", OF_STEPS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_an_option_of_whole_steps_changes_all_parameters(setting, option, base, caplog):
    check(setting, option, OF_STEPS[option], base, caplog, stepped)
