"""`vit_jax report` on runs made up with known curves: what was varied, means, ranges, states, and files
that are not whole.
"""

import json
import math
import os
import re
import resource
import time

import numpy as np
import pytest
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.pictures import letters, tiles
from vit_jax.pictures.plot import Plot
from vit_jax.studies import compare, figures, runs
from vit_jax.studies.report import report

RECIPE = """
from vit_jax.config import default_config

def get_config():
    config = default_config()
    config.update_from_flattened_dict({fields!r})
    return config
"""


def made_up(folder, fields, accuracy, *, steps=20, every=10, done=True, **extra):
    """A run's folder, as training leaves it: `accuracy` at the end, half of it in the middle."""
    folder.mkdir(parents=True)
    (folder / "config.py").write_text(RECIPE.format(fields=fields))
    lines = []
    for step in range(every, steps + 1, every):
        scalars = {"loss": 10.0 / step, "images_per_second": 100.0, "step_seconds": 2.0}
        scalars |= {"model_flops_per_second": 5e17, "goodput": 0.5, "learning_rate": 1e-3}
        lines.append({"step": step, **scalars, **extra})
    lines.append({"step": steps // 2, "eval/accuracy": accuracy / 2})
    lines.append({"step": steps, "eval/accuracy": accuracy, "eval/loss": 1 - accuracy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "goodput.json").write_text('{"seconds": {"steps": 30, "compile": 10}, "written": 0}')
    if done:
        (folder / "result.json").write_text(json.dumps({"accuracy": accuracy, "step": steps}))
    return folder


def two_rates_three_seeds(folder):
    for rate, base in ((0.01, 0.5), (0.001, 0.7)):
        for seed in range(3):
            fields = {"optim.lr": rate, "seed": seed, "log.every": f"{10 + seed} steps"}
            made_up(folder / f"lr{rate}" / f"seed{seed}", fields, base + seed / 8)
    return folder


def test_what_was_varied_is_found_and_means_and_ranges_over_seeds_are_exact(tmp_path):
    result = report([two_rates_three_seeds(tmp_path / "E")], tmp_path / "R")
    assert result["varied"] == ["optim.lr"] and result["metric"] == "accuracy"
    low, high = result["settings"]  # in the order of the rate
    assert [one["setting"] for one in (low, high)] == [{"optim.lr": 0.001}, {"optim.lr": 0.01}]
    values = np.array([0.7, 0.825, 0.95])
    assert low["mean"] == math.fsum(values) / 3
    assert (low["low"], low["high"], low["n"]) == (0.7, 0.95, 3)
    assert low["std"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert high["states"] == {"done": 3} and len(high["runs"]) == 3
    table = (tmp_path / "R" / "report.md").read_text()
    assert re.search(r"\| 0\.001 +\| 3 +\| 82\.50 % +\| 70\.00 … 95\.00 % ", table)
    for name in ("by_setting", "over_optim_lr", "curve_loss", "curve_eval_accuracy"):
        assert (tmp_path / "R" / f"{name}.png").exists() and f"{name}.png" in table
    page = (tmp_path / "R" / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page) and "http" not in page


def test_shares_of_the_data_stand_in_order_and_are_drawn_over(tmp_path):
    for split, accuracy in (("train", 0.9), ("train[:5%]", 0.5), ("train[:20%]", 0.7)):
        made_up(tmp_path / "E" / str(accuracy), {"data.train_split": split}, accuracy)
    result = report([tmp_path / "E"], tmp_path / "R")
    found = [one["setting"]["data.train_split"] for one in result["settings"]]
    assert found == ["train[:5%]", "train[:20%]", "train"]
    assert (tmp_path / "R" / "over_data_train_split.png").exists()
    assert compare.as_number("data.train_split", "train+test[:5%]") is None
    table = (tmp_path / "R" / "report.md").read_text()
    assert "| training loss | loss " in table and re.search(r"0\.500 +\| 0\.100", table)


def test_numbers_of_images_of_each_class_are_an_axis_and_have_a_short_name(tmp_path):
    for count, accuracy in ((5, 0.5), (50, 0.7), (500, 0.9)):
        split = "+".join(f"train[{n}:{n + count}]" for n in (0, 1000))
        made_up(tmp_path / "E" / str(count), {"data.train_split": split}, accuracy)
    found = compare.compare(runs.find_runs([tmp_path / "E"]))
    assert "config.data.train_split is 10 images, 100 images, 1,000 images" in found.notes[0]
    assert [group.label for group in found.groups] == ["10 images", "100 images", "1,000 images"]
    assert [row[0] for row in compare.rows(found)] == [
        "training images",
        *(g.label for g in found.groups),
    ]
    assert list(figures.over_field(found)) == ["data.train_split"]
    made_up(
        tmp_path / "E" / "all", {"data.train_split": "train"}, 0.9
    )  # 100 % are no number of images
    assert not figures.over_field(compare.compare(runs.find_runs([tmp_path / "E"])))


def test_a_stage_starts_from_a_run_of_the_comparison_by_its_name(tmp_path):
    made_up(tmp_path / "E" / "pretrained", {}, 0.5)
    start = {"init_from": str(tmp_path / "E" / "pretrained")}
    made_up(tmp_path / "E" / "tuned", start, 0.7)
    result = report([tmp_path / "E"], tmp_path / "R")
    assert [one["setting"] for one in result["settings"]] == [
        {"init_from": ""}, {"init_from": "pretrained"},
    ]  # fmt: skip


def follow_up(folder, name, values):
    """What `evaluate --follow` leaves beside a run: the values of ImageNet's and V2's accuracy by step."""
    lines = [
        {
            "step": step,
            "suite": name,
            "settings": {},
            "eval/imagenet/accuracy": value,
            "eval/v2/accuracy": 0.1,
        }
        for step, value in values.items()
    ]
    (folder / "evaluations").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "evaluations" / f"{name}.jsonl").write_text(text + '{"step": 7, "ev')


def test_evaluations_beside_the_runs_are_shown_with_their_best(tmp_path):
    for seed in (0, 1):
        run = made_up(tmp_path / "E" / f"seed{seed}", {"seed": seed}, 0.5)
        follow_up(run, "suite", {10: 0.25, 15: 0.75, 20: 0.5 + seed / 8})
    result = report([tmp_path / "E"], tmp_path / "R")
    first = {"run": "seed0", "evaluation": "suite: imagenet/accuracy", "step": 20, "value": 0.5}
    assert result["beside"][0] == first | {"best": 0.75, "best_step": 15}
    assert [row["evaluation"] for row in result["beside"][:2]] == [
        "suite: imagenet/accuracy", "suite: v2/accuracy",
    ]  # fmt: skip
    assert result["metric"] == "accuracy" and result["settings"][0]["states"] == {"done": 2}
    text = (tmp_path / "R" / "report.md").read_text()
    row = ("seed1", "suite: imagenet/accuracy", "20", "62.50 %", "75.00 %", "15")
    assert re.search(r" +\| +".join(map(re.escape, row)), text)
    assert "![Beside the run, suite: imagenet/accuracy](beside_suite_imagenet_accuracy.png)" in text
    assert "1 lines of suite.jsonl cannot be read" in text


def test_runs_in_buckets_and_folders_are_reported_with_their_names(tmp_path, bucket):
    for name in ("a", "b"):
        run = made_up(tmp_path / "runs" / name, {"seed": 1, "optim.lr": 0.1 * len(name)}, 0.5)
        for path in run.iterdir():
            (epath.Path(bucket) / "runs" / name / path.name).write_bytes(path.read_bytes())
    result = report([f"{bucket}/runs"], f"{bucket}/report")
    assert [name for group in result["settings"] for name in group["runs"]] == ["a", "b"]
    assert (epath.Path(bucket) / "report" / "report.html").exists()
    mixed = report([f"{bucket}/runs/a", tmp_path / "runs/b"], tmp_path / "R")
    names = {name for group in mixed["settings"] for name in group["runs"]}
    assert names == {f"{bucket}/runs/a", str(tmp_path / "runs/b")}


def test_no_line_is_drawn_over_a_field_that_others_change_with(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(Plot, "line", lambda self, xs, *_, **__: lines.append(list(xs)))
    for size, rate in ((32, 0.1), (48, 0.2)):
        made_up(tmp_path / "E" / str(size), {"data.image_size": size, "optim.lr": rate}, 0.5)
    assert set(figures.over_field(compare.compare(runs.find_runs([tmp_path / "E"])))) == {
        "data.image_size"
    }
    assert lines == []
    for size in (32, 48):
        made_up(tmp_path / "F" / str(size), {"data.image_size": size}, 0.5)
    figures.over_field(compare.compare(runs.find_runs([tmp_path / "F"])))
    assert lines == [[32, 48]]


def test_each_size_that_is_scaled_has_a_curve_through_the_common_centre(tmp_path, monkeypatch):
    lines = {}
    monkeypatch.setattr(
        Plot,
        "line",
        lambda self, xs, ys, colour, label: lines.setdefault(label, (list(xs), list(ys))),
    )
    # Depth, patch: accuracy, operations.
    settings = {
        (2, 8): (0.5, 1),
        (4, 8): (0.7, 2),
        (1, 8): (0.4, 0.5),
        (2, 4): (0.6, 4),
        (4, 4): (0.8, 8),
    }
    for (depth, patch), (accuracy, work) in settings.items():
        fields = {"model.depth": depth, "model.patch": patch}
        folder = tmp_path / f"{depth}-{patch}"
        made_up(folder, fields, accuracy, model_flops_per_second=work * 25e15)
    figures.by_dimension(compare.compare(runs.find_runs([tmp_path])))
    assert lines == {
        "depth": ([0.5, 1, 2], [40, 50, 70]), "patch size": ([1, 4], [50, 60]),
        "depth, patch size": ([1, 8], [50, 80]),
    }  # fmt: skip


def test_fields_that_change_together_are_one_choice_and_a_name_stands_for_its_sizes(tmp_path):
    for name, rate in (("ViT-S/16", 0.1), ("ViT-Ti/16", 0.2)):
        made_up(tmp_path / name[4], {"model.name": name, "optim.lr": rate}, 0.5)
    found = compare.compare(runs.find_runs([tmp_path]))
    assert found.varied == ["model.name"]
    assert {"optim.lr", "model.width", "model.heads"} <= set(found.together["model.name"])


def test_of_width_and_heads_that_change_together_the_width_is_said_and_the_name_comes_first(
    tmp_path,
):
    sizes = [("ViT-S/32", 4, 64), ("ViT-S/16", 4, 64), ("ViT-S/16", 8, 64), ("ViT-S/16", 4, 128)]
    for number, (name, depth, width) in enumerate(sizes):
        fields = {"model.name": name, "model.depth": depth, "model.width": width}
        made_up(tmp_path / str(number), fields | {"model.heads": width // 16}, 0.5)
    found = compare.compare(runs.find_runs([tmp_path]))
    assert found.varied == ["model.name", "model.depth", "model.width"]
    assert found.groups[0].label == "ViT-S/16, depth 4, width 64"


def test_operations_speed_and_goodput_are_those_that_were_logged(tmp_path):
    (run,) = runs.find_runs([made_up(tmp_path / "one", {}, 0.5)])
    assert run.exaflops == 20 * 2.0 * 5e17 / 1e18 and run.median("images_per_second") == 100
    assert run.shares == {"steps": 0.75, "compile": 0.25} and run.name == "one"


def test_runs_that_are_under_way_or_diverged_are_shown_as_such_and_do_not_count(tmp_path):
    made_up(tmp_path / "a", {"seed": 0}, 0.8)
    made_up(tmp_path / "b", {"seed": 1}, 0.2, done=False)
    made_up(tmp_path / "c", {"seed": 2}, 0.1, done=False, loss=None)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.py").write_text(RECIPE.format(fields={"seed": 3}))
    result = report([tmp_path], tmp_path / "R")
    (one,) = result["settings"]
    assert one["states"] == {"done": 1, "unfinished": 1, "diverged": 1, "no metrics": 1}
    assert (one["mean"], one["n"], one["std"]) == (0.8, 1, None)
    page = (tmp_path / "R" / "report.md").read_text()
    assert "| diverged" in page and "| unfinished" in page


def test_a_run_that_was_begun_again_after_its_end_is_not_done(tmp_path):
    folder = made_up(tmp_path / "a", {}, 0.8)
    (folder / "result.json").write_text('{"accuracy": 0.8, "step": 10}')
    assert runs.find_runs([folder])[0].state == "unfinished"


def test_lines_that_are_cut_and_files_that_are_damaged_are_left_out_and_said(tmp_path):
    folder = made_up(tmp_path / "a", {}, 0.8)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "loss": 0.')
    (folder / "goodput.json").write_text("{")
    other = made_up(tmp_path / "b", {}, 0.6)
    (other / "config.py").write_text("def get_config():\n    return 1 / 0")
    (other / "metrics.jsonl").write_bytes(b"\0\xff\n[1, 2]\n")
    first, second = runs.find_runs([tmp_path])
    assert first.state == "done" and first.notes == [
        "1 lines of metrics.jsonl cannot be read and are skipped."
    ]
    assert second.state == "no metrics" and second.config is None
    assert any("another version" in note for note in second.notes)
    assert report([tmp_path], tmp_path / "R")["settings"]


def test_runs_of_different_data_are_compared_with_a_warning(tmp_path):
    made_up(tmp_path / "a", {"data.name": "digits"}, 0.8)
    made_up(tmp_path / "b", {"data.name": "cifar10"}, 0.6)
    (note,) = report([tmp_path], tmp_path / "R")["notes"]
    assert 'config.data.name is "digits", "cifar10"' in note


def test_a_step_that_a_restart_repeated_counts_as_it_was_last(tmp_path):
    folder = made_up(tmp_path / "a", {}, 0.8)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 7.0}\n')
    steps, values = runs.find_runs([folder])[0].curves["loss"]
    assert list(steps) == [10, 20] and list(values) == [7.0, 0.5]


def test_the_command_prints_settings_and_where_the_report_is(tmp_path, command):
    two_rates_three_seeds(tmp_path / "E")
    code, out, _ = command("report", tmp_path / "E", f"--out={tmp_path / 'R'}")
    assert code == 0 and "optim.lr=0.01: accuracy 62.50 % (50.00 … 75.00 %), 3 done" in out
    assert out.rstrip().endswith("report.html")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda folder: folder / "none", "is no folder"),
        (lambda folder: folder, "holds no run"),
    ],
)
def test_a_folder_without_runs_is_said(tmp_path, make, words):
    with pytest.raises(ConfigError, match=words):
        report([make(tmp_path)], tmp_path / "R")


@pytest.mark.slow
def test_fifty_runs_of_ten_thousand_lines_take_seconds(tmp_path):
    line = {f"a_metric_of_training_{n}": 0.123456789 for n in range(10)}
    for seed in range(50):
        fields = {"seed": seed % 5, "optim.lr": float(seed // 5 + 1)}
        made_up(tmp_path / f"run{seed}", fields, 0.5, steps=10_000, every=1, **line)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()  # of this process alone, whatever else runs
    report([tmp_path], tmp_path / "R")
    took = time.process_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    size = os.path.getsize(tmp_path / "run0" / "metrics.jsonl")
    print(f"{took:.1f} s, {grown / 1024:.0f} MiB more, {size / 2**20:.1f} MiB a run")
    assert took <= 10 and grown <= 500 * 1024


def test_the_name_of_an_axis_stands_beside_its_numbers_within_the_picture():
    plot = Plot("Rank", x="layer", y="effective rank", size=(400, 200), whole=True)
    plot.line([1, 2, 3], [26.177, 25.3, 24.646])
    pixels = np.asarray(plot.image())
    assert (pixels[:, :4] == 255).all()  # nothing is cut off at the left


@pytest.mark.parametrize(
    "names", [{"x": "a multiply-add counted as 2, " * 5}, {"y": "metric " * 20}]
)
def test_a_long_name_of_an_axis_is_wrapped_and_not_cut(names):
    plot = Plot("Cost", **{"x": "step", "y": "loss"} | names)
    plot.line([1, 2, 3], [1, 2, 3])
    pixels = np.asarray(plot.image())
    edges = (pixels[:, :2], pixels[:, -2:], pixels[-2:])
    assert all((edge == 255).all() for edge in edges)


@pytest.mark.parametrize("values, end", [((90, 99.9), 100), ((90, 120), 121.5), ((3, 5), 5.1)])
def test_percentages_of_a_whole_end_at_100(values, end):
    plot = Plot("Accuracy", x="accuracy [%]", y="accuracy [%]")
    plot.line(values, values)
    plot.image()
    assert plot._axes.get_ylim()[1] == pytest.approx(end) == plot._axes.get_xlim()[1]


def test_a_mean_over_runs_is_drawn_where_all_were_evaluated_and_points_are_seen():
    curves = [
        (np.array([10, 20, 40]), np.array([1.0, 2.0, 4.0])),
        (np.array([20, 30, 40]), np.ones(3)),
    ]
    steps, values = figures._together(curves)
    assert steps.tolist() == [20, 40] and values.tolist() == [[2, 4], [1, 1]]
    plot = Plot("Accuracy", x="step", y="accuracy")
    plot.line([1, 2], [3, 4], marked=True)
    plot.line([1, 2, 3], [3, 4, 5], marked=True)
    two, three = plot._axes.get_lines()
    assert (two.get_linewidth(), two.get_marker(), three.get_marker()) == (0, "o", "o")
    assert three.get_linewidth() > 0


def test_letters_that_the_font_lacks_have_a_name_or_a_number_and_long_texts_an_end():
    assert letters.drawable("grün Ñandú ж") == "grün Ñandú ж"
    assert letters.drawable("u\u0308") == "ü"  # as macOS writes file names
    assert letters.drawable("\U0001f415\u732b") == "[dog]U+732B"
    (fitted,) = [letters.fitted("a long name of a class", 12, 60)]
    assert fitted.endswith("…") and letters.font(12).getlength(fitted) <= 60
    missing = letters.font(12).getmask("\uffff")
    assert bytes(letters.font(12).getmask("ü")) != bytes(missing)


def test_numbers_along_an_axis_do_not_touch():
    plot = Plot("Accuracy", x="learning rate", y="accuracy")
    plot.line([0.001125, 0.003], [0.7, 0.8])
    plot.image()
    boxes = [label.get_window_extent() for label in plot._axes.get_xticklabels()]
    assert all(a.x1 + 10 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False))


def test_a_setting_in_short_leaves_out_options_that_its_model_does_not_have():
    setting = {"model.depth": None, "model.name": "BiT-R26x1", "model.width_factor": 0.5}
    assert compare.in_short(setting) == "BiT-R26x1, width factor 0.5"


def test_the_bar_beside_a_thin_picture_shows_its_colours():
    image = tiles.draw_tiles(
        "Rows", [np.zeros((1, 8))] * 4, columns=2, bar=tiles.Bar(0, 1, "share")
    )
    red, green, blue = np.moveaxis(np.asarray(image).astype(int), -1, 0)
    assert ((red < 90) & (green > 120) & (blue > 110)).sum() > 100  # its middle, of no tile
