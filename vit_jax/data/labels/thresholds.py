"""Tables of class and threshold, in CSV: how probable each class has to be to count as predicted. How thresholds are
chosen is in `evaluation.decisions`.
"""

import collections
import csv
import io
from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.base import outputs
from vit_jax.base.errors import ConfigError, reason
from vit_jax.data.sources.text import read_text

_COLUMNS = ("class", "threshold")


def write_thresholds(path: epath.Path, classes: Sequence[str], thresholds: np.ndarray) -> None:
    """Writes thresholds (classes,) as a table of class and threshold."""
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows(zip(map(outputs.as_cell, classes), thresholds.tolist(), strict=True))


def read_thresholds(path: epath.Path, classes: Sequence[str]) -> tuple[float, ...]:
    """The thresholds of `classes`, in their order, from a file of `write_thresholds` or a table of the same columns.

    Raises:
      ConfigError: the file is no such table, or does not have each of the classes once, with a number from 0 to 1.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_text(path)))
        rows = [(row[_COLUMNS[0]], float(row[_COLUMNS[1]])) for row in reader]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is no table of the columns class and threshold, as the evaluator classification writes with "
            f"thresholds='f1' and out=FOLDER ({reason(error)})"
        ) from None
    by_name = dict(rows)
    cells = [outputs.as_cell(name) for name in classes]
    lines = collections.Counter(name for name, _ in rows)
    expected = collections.Counter(cells)
    for name in {**expected, **lines}:
        if lines[name] != 1 or name not in expected:
            raise ConfigError(
                f"{path} has {lines[name]} lines for the class {name!r}: it needs one for each of the {len(cells)} "
                "classes of the model, and no others"
            )
        if not 0 <= by_name[name] <= 1:
            raise ConfigError(
                f"{path}: the threshold of {name!r} is {by_name[name]}, and must be from 0 to 1"
            )
    return tuple(by_name[name] for name in cells)
