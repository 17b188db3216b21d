"""The command for a folder of labelled photos. It imports what it needs when it runs."""

import os
import re

from absl import flags

from vit_jax.commands import config_flags, exit_codes
from vit_jax.commands import flags as cli

FLAGS = flags.FLAGS
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}


def classify() -> None:
    """Train a classifier of your photos: PHOTOS [--time=10m] [--weights=NAME] [--out=DIR] [--config.FIELD=VALUE …]
    [--json].

    PHOTOS is a folder with a sub-folder for each class, or a CSV or JSON-lines file of path and label, or of path and
    labels: then each photo may have several, or none. All files are read once: unreadable files, copies, copies with
    different labels, and classes that are empty or tiny are listed.
    The machine is measured, and what fits the time is trained: a linear head on the features of published weights, or
    the whole model, on smaller images or on whole ones. DIR/report.html has accuracy, confusion, the surest mistakes
    and curves; DIR/commands.sh the commands that do the same by hand. The same command continues after it was stopped.
    """
    changes = config_flags.take_settings()
    flags.DEFINE_string("time", "10m", "how long it may take: 90s, 10m or 2h")
    flags.DEFINE_string(
        "weights", "auto",
        "a checkpoint of any format, or a name of 'vit_jax models --published'; auto: published weights, or without a "
        "network none; none: train from scratch",
    )  # fmt: skip
    flags.DEFINE_string("out", None, "the folder to make; by default PHOTOS-classified")
    cli.define_json()
    cli.define_register()
    photos = cli.parse_flags("PHOTOS")
    if len(photos) > 1:
        raise flags.Error(f"one folder of PHOTOS, not {' '.join(photos)}")
    seconds = _seconds(FLAGS.time)
    out = FLAGS.out or f"{os.path.splitext(os.path.abspath(photos[0]))[0]}-classified"

    from vit_jax.base import places
    from vit_jax.studies.classify import classify, text

    if not places.exists(photos[0]):
        raise flags.Error(f"there is no {photos[0]}{places.nearest_existing(photos[0])}")
    exit_codes.end_at_once_when_interrupted()
    result = classify(photos[0], out, seconds=seconds, weights=FLAGS.weights, changes=changes)
    cli.print_result(result, text(result))


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise flags.Error(f"--time={text} must be a time, such as 90s, 10m or 2h")
    return seconds
