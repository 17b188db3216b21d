"""Real processes, really killed: what is left goes on to the very same bits."""

import json
import random
import re
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.conftest import QUICK
from tests.waiting import PATIENCE, until
from vit_jax import objectives
from vit_jax.base.patterns import named
from vit_jax.checkpoints import reading

STEPS = 40
ARGUMENTS = ("--config=configs/digits.py", f"--config.duration={STEPS} steps", "--config.checkpoint.every=5 steps",
             "--config.log.every=1 steps")  # fmt: skip


def start(cli, workdir, *more, **options):
    return cli("train", *ARGUMENTS, *more, f"--workdir={workdir}", tiny=True, **options)


def steps_done(workdir) -> int:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def losses(workdir) -> dict[int, float]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def saving(workdir) -> bool:
    """Whether a checkpoint is half written."""
    return any("tmp" in p.name for p in (workdir / "checkpoints").glob("*"))


def bits(workdir) -> dict[str, np.ndarray]:
    params = reading.read_weights(workdir).params
    return named(params)


# SIGTERM of a run is that of `test_tiers.py` and `test_signals.py` too.
@pytest.mark.parametrize(
    ("these", "steps"),
    [(slice(2, 3), 24), pytest.param(slice(4), STEPS, marks=pytest.mark.slow)],
)
def test_killed_and_started_again_equals_the_uninterrupted_run_bit_for_bit(
    cli, tmp_path, these, steps
):
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    shorter = (f"--config.duration={steps} steps", "--config.eval.evaluators=()")
    whole = start(cli, uninterrupted, *shorter)
    assert whole.wait() == 0, whole.stderr.read()

    ways = [
        ("SIGKILL before the first step", (killed / "checkpoints").exists, signal.SIGKILL),
        ("SIGKILL between steps", lambda: steps_done(killed) >= 8, signal.SIGKILL),
        (
            "SIGKILL during a save",
            lambda: (tmp_path / "fifo").exists() and saving(killed),
            signal.SIGKILL,
        ),
        ("SIGTERM", lambda: steps_done(killed) >= 33, signal.SIGTERM),
    ]
    in_a_save = {
        "module": "tests.integration.observed",
        "env": {"OBSERVED": json.dumps({"folder": str(tmp_path), "saved": 20})},
    }
    for way, condition, number in ways[these]:
        process = start(cli, killed, *shorter, **(in_a_save if "save" in way else {}))
        until(condition, process)
        process.send_signal(number)
        code = 42 if number == signal.SIGTERM else -number
        assert process.wait(timeout=PATIENCE) == code, f"{way}: {process.stderr.read()}"
    last = start(cli, killed, *shorter)
    out, err = last.communicate(timeout=PATIENCE)
    assert last.returncode == 0, err
    assert "resumed at step" in err

    expected, got = bits(uninterrupted), bits(killed)
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_array_equal(expected[name], got[name], err_msg=name)
    # The metrics of a step that was repeated are the same as well.
    first, second = losses(uninterrupted), losses(killed)
    assert {s: first[s] for s in second} == second


def all_bits(workdir) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint: parameters, teacher, centres, optimizer."""
    handler, path = ocp.PyTreeCheckpointHandler(), reading.find_checkpoint(workdir) / "state"
    whole = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(path).tree
    )
    return named(handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=whole)))


def alarms(log: str) -> list[str]:
    """Errors in a log, such as those of audits and replays."""
    return re.findall(r"^\S+ E .*", log, re.MULTILINE)


# The runs of each recipe, by their folders; flags; and what must be among the last one's state.
RECIPES = {
    "mae": (("",), (), "params_objective"),
    "dino": (
        ("",),
        ("--config.objective.prototypes=16", "--config.objective.head_hidden=16"),
        "teacher_objective",
    ),
    # Half of its steps have a Gram teacher, a quarter views of other sizes.
    "dino_continue": (
        ("",),
        (
            "--config.model.name=ViT-mu/4",
            "--config.objective.prototypes=16",
            "--config.objective.head_hidden=16",
        ),
        "anchor_variables",
    ),
    "noisy_student": (
        ("teacher", "round_1", "round_2"), ("--config.pseudo.confidence=0.0",), "params",
    ),
    "masked_patches": (("",), (), "params_objective"),
    "deit3": (("pretrain", "at_32"), (), "params"),
    "distill": (("",), ("--config.objective.teacher={teacher}",), "params"),
    "features": (
        ("",),
        ("--config.objective.teachers=('{teacher}','{teacher}')", "--config.objective.hidden=8"),
        "objective_variables",
    ),
    "features with phi_s": (
        ("",),
        (
            "--config.objective.teachers=('{teacher}',)", "--config.objective.standardize=phi_s",
            "--config.objective.sample=5", "--config.objective.adaptor=block",
        ),
        "objective_variables",
    ),
    "flexivit": (("",), ("--config.init_from={teacher}",), "params"),
    "segmentation": (("",), ("--config.init_from={teacher}",), "params_objective"),
    "segmentation of things": (
        ("",), ("--config.init_from={teacher}", "--config.data.name=digit_things"), "params_objective",
    ),
    "image_text": (("",), (), "params_objective"),
    "image_text on a frozen tower": (
        ("",),
        (
            "--config.objective.image_blocks=1", "--config.objective.image_drop_path=0.3",
            "--config.model.pool=token", "--config.optim.freeze=('(?!objective/).*',)",
        ),
        "params_objective",
    ),
    "sum": (("",), (), "params_objective"),
    "sum of two on one pass": (
        ("",),
        (
            "--config.objective.terms=(('image_text',{{'text_depth':1}}),('features',{{'teachers':('{teacher}',),"
            "'hidden':8}}),('masked_patches',{{'start':'20 steps'}}))",
        ),
        "objective_variables",
    ),
    "sum with labels": (
        ("",),
        (
            "--config.data.name=digits", "--config.objective.tokenizer=", "--config.eval.evaluators=('accuracy',)",
            "--config.objective.terms=(('supervised',{{}}),('features',{{'teachers':('{teacher}',),'hidden':8,"
            "'weight':0.5}}),('masked_patches',{{'start':'20 steps'}}))",
        ),
        "objective_variables",
    ),
    # Its moving average begins at step 15.
    "sum:smoke,dino": (
        ("",),
        (
            "--config.objective.terms=(('image_text',{{'text_depth':1}}),('dino',{{'start':'15 steps',"
            "'prototypes':16,'head_hidden':16,'bottleneck':8,'temperature_warmup':'0 steps'}}))",
        ),
        "teacher_objective",
    ),
    "gsam": (("",), (), "params"),
    # The number of images varies by step.
    "naflex": (
        ("",), ("--config.data.native_lengths=(16,36)", "--config.data.native_budget=288"), "params",
    ),
    "gsam with adamuon": (("",), ("--config.optim.name=adamuon",), "params"),
    "gsam with soap": (
        ("",), ("--config.optim.name=soap", "--config.optim.basis_every=3"), "params",
    ),
}  # fmt: skip


def test_every_objective_is_killed():
    learned = {name for recipe in RECIPES if (name := recipe) in objectives.OBJECTIVES}
    assert learned | {"supervised"} == set(objectives.OBJECTIVES)  # that above, and `gsam`


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_ten_times_at_random_moments_the_whole_state_is_the_same_to_the_bit(
    cli, tmp_path, recipe
):
    runs, flags, part = RECIPES[recipe]
    teacher = tmp_path / "a teacher"
    if any("{teacher}" in flag for flag in flags):
        process = cli("train", *ARGUMENTS, f"--workdir={teacher}", tiny=True)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    flags = tuple(flag.format(teacher=teacher) for flag in flags)
    # On two devices, over which all of the state is sharded but parameters; audited all the time.
    audits = ("--config.audit.every=1", "--config.audit.replay_every=5")
    shared = ("--config.mesh.fsdp_min_size=0", *audits)
    file, _, arg = recipe.split()[0].partition(":")
    config = f"--config=configs/{file}.py:{arg or 'smoke'}"
    flags = (config, *ARGUMENTS[1:], *flags, *shared)
    devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {QUICK}"}

    def start(workdir):
        return cli("train", *flags, f"--workdir={workdir}", tiny=True, env=devices)

    def done() -> int:
        return sum(steps_done(killed / run) for run in runs)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(whole)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and not alarms(err), err
    chance, total = random.Random(recipe), STEPS * len(runs)
    early = [chance.randrange(total // 2) for _ in range(7)]
    late = [chance.randrange(total // 2, total - 5) for _ in range(3)]
    for step in sorted(early + late):
        process = start(killed)
        until(lambda step=step: done() >= step, process)
        # Before the last run there is time to be killed while it is compiled, or a teacher labels.
        time.sleep(chance.uniform(0, 1 if step < total - STEPS else 0.02))
        process.kill()
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL and not alarms(err), err
    process = start(killed)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and not alarms(err), err
    for run in runs:
        expected, found = all_bits(whole / run), all_bits(killed / run)
        labels = [dict(np.load(w / run / "pseudo_labels.npz")) for w in (whole, killed)
                  if run.startswith("round")]  # fmt: skip
        assert len(labels) in (0, 2)
        for arrays, of_teacher in zip((expected, found), labels, strict=False):
            arrays |= of_teacher
        assert expected.keys() == found.keys() and any(name.startswith(part) for name in found)
        for name in expected:
            np.testing.assert_array_equal(expected[name], found[name], err_msg=f"{run} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["stablehlo", "onnx"])
def test_an_export_that_is_killed_leaves_no_file_of_that_name_and_the_next_is_whole(
    cli, run_cli, tmp_path, to
):
    code, _, err = run_cli("train", *ARGUMENTS, f"--workdir={tmp_path / 'run'}", tiny=True)
    assert code == 0, err
    suffix = {"stablehlo": ".zip", "onnx": ".onnx"}[to]
    arguments = ("export", f"--checkpoint={tmp_path / 'run'}", f"--to={to}")
    files = [tmp_path / name / f"model{suffix}" for name in ("whole", "killed")]
    for file in files:
        file.parent.mkdir()
    code, _, err = run_cli(*arguments, f"--out={files[0]}")
    assert code == 0, err
    for _ in range(3):  # while it is being written, however long that takes
        process = cli(*arguments, f"--out={files[1]}")
        until(lambda: any(files[1].parent.iterdir()), process)
        process.kill()
        assert process.wait(timeout=PATIENCE) == -signal.SIGKILL
        if files[1].exists():  # the kill came after it was complete
            assert files[1].stat().st_size == files[0].stat().st_size
            files[1].unlink()
    code, _, err = run_cli(*arguments, f"--out={files[1]}")
    assert code == 0, err
    assert [path.name for path in files[1].parent.iterdir()] == [files[1].name]
    assert files[1].stat().st_size == files[0].stat().st_size
