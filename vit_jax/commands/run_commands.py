"""The commands that start runs and compare them: `train`, `sweep`, `vtab`, `plan`, `report`. Each imports
what it needs when it runs, so that `--help` is instant.
"""

import atexit
import gc
from typing import TYPE_CHECKING

from absl import flags

from vit_jax.commands import config_flags, exit_codes
from vit_jax.commands import flags as cli

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from vit_jax.planning.elsewhere import Elsewhere

FLAGS = flags.FLAGS


def train() -> None:
    """Train or fine-tune a model: --config=RECIPE[:ARGUMENT] --workdir=DIR [--config.FIELD=VALUE …] [--report]
    [--json].

    RECIPE is a name that 'vit_jax recipes' lists, or a Python file. A run that was begun in the workdir continues.
    A recipe of several runs (experiments/…) trains one after the other, each in a folder of the workdir, and ends
    with a report. With --report a run of a classifier ends with a page, WORKDIR/report/report.html: accuracy,
    confusion with class names, the surest mistakes, and curves. With --dry_run nothing is trained: the resolved config
    is printed as a recipe that trains the same, headed by its model, parameters, data and steps; with
    --topology=v5e:8x8 also whether it fits these devices, and by a plan how long it takes on them.
    """
    # To look through what imports and tracing leave, again and again and once more at the end, takes 0.4 s.
    gc.set_threshold(20_000, 20, 50)
    atexit.register(gc.freeze)
    settings = config_flags.define_config()
    flags.DEFINE_string(
        "workdir", None, "where checkpoints and logs go; a run found there is resumed"
    )
    flags.DEFINE_bool("dry_run", False, "print what would run, as a recipe, and train nothing")
    flags.DEFINE_bool("report", False, "of a classifier: a page with accuracy, mistakes and curves")
    _define_target("with --dry_run: the devices that will train, ")
    cli.define_hosts()
    cli.parse_flags()
    if not FLAGS.dry_run or FLAGS.workdir is not None:
        cli.require(workdir="DIR")
    if FLAGS.topology and not FLAGS.dry_run:
        raise flags.Error(
            f"--topology={FLAGS.topology} is for --dry_run: a run takes the devices that there are"
        )

    elsewhere = _elsewhere()
    runs, changes = config_flags.load_recipe(settings)
    config_flags.warn_of_unread(list(runs.values())[-1], changes)
    if FLAGS.report and "" in runs:
        _check_classifies(runs[""])
    if FLAGS.dry_run:
        _dry_run(runs, elsewhere)
        return
    if "" not in runs:
        _train_all(runs)
        return

    from vit_jax.training.loop import train

    config = runs[""]
    hosts = config.hosts
    with cli.hosts(
        "train", heartbeat_seconds=hosts.heartbeat_seconds, wait_minutes=hosts.wait_minutes
    ) as process:
        exit_codes.end_at_once_when_interrupted()
        config_flags.log_recipe(changes)
        result = train(config, FLAGS.workdir)
        name, value = next(iter(result.items()))
        line = f"trained {result['step']} steps, {name} {value:.4f}: {FLAGS.workdir}"
        if FLAGS.report:
            result["report"] = _report_of(process)
            line += f"\nreport: {result['report']}"
        with exit_codes.printing_what_is_saved(f"{FLAGS.workdir}/result.json"):
            cli.print_result(result, line, process)


def _check_classifies(config: "ConfigDict") -> None:
    """Raises `flags.Error` if --report has nothing to measure."""
    from vit_jax import objectives

    kind, _ = objectives.find_objective(config.objective)
    if kind.needs_masks or not kind.needs_labels:
        raise flags.Error(
            f"--report is for classifiers, and config.objective.name is {config.objective.name!r}: "
            "'vit_jax report WORKDIR --out=DIR' draws its curves"
        )


def _report_of(process: int) -> str:
    """Measures the run that has just ended, and writes its page; its path."""
    from vit_jax.checkpoints import storage
    from vit_jax.studies import judged
    from vit_jax.studies import report as reports

    workdir = storage.locate_to_save(FLAGS.workdir, "--workdir")
    judged.judge(workdir)
    if process == 0:
        reports.report([workdir], workdir / "report")
    return str(workdir / "report" / "report.html")


def _define_target(what: str = "") -> None:
    """Flags that name devices that are not here."""
    flags.DEFINE_string("topology", None, f"{what}KIND:SHAPE, e.g. v5e:16x16, h100:8x8 or cpu:N")
    flags.DEFINE_integer(
        "slices", 1, "of TPUs, how many, joined by the data center's network", lower_bound=1
    )
    flags.DEFINE_float("price_per_chip_hour", None, "to compute the cost", lower_bound=0)


def _elsewhere() -> "Elsewhere | None":
    """The devices that --topology names."""
    if not FLAGS.topology:
        return None
    from vit_jax.planning.elsewhere import find_elsewhere

    return find_elsewhere(FLAGS.topology, FLAGS.slices, FLAGS.price_per_chip_hour)


def _dry_run(runs: "dict[str, ConfigDict]", elsewhere: "Elsewhere | None") -> None:
    """`train --dry_run` of one run, which is called '', or of an experiment of several."""
    from vit_jax.base import buckets, places
    from vit_jax.planning.dry_run import dry_run
    from vit_jax.training.guards import check_workdir

    if "" in runs:
        places.absolute(FLAGS.workdir or "", "--workdir")
        with buckets.asking_once():
            result, recipe = dry_run(runs[""], FLAGS.workdir, elsewhere=elsewhere)
        cli.print_result(result | {"config": recipe}, recipe.rstrip())
        return
    if FLAGS.workdir is not None and elsewhere is None:
        check_workdir(FLAGS.workdir)
    with buckets.asking_once():
        results = {
            name: dry_run(config, None, tuple(runs), elsewhere)[0] for name, config in runs.items()
        }
    lines = [f"{name}: {_summary(result)}" for name, result in results.items()]
    cli.print_result(results, "\n".join(lines))


def _summary(result: dict) -> str:
    """The line of a run in the answer of a dry run."""
    if "model" not in result:
        return f"not checked: {'; '.join(result['unchecked'])}"
    return f"{result['model']}, {result['parameters']:,} parameters, {result['steps']:,} steps"


def _train_all(runs: "dict[str, ConfigDict]") -> None:
    """`train` of an experiment of several runs."""
    from vit_jax.checkpoints import storage
    from vit_jax.studies import report as reports
    from vit_jax.studies.sweep import run_all

    workdir = storage.locate_to_save(FLAGS.workdir, "--workdir")
    hosts = next(iter(runs.values())).hosts
    with cli.hosts(
        "train", heartbeat_seconds=hosts.heartbeat_seconds, wait_minutes=hosts.wait_minutes
    ) as process:
        exit_codes.end_at_once_when_interrupted()
        run_all(runs, FLAGS.workdir)
        if process == 0:
            result = reports.report([FLAGS.workdir], workdir / "report")
            cli.print_result(result, reports.text(result))


def sweep() -> None:
    """Choose settings by a grid, and repeat the best with several seeds: --config=FILE --workdir=DIR
    --grid=FIELD=VALUES [--json].

    Every setting of the grid is trained without some of the training examples. The setting that is best on these is
    trained on all examples, with several seeds. Runs that have ended are not repeated. A report of all runs, in the
    workdir, comes last.
    """
    settings = config_flags.define_config()
    flags.DEFINE_string("workdir", None, "a folder for all the runs")
    flags.DEFINE_multi_string(
        "grid", None, "FIELD=VALUE,VALUE…, once for each field of the config: optim.lr=0.003,0.01"
    )
    flags.DEFINE_string(
        "select",
        "",
        "examples to choose by, e.g. train[98%:]; what the recipe's train_split leaves out",
    )
    flags.DEFINE_integer("seeds", 3, "final runs, each with another seed", lower_bound=1)
    cli.parse_flags()
    cli.require(workdir="DIR", grid="FIELD=VALUE,VALUE…")

    from vit_jax.checkpoints import storage
    from vit_jax.studies.report import report
    from vit_jax.studies.sweep import sweep, text

    config, changes = config_flags.load_config(settings)
    config_flags.log_recipe(changes)
    grid = {name: cli.values(text) for name, text in cli.options(FLAGS.grid, "grid").items()}
    exit_codes.end_at_once_when_interrupted()
    workdir = storage.locate_to_save(FLAGS.workdir, "--workdir")
    result = sweep(config, workdir, grid, select=FLAGS.select, seeds=FLAGS.seeds)
    summary = report([workdir], workdir / "report")
    cli.print_result(result, f"{text(result)}\nreport: {summary['report']}")


def vtab() -> None:
    """Fine-tune a checkpoint on the 19 tasks of VTAB-1k: --checkpoint=CHECKPOINT --workdir=DIR
    [--rates=0.001,0.003,0.01,0.03] [--config=finetune] [--config.FIELD=VALUE …] [--json].

    The learning rate of each task is chosen by its 200 validation examples; then the model is trained on all 1,000.
    Tasks whose data is missing are named and skipped. Started again, it continues.
    """
    settings = config_flags.define_config()
    cli.define_checkpoint()
    flags.DEFINE_string("workdir", None, "a folder for all the runs")
    flags.DEFINE_list(
        "rates", [], "learning rates to choose from; by default those of the ViT paper"
    )
    flags.DEFINE_integer(
        "seeds", 1, "final runs of each task, each with another seed", lower_bound=1
    )
    cli.parse_flags()
    cli.require(checkpoint="CHECKPOINT", workdir="DIR")

    from vit_jax.studies.vtab import RATES, text, vtab

    recipe = FLAGS.config or "finetune"
    settings = [("init_from", FLAGS.checkpoint), *settings]

    def config_of(task: str) -> "ConfigDict":
        return config_flags.load_config(settings, f"{recipe}:{task}")[0]

    exit_codes.end_at_once_when_interrupted()
    rates = cli.numbers("rates") or RATES
    result = vtab(config_of, FLAGS.workdir, rates=rates, seeds=FLAGS.seeds)
    cli.print_result(result, text(result))


def plan() -> None:
    """Estimate memory, time and cost of a run on TPUs or GPUs that you do not have: --config=FILE
    --topology=v5p:8x8x16 [--slices=2] [--fit] [--json].

    It compiles the train step for them, and prints memory per chip, traffic, the time of a step, and time and cost of
    the run. Topologies are KIND:SHAPE of v4, v5e, v5p, v6e and tpu7x; KIND:GPUS or KIND:HOSTSxGPUS of a100, a100-40gb,
    h100, h200, b200, gb200, b300 and gb300; or cpu:N for simulated devices.
    """
    settings = config_flags.define_config()
    _define_target()
    flags.DEFINE_bool("fit", False, "look for the fastest remat, mesh and accumulation that fit")
    flags.DEFINE_integer(
        "num_classes", None, "of the data, if it is not specified otherwise", lower_bound=1
    )
    flags.DEFINE_integer(
        "examples", None, "to train on, if it is not specified otherwise", lower_bound=1
    )
    cli.parse_flags()
    cli.require(topology="KIND:SHAPE")

    from vit_jax.planning import report
    from vit_jax.planning.fit import fit
    from vit_jax.planning.plan import make_assembly, make_plan
    from vit_jax.planning.target import find

    config, _ = config_flags.load_config(settings)
    data = {"num_classes": FLAGS.num_classes, "examples": FLAGS.examples}
    price = FLAGS.price_per_chip_hour
    target = find(FLAGS.topology, slices=FLAGS.slices)
    if FLAGS.fit:
        result = fit(config, target, price_per_chip_hour=price, **data)
    else:
        assembly = make_assembly(config, **data)
        result = make_plan(assembly, target, price_per_chip_hour=price)
    cli.print_result(result, report.text(result))


def report() -> None:
    """Compare runs in tables and pictures: DIR… --out=REPORT [--json]; the curve of one, RUN… --as_reference
    [--out=DIR]; or which was first, DIR… --speedrun.

    A DIR is a run's workdir, a sweep's, or a folder of several. The report finds what was varied.
    REPORT/report.html has means and ranges over seeds, curves, speed and goodput, report.md the same as Markdown. Runs
    that are not done, or diverged, are shown as such.

    --as_reference writes DIR/reference.json (by default in the run's workdir) instead, the curve of a run or of
    several seeds of one, with which others are compared by --config.reference.curve.

    --speedrun prints a table of the runs that reached config.eval.target, by the time that they took.
    """
    flags.DEFINE_bool("as_reference", False, "write the curve of one run, or of seeds of one")
    flags.DEFINE_bool("speedrun", False, "the times after which runs reached their target")
    flags.DEFINE_string("out", None, "the folder to make")
    cli.define_json()
    cli.define_register()
    folders = cli.parse_flags("DIR…")
    if FLAGS.speedrun:
        from vit_jax.studies import speedrun

        result = speedrun.rank(folders)
        cli.print_result(result, speedrun.text(result))
        return
    if FLAGS.as_reference:
        from vit_jax.studies import references

        result = references.save_reference(folders, FLAGS.out)
        cli.print_result(result, references.sentence(result))
        return
    cli.require(out="REPORT")

    from vit_jax.studies import report as reports

    result = reports.report(folders, FLAGS.out)
    cli.print_result(result, reports.text(result))
