"""Which images are judged when `vit_jax evaluate` gets other data than the run was trained on: all of them, where
the data has no splits of its own, since none had to be kept from training.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any

from etils import epath

from vit_jax import evaluation
from vit_jax.base import places
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.settings import named_entries
from vit_jax.config import Config
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.prepared import DESCRIPTION
from vit_jax.evaluation.features import FeatureEvaluator

_SPLIT_BY_SHARE = ("folder", "tar")


def judge_whole(
    config: Config, trained_on: Mapping[str, Any], mark: str, changed: Collection[str]
) -> Config:
    """`config` with evaluators that judge all of its data set, if that has no splits and is not the one that the
    run was trained on. Those that learn from some of the examples keep the held-out share.

    Args:
      config: to evaluate with.
      trained_on: the run's config; {} if it is not known.
      mark: fingerprint of the examples that the run was trained on; '' if it is not known.
      changed: fields of the config that the user set; how data is split stays if it is among them.
    """
    data = config.data
    by_user = {"data.holdout", "data.holdout_by", "data.eval_split"} & set(changed)
    if data.name not in _SPLIT_BY_SHARE or by_user or _is_training_data(data, trained_on, mark):
        return config
    # A slice of the run's training examples means nothing in other data.
    split = "test" if data.eval_split.startswith("train") else data.eval_split
    whole = {"holdout": 1.0, "eval_split": split}
    entries = tuple(_with_data(entry, whole) for entry in config.eval.evaluators or ("accuracy",))
    return dataclasses.replace(config, eval=dataclasses.replace(config.eval, evaluators=entries))


def judged_images(data: Data, images: int) -> str:
    """A sentence on what an evaluator judges.

    Args:
      data: the evaluator's section `config.data`.
      images: how many examples it has.
    """
    where = (
        f"evaluating on {images:,} images of {data.path or data.name}, split {data.eval_split!r}"
    )
    if data.name not in _SPLIT_BY_SHARE:
        return where
    share = (
        "all images" if data.holdout == 1 else f"the share config.data.holdout = {data.holdout:g}"
    )
    return f"{where} (where the data has no splits: {share})"


def _with_data(entry, fields: dict):
    """An entry of `config.eval.evaluators` with other fields of `config.data`; what it sets itself stays."""
    ((name, options),) = named_entries("eval.evaluators", (entry,))
    evaluator = evaluation.EVALUATORS.get(name)
    if evaluator is None or issubclass(evaluator, FeatureEvaluator):
        return entry
    own = dict(options.get("data", {}))
    if {"name", "path"} & set(own):
        return entry
    return name, options | {"data": fields | own}


def _is_training_data(data: Data, trained_on: Mapping[str, Any], mark: str) -> bool:
    """Whether `data` is what a run was trained on, at its old place or at another, or lies inside of it, or around
    it.
    """
    if not trained_on:
        return False
    path, its = places.absolute(data.path), trained_on["data"]
    known = [its["path"], trained_on["pseudo"]["data"], *(text for text, _ in its["mixture"])]
    if its["name"] == "prepared":
        description = places.read_json(epath.Path(its["path"]) / DESCRIPTION)
        known.append((description or {}).get("source", ""))
    if any(_nested(path, places.absolute(place)) for place in known if place):
        return True
    if not mark:
        return False
    as_trained = {n: its[n] for n in ("train_split", "holdout", "holdout_by")}
    # Earlier versions did not know them.
    newer = ("examine", "holdout_from", "layout", "mask_files", "label_separator")
    as_trained |= {name: its[name] for name in newer if name in its}
    try:
        source = sources.open_source(
            dataclasses.replace(data, **as_trained), as_trained["train_split"]
        )
        return fingerprint.same(mark, source.fingerprint())
    except (ConfigError, UserError):
        return False


def _nested(first: str, other: str) -> bool:
    """Whether two paths are the same, or one contains the other."""
    if not places.in_bucket(first):
        first = os.path.realpath(first)
    if not places.in_bucket(other):
        other = os.path.realpath(other)
    first, other = first.rstrip("/") + "/", other.rstrip("/") + "/"
    return first.startswith(other) or other.startswith(first)
