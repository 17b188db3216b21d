"""A classifier at the cost of one look at each image: a linear head in closed form on the features of a model that
stays as it is, and how long features take on this machine.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from etils import epath
from flax import nnx

from vit_jax.base import patterns
from vit_jax.config import Config
from vit_jax.data.record import Source
from vit_jax.devices import meshes
from vit_jax.evaluation import few_shot, measures
from vit_jax.evaluation.contract import EvalContext, EvaluatorOptions
from vit_jax.evaluation.features import FeatureEvaluator, of_examples
from vit_jax.evaluation.progress import with_progress
from vit_jax.interchange import file_header, formats, loading, orbax
from vit_jax.models import classifier, registry
from vit_jax.studies.labelling import labelling_of

_HEAD = ("head/kernel", "head/bias")
_L2 = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)  # for half of the images
_TIMED = 2  # batches


@dataclasses.dataclass(frozen=True)
class Speed:
    """How fast features are.

    Attributes:
      seconds_each: of an image, decoding included.
      compiling: seconds.
    """

    seconds_each: float
    compiling: float


class FeaturesOf(FeatureEvaluator):
    """The features of the images of a run, from a model with a head for their classes.

    Attributes:
      model: its head is not used.
    """

    _takes_several_labels = True

    def __init__(self, config: Config, model: nnx.Module):
        definition, weights = registry.split(model)
        super().__init__(EvaluatorOptions(), EvalContext(config, model.config, definition, ()))
        self.model, self._mesh = model, meshes.replica_mesh()
        self._weights = jax.device_put(weights, meshes.replicated(self._mesh))

    def time(self) -> Speed:
        """Measures on the first images; compiles what `of` runs."""
        count = min(len(self.train), _TIMED * (self._config.eval.batch_size or 1))
        few = _First(self.train, count)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            self.of(few, watch=iter)
            seconds.append(time.perf_counter() - began)
        return Speed(seconds[1] / count, max(seconds[0] - seconds[1], 0.0))

    def of(self, source: Source, watch=with_progress) -> tuple[np.ndarray, np.ndarray]:
        """Features (n, D) float32 and labels, (n,) or (n, classes) of several, of the images that can be read."""
        with jax.set_mesh(self._mesh):
            return of_examples(self.batches(source, self._weights, self._mesh, watch), self._mesh)


class _First:
    """The first examples of a source."""

    def __init__(self, source: Source, count: int):
        self.classes, self.multi_label, self.labels = source.classes, source.multi_label, None
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int):
        return self._source[index]

    def fingerprint(self) -> str:
        return self._source.fingerprint()


def features_of(config: Config, classes: int) -> FeaturesOf:
    """The features of the model that a run starts from, or of a new one of the config's, which measures as well."""
    if config.init_from:
        return FeaturesOf(config, pretrained(config, classes))
    given = {
        name: value
        for name, value in vars(config.model).items()
        if name != "name" and value is not None
    }
    model_config = registry.model_config(
        config.model.name, image_size=config.data.image_size, **given | {"num_classes": classes}
    )
    return FeaturesOf(config, untrained(model_config))


def pretrained(config: Config, classes: int) -> nnx.Module:
    """The model of `config.init_from` at `config.data.image_size`, with a new head for that many classes."""
    options = {"representation": 0} if hasattr(config.model, "representation") else {}
    return loading.load(
        config.init_from,
        image_size=config.data.image_size,
        num_classes=classes,
        resize=config.init_resize,
        init_channels=config.init_channels,
        **options,
    )


def untrained(model_config: classifier.ClassifierConfig) -> nnx.Module:
    """A model whose parameters are zeros, to measure with."""
    definition, like = registry.abstract_weights(model_config)
    return nnx.merge(definition, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))


def has_dense_head(model: nnx.Module) -> bool:
    """Whether a model's head is one dense layer, which `fit_head` needs."""
    names = patterns.names(registry.split(model)[1].params)
    return {name for name in names if "head" in name} == {*_HEAD}


def fit_head(features: FeaturesOf, path: epath.PathLike) -> float:
    """Fits a head to the images to learn from, and writes the model with it as a checkpoint of ours.

    The head is the ridge regression of the evaluator few_shot, on all images.

    Returns:
      Its metric on the held-out images, see `labelling.Labelling`.
    """
    model = features.model
    weights = registry.split(model)[1]
    labelling = labelling_of(features.train)
    classes = len(features.train.classes)
    x, labels = features.of(features.train)
    test, truth = features.of(features.test)
    targets = labelling.targets(labels, classes)
    kernel, bias = _fit(x, targets, labelling.probabilities)
    scores = test @ kernel + bias
    value = labelling.score(scores, labelling.targets(truth, classes))
    head = dict(zip(_HEAD, (kernel, bias), strict=True))

    def replaced(name: str, leaf: jax.Array) -> jax.Array:
        return jnp.asarray(head[name], leaf.dtype) if name in head else leaf

    checkpoint = formats.LoadedCheckpoint(
        model.config,
        patterns.map_named(replaced, weights.params),
        features.train.classes,
        file_header.preprocessing_in(vars(features.context.config.data)),
        variables=weights.variables,
        called=features.context.config.model.name,
        probabilities=labelling.probabilities,
    )
    formats.write_checkpoint(checkpoint, path, orbax.NAME)
    return value


def _fit(x: np.ndarray, targets: np.ndarray, probabilities: str) -> tuple[np.ndarray, np.ndarray]:
    """Kernel (D, classes) and bias (classes,) of a head. Its probabilities are as sure as they are right: the
    regularisation, and the temperature that scores are divided by, are the likeliest for one half of the images by the
    head of the other half.

    Args:
      x: features (n, D).
      targets: (n, classes) bool.
      probabilities: the function from scores to them, 'softmax' or 'sigmoid'.
    """
    order = np.random.default_rng(0).permutation(len(x))
    fitted, others = order[::2], order[1::2]
    l2, temperature = _L2[-1], 1.0
    if len(others):
        likeliest = np.inf
        for candidate in _L2:
            kernel, bias = _linear(x[fitted], targets[fitted], candidate)
            scores = x[others] @ kernel + bias
            divisor = measures.fit_temperature(scores, targets[others], probabilities)
            loss = measures.negative_log_likelihood(
                scores / divisor, targets[others], probabilities
            )
            if loss < likeliest:
                likeliest, l2, temperature = loss, candidate, divisor
    kernel, bias = _linear(x, targets, l2 * len(x) / len(fitted))
    return kernel / temperature, bias / temperature


def _linear(x: np.ndarray, targets: np.ndarray, l2: float) -> tuple[np.ndarray, np.ndarray]:
    """Kernel and bias of the ridge regression of `few_shot.fit_members`."""
    of_class = scipy.sparse.csc_array(targets.T.astype(np.float64))
    scores = few_shot.fit_members(x.astype(np.float64), of_class, l2)
    bias = scores(np.zeros((1, x.shape[1])))
    return scores(np.eye(x.shape[1])) - bias, bias[0]
