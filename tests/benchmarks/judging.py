"""What judging costs beside its parts, in turns in one process:

    python tests/benchmarks/judging.py evaluate [--model=ViT-Ti/16] [--size=224] [--images=256] [--batch=32]
    python tests/benchmarks/judging.py few_shot [--classes=100]
    python tests/benchmarks/judging.py predict --files=FOLDER [--model=…] [--size=…] [--images=…] [--batch=…]
    python tests/benchmarks/judging.py inspect --model=ViT-L/16 [--size=…] [--batch=…]

`evaluate`: accuracy of images in memory beside the compiled network alone, as `vit_jax benchmark inference` times it.
`few_shot`: all fits of that evaluator to 10,000 features of 768 numbers, tried on as many, beside scikit-learn's
scaler and ridge, and a fit to all of them. `predict`: classes of files beside reading and cutting them alone, and the
network alone. `inspect`: what is taken from a batch beside the network alone, both a loop over layers in float32, and
the memory that XLA counts for each. Prints medians over --rounds, on the clock and of processor time: where decoding
and the network have the same cores, processor times add up, and predicting cannot be as fast as the slower of both.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from flax import nnx
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vit_jax import evaluation
from vit_jax.base import schema
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import config_class, default_config
from vit_jax.data import crops, sources
from vit_jax.data.record import DataSet, Record
from vit_jax.devices import meshes
from vit_jax.evaluation import few_shot
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.inspection import observe
from vit_jax.models import registry
from vit_jax.prediction.images import Compiled, find_images, read_ahead
from vit_jax.prediction.predict import predict

CLASSES = tuple(f"class {i}" for i in range(1000))


@dataclasses.dataclass(frozen=True)
class Cached:
    """Images in memory."""

    images: np.ndarray
    classes: tuple[str, ...] = CLASSES
    multi_label: bool = False

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Record:
        return Record(self.images[index], index % len(self.classes), str(index))


def timed(work: dict[str, Callable], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each, on the clock and of the processor, in turns, after one round that is not counted."""
    found: dict[str, list] = {name: [] for name in work}
    for _ in range(rounds + 1):
        for name, call in work.items():
            began = time.perf_counter(), time.process_time()
            call()
            found[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return {
        name: dict(zip(("clock", "processor"), map(statistics.median, zip(*times[1:], strict=True)), strict=True))
        for name, times in found.items()
    }  # fmt: skip


def new_run(name: str, size: int, batch: int) -> TrainedModel:
    """A network with random weights, as a checkpoint would have it."""
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": name, "data.image_size": size, "data.eval_crop": "resize", "batch_size": batch,
        "data.name": "cached",
    })  # fmt: skip
    model_config = registry.model_config(
        name, image_size=size, num_classes=len(CLASSES), head_init="normal"
    )
    weights = registry.initialize(model_config, jax.random.key(0))
    model = nnx.merge(registry.abstract(model_config)[0], weights)
    return TrainedModel(model, model_config, config, CLASSES, 0, pathlib.Path("new"))


def network_alone(run: TrainedModel, batch: int) -> Callable[[int], None]:
    """What classifies so many made-up images, batch by batch, and waits for each."""
    data = data_of(run)
    definition, weights = registry.split(run.model)
    forward = make_forward(definition, run.model_config, data)
    images = np.random.default_rng(0).integers(0, 256, (batch, *crops.shape(data)), np.uint8)
    images = jax.device_put(images)
    network = jax.jit(lambda weights, images: forward(weights, images).logits)

    def compute(count: int) -> None:
        for _ in range(0, count, batch):
            network(weights, images).block_until_ready()

    return compute


def evaluate(said) -> dict:
    run = new_run(said.model, said.size, said.batch)
    images = np.random.default_rng(0).integers(
        0, 256, (said.images, said.size, said.size, 3), np.uint8
    )
    source = DataSet("images in memory", {"test": said.images}, lambda parts: Cached(images))
    sources.register("cached", lambda config_data: source)
    config = schema.typed(config_class(), run.config)
    definition, weights = registry.split(run.model)
    context = EvalContext(config, run.model_config, definition, run.classes)
    mesh, alone = meshes.replica_mesh(), network_alone(run, said.batch)
    names = ("accuracy", "classification")
    suites = {name: evaluation.make((name,), context) for name in names}
    with jax.set_mesh(mesh):
        judged = {
            name: lambda suite=suite: suite(EvaluatedModel(weights), mesh)
            for name, suite in suites.items()
        }
        return timed({"alone": lambda: alone(said.images)} | judged, said.rounds)


def few_shots(said) -> dict:
    random = np.random.default_rng(0)
    centres = random.normal(size=(said.classes, 768))
    labels, truth = (random.integers(0, said.classes, 10_000) for _ in range(2))
    train, test = (
        (centres[of] + 6 * random.normal(size=(10_000, 768))).astype(np.float32)
        for of in (labels, truth)
    )
    options, found = few_shot.FewShotOptions(), {}

    def ours() -> None:
        found["ours"] = few_shot.accuracies(train, labels, test, truth, said.classes, options)

    def ridge(chosen: np.ndarray, dtype: str) -> np.ndarray:
        targets = np.where(labels[chosen, None] == np.arange(said.classes), 1.0, -1.0)
        fit = make_pipeline(StandardScaler(), Ridge(alpha=options.l2))
        return fit.fit(train[chosen].astype(dtype), targets.astype(dtype)).predict(tests[dtype])

    def theirs(dtype: str) -> None:
        found[f"ridge, {dtype}"] = {
            f"{shots}shot": np.mean([
                np.mean(ridge(few_shot.choose(labels, shots, seed), dtype).argmax(-1) == truth)
                for seed in range(options.seeds)
            ])
            for shots in options.shots
        }  # fmt: skip

    def of_all() -> None:
        few_shot.fit_linear(train, labels, said.classes, options.l2)(test).argmax(-1)

    everything, tests = np.arange(len(train)), {d: test.astype(d) for d in ("float64", "float32")}
    work = {"ours": ours, "ours, one fit to all": of_all}
    for dtype in tests:
        work[f"ridge, {dtype}"] = functools.partial(theirs, dtype)
        work[f"ridge, {dtype}, one fit to all"] = functools.partial(ridge, everything, dtype)
    return timed(work, said.rounds) | {"accuracies": found}


def predicting(said) -> dict:
    run = new_run(said.model, said.size, said.batch)
    alone, data = network_alone(run, said.batch), data_of(run)

    def files() -> list:
        return list(itertools.islice(find_images([said.files]), said.images))

    def read() -> None:
        compiled = Compiled(data, None)
        for several in read_ahead(files(), compiled.read, said.batch):
            compiled.batch(several, said.batch)

    def whole() -> None:
        for _ in predict(run, files(), topk=5, batch_size=said.batch):
            pass

    return timed(
        {"network": lambda: alone(said.images), "reading": read, "predict": whole}, said.rounds
    )


def inspecting(said) -> dict:
    run = new_run(said.model, said.size, said.batch)
    config, data = observe.for_inspection(run.model_config), data_of(run)
    definition, weights = registry.abstract(config)[0], registry.split(run.model)[1]
    images = np.random.default_rng(0).integers(0, 256, (said.batch, *crops.shape(data)), np.uint8)
    forward = make_forward(definition, config, data)
    programs = {
        "network": jax.jit(lambda weights, images: forward(weights, images).logits),
        "inspect": observe.make_look(definition, config, data),
    }
    compiled = {name: one.lower(weights, images).compile() for name, one in programs.items()}
    work = {
        name: lambda one=one: jax.block_until_ready(one(weights, images))
        for name, one in compiled.items()
    }
    found = timed(work, said.rounds)
    for name, one in compiled.items():
        needs = one.memory_analysis()
        parts = needs.argument_size_in_bytes, needs.temp_size_in_bytes, needs.output_size_in_bytes
        found[name]["memory"] = f"{sum(parts) / 2**20:.0f} MiB"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = {
        "evaluate": evaluate,
        "few_shot": few_shots,
        "predict": predicting,
        "inspect": inspecting,
    }
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--model", default="ViT-Ti/16")
    parser.add_argument("--files")
    for name, value in (
        ("size", 224),
        ("images", 256),
        ("batch", 32),
        ("classes", 100),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    said = parser.parse_args()
    found = kinds[said.what](said)
    for name, seconds in found.items():
        print(
            f"{name:<32}",
            "  ".join(
                f"{kind} {value:.3f} s" if isinstance(value, float) else f"{kind} {value}"
                for kind, value in seconds.items()
            ),
        )
    print(json.dumps(vars(said) | found, default=float))


if __name__ == "__main__":
    main()
