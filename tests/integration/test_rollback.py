"""A loss that is lost on some data: back to the last checkpoint, and on without them."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax.checkpoints import reading
from vit_jax.data import sources
from vit_jax.data.order import batch_indices
from vit_jax.data.sources import digits
from vit_jax.training.upkeep.health import NonFiniteError

BAD = 17  # The examples of that step have all labels, which makes its loss a spike.


@dataclasses.dataclass(frozen=True)
class Spoiled(digits.Digits):
    """Digits, some of which are said to be all digits at once."""

    spoiled: tuple[int, ...] = ()
    multi_label: bool = True

    def __getitem__(self, index: int):
        record = super().__getitem__(index)
        labels = tuple(range(10)) if index in self.spoiled else (record.label,)
        return dataclasses.replace(record, label=labels)


@pytest.fixture
def spoiled(monkeypatch):
    def open_spoiled(config_data):
        data_set = digits.open_digits(config_data)

        def read(parts):
            source = data_set.read(parts)
            bad = batch_indices(0, BAD, 32, len(source)) if parts[0][0] == "train" else ()
            return Spoiled(source.images, source.labels, source.ids, spoiled=tuple(map(int, bad)))

        return dataclasses.replace(data_set, read=read)

    monkeypatch.setitem(sources.OPENERS, "digits", open_spoiled)


@pytest.fixture
def config(tiny_config, spoiled):
    def make(**overrides):
        options = {
            "duration": "22 steps", "checkpoint__every": "10 steps", "nonfinite": "rollback",
            "spike__factor": 1.5, "spike__memory": 5, "model__depth": 1, "objective__loss": "sigmoid",
            "eval__evaluators": (),
        }  # fmt: skip
        return tiny_config(**options | overrides)

    return make


def assert_same(workdir, other):
    a, b = (jax.tree.leaves(reading.read_weights(w)) for w in (workdir, other))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_after_a_spike_the_run_goes_on_without_its_data(config, tmp_path, caplog):
    with caplog.at_level("WARNING", logger="absl"):
        vit_jax.train(config(), tmp_path / "run")
    assert f"on without the data of steps {BAD} to {BAD}" in caplog.text
    left_out = json.loads((tmp_path / "run" / "left_out.json").read_text())
    assert left_out == [[BAD, 1]]

    # As if these data had never been there.
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "left_out.json").write_text(json.dumps(left_out))
    result = vit_jax.train(config(), tmp_path / "clean")
    assert_same(tmp_path / "run", tmp_path / "clean")
    assert result["step"] == 22


@pytest.mark.slow
def test_a_rollback_does_not_depend_on_when_a_run_logs(config, tmp_path):
    vit_jax.train(config(), tmp_path / "run")
    # As if the run had been stopped after going back, and others had looked at other times.
    (tmp_path / "again").mkdir()
    vit_jax.train(config(log__every="7 steps"), tmp_path / "again")
    assert_same(tmp_path / "run", tmp_path / "again")


def test_a_run_that_never_gets_better_ends_after_as_many_rollbacks_as_allowed(config, tmp_path):
    with pytest.raises(NonFiniteError, match="There were 2 rollbacks"):
        vit_jax.train(config(spike__factor=0.5, max_rollbacks=2), tmp_path)
    assert json.loads((tmp_path / "left_out.json").read_text()) == [[5, 1], [6, 1]]
