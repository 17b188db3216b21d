"""When evaluations end a run: by `eval.target` and by `eval.patience`."""

import math
import subprocess
import sys
import time

import pytest
from etils import epath

from vit_jax.config import Eval, Hosts
from vit_jax.evaluation.metric_order import MetricOrder
from vit_jax.training.upkeep import provenance
from vit_jax.training.upkeep.clock import Clock
from vit_jax.training.upkeep.goals import Goals

ACCURACY, LOSS = MetricOrder("accuracy", "max"), MetricOrder("loss", "min")


@pytest.fixture
def clock(tmp_path):
    return Clock(epath.Path(tmp_path), Hosts(), write=True)


def test_the_first_evaluation_as_good_as_the_target_ends_the_run(clock):
    goals = Goals(Eval(target=0.5), ACCURACY, {"best": None})
    assert goals.add(10, {"accuracy": 0.4, "loss": 2.0}, clock) and not goals.end_the_run()
    assert goals.add(20, {"accuracy": 0.5, "loss": 1.0}, clock)
    assert goals.end_the_run() == "accuracy 0.5 reaches config.eval.target = 0.5"
    assert not goals.add(30, {"accuracy": 0.45, "loss": 1.0}, clock)
    assert (goals.reached["step"], goals.reached["value"]) == (20, 0.5)
    assert goals.best == {
        "metric": "accuracy", "direction": "max", "value": 0.5, "step": 20, "since": 1,
    }  # fmt: skip


def test_of_a_loss_less_is_better(clock):
    goals = Goals(Eval(target=0.5, best="loss"), LOSS, {})
    assert goals.add(10, {"loss": 0.6}, clock) and not goals.end_the_run()
    assert goals.add(20, {"loss": 0.4}, clock) and goals.end_the_run().startswith(
        "loss 0.4 reaches"
    )


def test_without_a_target_patience_alone_ends_a_run(clock):
    goals = Goals(Eval(patience=2), ACCURACY, {})
    for step, accuracy in enumerate((0.5, 1.0, 0.9)):
        goals.add(step, {"accuracy": accuracy}, clock)
        assert not goals.end_the_run()
    goals.add(3, {"accuracy": 1.0}, clock)
    assert goals.end_the_run() == "no better accuracy in 2 evaluations" and goals.reached is None


def test_a_target_that_was_reached_is_kept_with_the_run_unless_it_is_another_one_now(clock):
    goals = Goals(Eval(target=0.5), ACCURACY, {})
    goals.add(10, {"accuracy": 0.6}, clock)
    saved = goals.saved()
    assert Goals(Eval(target=0.5), ACCURACY, saved).reached == goals.reached
    assert Goals(Eval(target=0.7), ACCURACY, saved).reached is None


def test_a_value_that_is_not_a_number_is_never_the_best_and_does_not_reset_patience(clock):
    goals = Goals(Eval(patience=3), ACCURACY, {})
    judged = [goals.add(n, {"accuracy": a}, clock) for n, a in enumerate((0.9, math.nan, 0.5, 0.6))]
    assert judged == [True, False, False, False] and goals.best["step"] == 0
    assert goals.end_the_run() == "no better accuracy in 3 evaluations"
    for order in (ACCURACY, LOSS):
        never = Goals(Eval(patience=2), order, {})
        assert not never.add(1, {order.metric: math.nan}, clock) and never.best is None
        again = Goals(Eval(patience=2), order, never.saved())
        assert not again.add(2, {order.metric: math.nan}, clock) and again.end_the_run()
        assert again.add(3, {order.metric: 0.1}, clock) and not again.end_the_run()


def test_what_was_saved_by_another_metric_is_not_compared_with_the_present_one(clock):
    by_accuracy = Goals(Eval(patience=2), ACCURACY, {})
    by_accuracy.add(10, {"accuracy": 0.2, "loss": 2.0}, clock)
    by_accuracy.add(20, {"accuracy": 0.2, "loss": 1.9}, clock)
    by_loss = Goals(Eval(patience=2), LOSS, by_accuracy.saved())
    assert by_loss.best is None and by_loss.add(30, {"accuracy": 0.2, "loss": 1.8}, clock)
    assert not Goals(Eval(patience=2), ACCURACY, by_accuracy.saved()).add(
        30, {"accuracy": 0.2}, clock
    )
    earlier = {"best": {"metric": "accuracy", "value": 0.3, "step": 10, "since": 1}}
    assert Goals(Eval(), ACCURACY, earlier).best == earlier["best"]


def test_an_ended_run_says_why_and_continues_with_more_patience_or_another_target(clock, caplog):
    caplog.set_level("INFO")
    goals = Goals(Eval(patience=1), ACCURACY, {})
    for step in (10, 20):
        goals.add(step, {"accuracy": 0.5}, clock)
    saved = goals.saved() | {"ended": goals.end_the_run()}
    again = Goals(Eval(patience=1), ACCURACY, saved)
    again.log_ended(20, 90, again.ended_before(saved))
    assert "step 20 of 90: no better accuracy in 1" in caplog.text
    assert "set --config.eval.patience above 1" in caplog.text
    assert Goals(Eval(patience=2), ACCURACY, saved).ended_before(saved) == ""
    by_callback = goals.saved() | {"ended": "its callback", "ended_by_goals": False}
    patient = Goals(Eval(), ACCURACY, by_callback)
    assert patient.ended_before(by_callback) == "its callback"
    patient.log_ended(20, 90, "its callback")
    assert "--config.init_from" in caplog.text


def test_the_seconds_of_a_process_count_from_its_start():
    code = (
        "import time; time.sleep(0.5); from vit_jax.training.upkeep import provenance; "
        "print(provenance.process_seconds())"
    )
    before = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert (
        0.5 < float(found.stdout) < time.monotonic() - before + 0.02
    )  # the system counts in hundredths


def test_the_commit_is_that_of_the_checkout_or_the_version(tmp_path):
    folder = tmp_path / "vit_jax"
    folder.mkdir()
    (folder / "__init__.py").touch()

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True
        )

    git("init")
    assert provenance.commit(folder).startswith(
        "vit_jax 0."
    )  # inside the checkout of something else
    git("add", ".")
    git("commit", "-m", "all")
    clean = provenance.commit(folder)
    assert len(clean) >= 7 and set(clean) <= set("0123456789abcdef")
    (folder / "__init__.py").write_text("1\n")
    assert provenance.commit(folder) == f"{clean}-dirty"
