"""Evaluators: against NumPy and scikit-learn, by config, by name, and with data that does not fit."""

import csv
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn import linear_model
from sklearn.neighbors import KNeighborsClassifier

from tests.models.conftest import parameters
from vit_jax import evaluation
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data import sources
from vit_jax.data.labels import imagenet
from vit_jax.data.labels.classes import with_classes
from vit_jax.data.record import DataSet, Record
from vit_jax.devices import meshes
from vit_jax.evaluation.classification import _table
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Evaluator
from vit_jax.evaluation.features import Features
from vit_jax.evaluation.few_shot import choose, fit_linear, fit_members
from vit_jax.evaluation.metric_order import MetricOrder
from vit_jax.evaluation.neighbours import NeighbourOptions, _make_vote, nearest
from vit_jax.evaluation.progress import with_progress
from vit_jax.models import registry

TABLES = ("classes", "confusion", "calibration", "images")


@dataclasses.dataclass(frozen=True)
class Labels:
    """Examples without images."""

    labels: tuple
    classes: tuple[str, ...]
    multi_label: bool = False

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return Record(b"", self.labels[index], str(index))


class Odd(Labels):
    """Images of noise of the odd ones of ten classes."""

    def __init__(self):
        super().__init__(tuple(2 * (i % 5) + 1 for i in range(40)), tuple("0123456789"))

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (16, 16, 3), np.uint8)
        return Record(pixels, self.labels[index], str(index))


@pytest.fixture(scope="module")
def context():
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": "ViT-mu/8", "data.image_size": 16, "data.eval_crop": "resize", "batch_size": 24,
    })  # fmt: skip
    model_config = registry.model_config("ViT-mu/8", image_size=16, num_classes=10)
    definition = registry.abstract(model_config)[0]
    classes = tuple("0123456789")
    return EvalContext(schema.typed(config_class(), config), model_config, definition, classes)


@pytest.mark.parametrize(("examples", "width"), [(60, 12), (1100, 12), (20, 40)])
def test_the_linear_fit_is_least_squares_in_float64(examples, width):
    random = np.random.default_rng(0)
    x = random.normal(size=(examples, width)).astype(np.float32) * 3 + 1
    further, labels = random.normal(size=(5, width)), random.integers(0, 4, examples)
    mean, std = x.astype(np.float64).mean(0), x.astype(np.float64).std(0) + 1e-5

    def prepared(values):
        return np.concatenate([(values - mean) / std, np.full((len(values), 1), 100.0)], axis=1)

    # Ridge as ordinary least squares of the problem with sqrt(l2) I below it.
    a = np.concatenate([prepared(x), 32 * np.eye(width + 1)])
    y = np.concatenate([2.0 * np.eye(4)[labels] - 1, np.zeros((width + 1, 4))])
    expected = prepared(further) @ np.linalg.lstsq(a, y, rcond=None)[0]
    found = fit_linear(x, labels, 4, 1024.0)(further)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("width", [12, 90])
def test_the_linear_fit_of_several_labels_is_scikit_learns_ridge_regression(width):
    random = np.random.default_rng(0)
    x = random.normal(size=(60, width)) * 3 + 1
    targets = random.random((60, 4)) < (0.5, 0.3, 0.1, 0.0)  # some rows and one class have none
    further = random.normal(size=(5, width))
    mean, std = x.mean(0), x.std(0) + 1e-5

    def prepared(values):
        return np.concatenate([(values - mean) / std, np.full((len(values), 1), 100.0)], axis=1)

    ridge = linear_model.Ridge(alpha=30.0, fit_intercept=False)
    expected = ridge.fit(prepared(x), 2.0 * targets - 1).predict(prepared(further))
    of_class = scipy.sparse.csc_array(targets.T.astype(np.float64))
    found = fit_members(x, of_class, 30.0)(further)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_few_shots_are_chosen_from_every_class_and_differ_by_seed():
    labels = np.repeat(np.arange(3), (4, 9, 2))
    chosen = choose(labels, 3, seed=0)
    assert np.bincount(labels[chosen]).tolist() == [3, 3, 2] and len(set(chosen)) == 8
    assert not np.array_equal(chosen, choose(labels, 3, seed=1))
    np.testing.assert_array_equal(chosen, choose(labels, 3, seed=0))


def test_neighbours_over_devices_are_those_of_scikit_learn():
    random = np.random.default_rng(1)
    unit = lambda x: (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)  # noqa: E731
    bank, queries = unit(random.normal(size=(3, 16, 6))), unit(random.normal(size=(8, 6)))
    labels = random.integers(0, 5, (3, 16)).astype(np.int32)
    mask = np.ones((3, 16), np.float32)
    mask[2, 10:] = 0
    mesh = meshes.make_mesh({"data": 4, "fsdp": 2, "tensor": 1})
    cut = NamedSharding(mesh, P(None, meshes.BATCH))
    placed = Features(*(jax.device_put(x, cut) for x in (bank, labels, mask)))
    with jax.set_mesh(mesh):
        values, found = jax.jit(lambda b, q: nearest(b, q, 7, mesh))(placed, queries)
    there = mask.ravel() > 0
    known = KNeighborsClassifier(7, metric="cosine")
    known.fit(bank.reshape(-1, 6)[there], labels.ravel()[there])
    distances, rows = known.kneighbors(queries)
    np.testing.assert_allclose(values, 1 - distances, atol=1e-6)
    np.testing.assert_array_equal(found, labels.ravel()[there][rows])


@pytest.mark.parametrize("name", ["accuracy", "classification"])
def test_logits_of_another_engine_are_judged_in_place_of_the_model_s(context, name):
    """An engine that knows the labels, and weights that do not."""
    data = {"name": "digits", "eval_split": "test[:40]"}
    model = registry.create_model("ViT-mu/8", image_size=16, num_classes=10, head_init="normal")
    mesh = meshes.replica_mesh()
    weights = jax.device_put(registry.split(model)[1], meshes.replicated(mesh))
    labels = sources.open_eval(dataclasses.replace(context.config.data, **data)).labels
    batches = iter(np.array_split(np.eye(10, dtype=np.float32)[list(labels)], [24]))

    def logits_of(images):
        assert images.dtype == np.uint8 and images.shape == (24, 16, 16, 3)
        known = next(batches)
        return np.concatenate([known, np.zeros((24 - len(known), 10), np.float32)])

    by_engine = dataclasses.replace(context, logits_of=logits_of)
    with jax.set_mesh(mesh):
        metrics = evaluation.make([(name, {"data": data})], by_engine)(
            EvaluatedModel(weights), mesh
        )
    prefix = "" if name == "accuracy" else f"{name}/"
    assert metrics[f"{prefix}accuracy"] == 1 and metrics[f"{prefix}examples"] == 40
    other = evaluation.make([("accuracy", {"data": data | {"mean": (0.1,) * 3}})], by_engine)
    with jax.set_mesh(mesh), pytest.raises(ConfigError, match="--engine=xla"):
        other(EvaluatedModel(weights), mesh)


@pytest.mark.parametrize("name", ["accuracy", "classification", "few_shot", "knn"])
def test_an_evaluator_compiles_for_the_first_checkpoint_only(context, name):
    data = {"name": "digits", "train_split": "train[:40]", "eval_split": "test[:40]"}
    judges = evaluation.make([(name, {"data": data})], context)
    model = registry.create_model("ViT-mu/8", image_size=16, num_classes=10, head_init="normal")
    weights, mesh = registry.split(model)[1], meshes.replica_mesh()
    compiled = []

    def count(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    def judge(scale: float) -> tuple[dict, int]:
        scaled = jax.tree.map(lambda x: jax.device_put(np.asarray(x) * scale, whole), weights)
        before = len(compiled)
        with jax.set_mesh(mesh):
            return judges(EvaluatedModel(scaled), mesh), len(compiled) - before

    whole = meshes.replicated(mesh)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        first, programs = judge(1.0)
        second, further = judge(0.1)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert programs > 0 and further == 0
    assert first.keys() == second.keys() and first != second


def test_of_equal_neighbours_the_first_counts():
    mesh = meshes.make_mesh({"data": 8, "fsdp": 1, "tensor": 1})
    cut = NamedSharding(mesh, P(None, meshes.BATCH))
    same = jnp.ones((2, 8, 1), jnp.float32)
    labels = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    bank = Features(*(jax.device_put(x, cut) for x in (same, labels, jnp.ones((2, 8)))))
    with jax.set_mesh(mesh):
        _, found = jax.jit(lambda b, q: nearest(b, q, 5, mesh))(bank, jnp.ones((1, 1)))
    np.testing.assert_array_equal(found, [[0, 1, 2, 3, 4]])


def test_top_5_counts_only_classes_that_neighbours_vote_for():
    mesh = meshes.replica_mesh()
    features = jnp.eye(8, dtype=jnp.float32)
    labels = jnp.arange(8, dtype=jnp.int32)
    bank = Features(features[None], labels[None], jnp.ones((1, 8)))
    queries = Features(features[5:], jnp.zeros(3, jnp.int32), jnp.ones(3))
    with jax.set_mesh(mesh):
        counts = _make_vote(NeighbourOptions(k=(1,)), 8, 8, mesh)(bank, queries)
    assert int(counts["top5_accuracy"]) == int(counts["accuracy"]) == 0


def test_metrics_have_the_prefix_of_their_evaluator(context, caplog):
    entries = (
        "accuracy",
        ("knn", {"k": (3, 1), "prefix": "near"}),
        ["few_shot", {"shots": (2, 200)}],
    )
    suite = evaluation.make(entries, context)
    mesh = meshes.replica_mesh()
    params = parameters(context.model_config)
    counts = []

    def watch(batches):
        counts.append(len(batches))
        return batches

    with jax.set_mesh(mesh):
        found = suite(EvaluatedModel(registry.Weights(params, {})), mesh, watch)
    assert set(found) == {
        "accuracy", "top5_accuracy", "loss", "examples", "near/accuracy", "near/top5_accuracy",
        "near/accuracy_1", "near/examples", "few_shot/2shot", "few_shot/2shot_std",
        "few_shot/200shot", "few_shot/200shot_std",
    }  # fmt: skip
    assert set(suite.metrics()) == set(found)
    assert found["examples"] == found["near/examples"] == 359
    assert found["few_shot/200shot_std"] == 0  # every class gives all it has
    assert "few_shot on digits: '8' has only " in caplog.text and "fewer than 200" in caplog.text
    assert found["near/accuracy"] > 0.5 > found["accuracy"]  # random features, but no head
    assert counts[:3] == [
        15,
        60,
        15,
    ]  # batches of 24, of 359 images to judge and 1,438 to learn from


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("acuracy",), "no evaluator 'acuracy'; did you mean 'accuracy'"),
        ((("knn", {"kk": 3}),), "knn has no option 'kk'"),
        ((("knn", {"k": (0,)}),), "knn: k = .* must be at least 1"),
        ((("knn", {"data": {"pth": "x"}}),), "config.data has no field 'pth'"),
        (("knn", "knn"), "two have the prefix 'knn'"),
        ((3,), "3 is neither NAME nor"),
        (("loss",), "'loss' needs what the objective owns"),
        ((("knn", {"data": {"name": "folder", "path": "/nowhere"}}),), "does not exist"),
    ],
)
def test_what_is_wrong_with_evaluators_is_said_before_devices_are_used(context, entries, message):
    with pytest.raises(ConfigError, match=message):
        evaluation.make(entries, context)


def test_a_model_without_head_has_no_accuracy(context):
    headless = dataclasses.replace(
        context, model_config=dataclasses.replace(context.model_config, num_classes=0), classes=()
    )
    with pytest.raises(ConfigError, match="the model has no head"):
        evaluation.make(("accuracy",), headless)


def test_classes_are_matched_by_their_names(caplog):
    source = Labels((0, 1, 1), ("dog", "cat"))
    mapped = with_classes(source, ("ant", "cat", "dog"))
    assert [mapped[i].label for i in range(3)] == [2, 1, 1] and mapped.classes[1] == "cat"
    assert with_classes(source, ("dog", "cat")) is source
    several = with_classes(Labels(((0, 1), ()), ("dog", "cat"), True), ("cat", "dog"))
    assert [several[i].label for i in range(2)] == [(1, 0), ()]
    ids = with_classes(Labels((0, 1), ("n01440764", "n01443537")), ("tench", "goldfish, a fish"))
    assert [ids[i].label for i in range(2)] == [0, 1]
    names = tuple(imagenet.classes().values())
    some = with_classes(
        Labels((0, 1), ("n01443537", "n15075141")), names
    )  # goldfish, toilet tissue
    assert [some[i].label for i in range(2)] == [1, 999]
    synonyms = tuple(f"{name}, a synonym" for name in names)  # as models on hubs name them
    assert with_classes(Labels((0,), ("n15075141",)), synonyms)[0].label == 999
    numbered = with_classes(source, ("0", "1"))
    assert numbered[0].label == 0 and "taken in their order" in caplog.text
    with pytest.raises(
        ConfigError, match="the model knows no 'cat'; it knows 'dog', 'cow'\\. Classes"
    ):
        with_classes(source, ("dog", "cow"))
    with pytest.raises(ConfigError, match="have no labels"):
        with_classes(Labels((None,), ()), ("dog", "cow"))


class Own(Evaluator):
    """One that says which way is good of one metric alone."""

    high_is_good = ("recall",)

    def metrics(self):
        return ("recall", "val_loss")


@pytest.fixture
def suite(context):
    knn = ("knn", {"data": {"train_split": "train[:64]"}})
    made = evaluation.make(("accuracy", "classification", knn), context)
    own = Own(Own.Options(), context)
    return evaluation.Suite((*made.evaluators, ("own", own)))


@pytest.mark.parametrize(
    ("best", "expected"),
    [
        ("", ("accuracy", "max")), ("loss", ("loss", "min")), ("knn/accuracy", ("knn/accuracy", "max")),
        ("classification/nll_scaled", ("classification/nll_scaled", "min")), ("accuracy:min", ("accuracy", "min")),
        ("loss:max", ("loss", "max")), ("own/recall", ("own/recall", "max")),
        ("own/val_loss:min", ("own/val_loss", "min")),
    ],
)  # fmt: skip
def test_an_evaluator_declares_which_way_is_good(suite, best, expected):
    assert suite.metric_order(best) == MetricOrder(*expected)


def test_a_direction_that_nobody_declares_is_asked_for(suite):
    for best, field in (
        ("own/val_loss", "own/val_loss:min"),
        ("examples", "examples:max"),
        ("acuracy", "'acuracy' is no METRIC.*accuracy"),
        ("loss:low", "METRIC:min or METRIC:max"),
        ("loss:", "METRIC:min or METRIC:max"),
    ):
        with pytest.raises(ConfigError, match=f"config.eval.best.*{field}"):
            suite.metric_order(best)


def test_an_own_evaluator_has_a_main_metric_if_it_declares_one_alone(context):
    suite = evaluation.Suite((("own", Own(Own.Options(), context)),))
    assert suite.metric_order("") == MetricOrder("own/recall", "max")
    silent = type("Silent", (Own,), {"high_is_good": ()})
    with pytest.raises(ConfigError, match="config.eval.best = ''.*own/recall, own/val_loss"):
        evaluation.Suite((("own", silent(Own.Options(), context)),)).metric_order("")


@pytest.mark.parametrize("name", list(evaluation.EVALUATORS))
def test_each_evaluator_of_the_package_declares_its_main_metric(name):
    kind = evaluation.EVALUATORS[name]
    assert kind.main_metric is not Evaluator.main_metric
    assert kind.high_is_good or kind.low_is_good


def test_how_far_an_evaluation_is_is_logged_now_and_then(caplog):
    caplog.set_level("INFO")
    assert list(with_progress([{}] * 3, every_seconds=0)) == [{}] * 3
    first, second = (record.message for record in caplog.records)
    assert re.fullmatch("1 of 3 batches evaluated, .* a second, 0 s left", first)
    assert second.startswith("2 of 3")
    caplog.clear()
    assert list(with_progress([{}] * 3)) == [{}] * 3 and not caplog.records


def test_classification_counts_what_accuracy_counts_and_writes_tables(context, tmp_path):
    entries = ("accuracy", ("classification", {"out": str(tmp_path), "images": True}))
    suite = evaluation.make(entries, context)
    mesh = meshes.replica_mesh()
    config = dataclasses.replace(context.model_config, head_init="normal")
    weights = registry.Weights(parameters(config), {})
    weights.params["head"]["kernel"] *= 30  # surer than it should be
    with jax.set_mesh(mesh):
        found = suite(EvaluatedModel(weights), mesh)
    assert set(suite.metrics()) == set(found)
    own = {n.partition("/")[2]: v for n, v in found.items() if n.startswith("classification/")}
    for same in ("accuracy", "top5_accuracy", "examples"):
        assert own[same] == pytest.approx(found[same], abs=1e-6)
    assert own["nll"] == pytest.approx(found["loss"], rel=1e-5)
    assert own["accuracy_low"] < own["accuracy"] < own["accuracy_high"]
    assert own["nll_scaled"] < own["nll"] and own["ece_scaled"] < own["ece"]
    assert own["temperature"] > 1

    rows = {name: list(csv.DictReader((tmp_path / f"{name}.csv").open())) for name in TABLES}
    labels = sources.open_eval(context.config.data).labels
    assert [int(row["examples"]) for row in rows["classes"]] == np.bincount(labels).tolist()
    assert sum(int(row["examples"]) for row in rows["confusion"]) == 359
    assert sum(int(row["examples"]) for row in rows["calibration"]) == 359
    right = [row["class"] == row["predicted"] for row in rows["images"]]
    assert np.mean(right) == pytest.approx(own["accuracy"])


def test_only_classes_that_the_data_has_are_predicted_if_asked(context):
    odd = {"data": {"name": "odd-digits"}}
    sources.OPENERS["odd-digits"] = lambda _: DataSet(
        "odd digits", {"train": 1, "test": 40}, lambda parts: Odd()
    )
    try:
        entries = [
            ("classification", odd | {"present": p, "prefix": str(p)}) for p in (True, False)
        ]
        suite = evaluation.make(entries, context)
    finally:
        del sources.OPENERS["odd-digits"]
    mesh = meshes.replica_mesh()
    config = dataclasses.replace(context.model_config, head_init="normal")
    weights = registry.Weights(parameters(config), {})
    with jax.set_mesh(mesh):
        found = suite(EvaluatedModel(weights), mesh)
    records = [Odd()[i] for i in range(40)]
    images = jnp.stack([record.image for record in records]) / 127.5 - 1
    logits = np.asarray(nnx.merge(context.definition, *weights)(images).logits)
    labels = np.array([record.label for record in records])
    assert found["False/accuracy"] == pytest.approx(np.mean(logits.argmax(-1) == labels))
    odds = logits[:, 1::2].argmax(-1) * 2 + 1
    assert found["True/accuracy"] == pytest.approx(np.mean(odds == labels))
    assert found["True/accuracy"] > found["False/accuracy"]


def test_tables_have_no_cell_that_a_spreadsheet_would_run(tmp_path):
    _table(tmp_path / "x.csv", ("image", "share"), [("=1+1.jpg", -0.5), ("a=1", 1)])
    assert (tmp_path / "x.csv").read_text().split() == ["image,share", "'=1+1.jpg,-0.5", "a=1,1"]
