"""How good a classifier of several labels is, if its probabilities are sigmoids. Each image and class is a separate
decision: yes where the probability is at least the threshold of the class. NumPy, in float64.

Macro means are over the classes that have examples, as for one label. Micro takes the decisions of all classes
together.
"""

import numpy as np
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base.errors import ConfigError
from vit_jax.config import Config
from vit_jax.evaluation import measures

THRESHOLD = 0.5  # of a class for which none is given
RANKED = ("average_precision", "auc")
DECIDED = ("precision", "recall", "f1")


def class_thresholds(config: Config | ConfigDict, classes: int) -> np.ndarray:
    """`config.eval.thresholds` as (classes,); 0.5 of all classes where it is ().

    Raises:
      ConfigError: there are not as many as classes, or probabilities are no sigmoids.
    """
    thresholds = config.eval.thresholds
    if not thresholds:
        return np.full(classes, THRESHOLD)
    if objectives.probabilities(config.objective) == "softmax":
        raise ConfigError(
            "config.eval.thresholds are for sigmoids, and the model was trained with a softmax: set "
            "--config.eval.thresholds='()', or --config.objective.loss=sigmoid if it was not"
        )
    if len(thresholds) != classes:
        raise ConfigError(
            f"config.eval.thresholds has {len(thresholds)} numbers for {classes} classes: give one for each, in their "
            "order, or () for 0.5"
        )
    return np.array(thresholds, np.float64)


def stated_thresholds(config: Config | ConfigDict, classes: int) -> np.ndarray | None:
    """As `class_thresholds`; `None` where the config states none."""
    return class_thresholds(config, classes) if config.eval.thresholds else None


def choose_thresholds(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Of each class the threshold of the highest F1 on these examples, halfway between the probabilities that it
    separates. Of equal F1 it is the highest threshold; a class without examples has 0.5.

    Args:
      probabilities, targets: (n, classes).

    Returns:
      (classes,) float64.
    """
    thresholds = np.full(targets.shape[1], THRESHOLD)
    for c in np.flatnonzero(targets.any(0)):
        order = np.argsort(-probabilities[:, c], kind="stable")
        ranked = probabilities[order, c]
        hits = np.cumsum(targets[order, c])
        ends = measures.ends_of_ties(ranked)
        f1 = measures.rates(hits[ends], predicted=ends + 1, true=hits[-1])["f1"]
        last = ends[np.argmax(f1)]
        is_answer_for_all = last + 1 == len(ranked)
        if is_answer_for_all:  # at a probability of 0 too
            thresholds[c] = ranked[last] / 2
            continue
        below = ranked[last + 1]
        # Halfway may round to the lower one of two probabilities that are next to each other.
        thresholds[c] = max((ranked[last] + below) / 2, np.nextafter(below, 1))
    return thresholds


def listed(
    probabilities: np.ndarray, thresholds: np.ndarray, topk: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which classes of an image to list: the `topk` most probable ones, and all that are decided for.

    Args:
      probabilities: of all classes, in falling order.
      thresholds: of these classes.

    Returns:
      The indices of the listed classes in this order, and whether each is decided for.
    """
    decided = probabilities >= thresholds
    indices = np.flatnonzero(decided | (np.arange(len(decided)) < topk))
    return indices, decided[indices]


def by_class(
    scores: np.ndarray, targets: np.ndarray, decided: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """The measures of each class, (classes,) each: `examples`; RANKED, in which NaN means that there are too few images
    to rank; and with `decided` also `predicted` and DECIDED.

    Args:
      scores: logits or probabilities, (n, classes).
      targets: (n, classes) bool.
      decided: for which classes the answer is yes, (n, classes) bool.
    """
    true = targets.sum(0)
    columns = {"examples": true, **measures.ranking(scores, targets)._asdict()}
    if decided is not None:
        right = np.sum(decided & targets, 0)
        predicted = decided.sum(0)
        columns |= {"predicted": predicted, **measures.rates(right, predicted, true)}
    return columns


def means(
    scores: np.ndarray, targets: np.ndarray, decided: np.ndarray | None = None
) -> dict[str, float]:
    """The macro means of `by_class` by their names, and the micro ones as NAME_micro. The macro mean of
    `average_precision` is called `mean_average_precision`.
    """
    columns = by_class(scores, targets, decided)
    flat = [None if x is None else x.reshape(-1, 1) for x in (scores, targets, decided)]
    together = by_class(*flat)
    has_examples = columns["examples"] > 0
    metrics = {}
    for name in RANKED + DECIDED:
        if name in columns:
            macro = "mean_average_precision" if name == "average_precision" else name
            metrics[macro] = _mean_of_known(columns[name][has_examples])
            metrics[f"{name}_micro"] = float(together[name][0])
    return metrics


def _mean_of_known(values: np.ndarray) -> float:
    """The mean of the values that are not NaN; NaN if all are."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
