"""A host that is too slow for its devices is named while the run trains: real files, decoded by one thread."""

import json
import re

import cv2
import numpy as np

import vit_jax
from vit_jax.devices import local
from vit_jax.training.upkeep import progress


def test_a_run_that_waits_for_decoding_names_its_cores_and_what_the_step_could_take(
    tiny_config, tmp_path, monkeypatch, caplog
):
    pixels = np.random.default_rng(0).integers(0, 255, (900, 900, 3), np.uint8)
    for label in range(10):  # as digits have, for which the step is compiled already
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        assert cv2.imwrite(str(tmp_path / "data" / str(label) / "0.jpg"), pixels)
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    config = tiny_config(
        data__name="folder", data__path=str(tmp_path / "data"), data__eval_split="train", data__holdout=0.0,
        data__threads=1, data__prefetch=1, duration="9 steps", log__every="1 steps", checkpoint__every="0 steps",
        eval__every="0 steps", eval__evaluators=(),
    )  # fmt: skip
    vit_jax.train(config, tmp_path / "run")
    (warning,) = [text for text in caplog.messages if "waits for data" in text]
    pattern = (
        rf"1 decoding threads on {local.cores()} cores for 8 devices make about ([\d,]+) images/s "
        r"of the ([\d,]+) that this step takes.*What helps decoding"
    )
    made, possible = (int(rate.replace(",", "")) for rate in re.search(pattern, warning).groups())
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert made in [round(line.get("images_per_second", 0)) for line in lines]
    assert possible > made
