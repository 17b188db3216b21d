"""The command line: one subcommand, one function; those that use a model are in `using.py`. Each
imports what it needs when it runs, so that `--help` is instant. How a command ends is in `ending.py`.
"""

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

from vit_jax import __version__, cli, ending
from vit_jax.using import benchmark, evaluate, exits, export, inspect, predict, report, serve

if TYPE_CHECKING:
    from ml_collections import ConfigDict

FLAGS = flags.FLAGS


def train() -> None:
    """Train or fine-tune: --config=FILE[:ARGUMENT] --workdir=DIR [--config.FIELD=VALUE …] [--json].

    A run that was begun in the workdir goes on. A recipe of several runs (configs/experiments/) trains
    one after the other, each in a folder of the workdir, and ends with a report. With --dry_run nothing
    is trained: the resolved config is printed as a recipe that trains the same, headed by its model,
    parameters, data and steps.
    """
    settings = cli.define_config()
    flags.DEFINE_string(
        "workdir", None, "where checkpoints and logs go; a run found there is resumed"
    )
    flags.DEFINE_bool("dry_run", False, "print what would run, as a recipe, and train nothing")
    cli.define_hosts()
    cli.parse()
    if not FLAGS.dry_run:
        cli.require(workdir="DIR")

    if (runs := cli.load_runs(settings)) is not None:
        _train_all(runs)
        return
    config, changes = cli.load_config(settings)
    if FLAGS.dry_run:
        from vit_jax.base import places
        from vit_jax.planning.dry_run import dry_run

        places.absolute(FLAGS.workdir or "", "--workdir")
        result, recipe = dry_run(config, FLAGS.workdir)
        cli.print_result(result | {"config": recipe}, recipe.rstrip())
        return

    from vit_jax.training.loop import train

    hosts = config.hosts
    with cli.hosts(
        heartbeat_seconds=hosts.heartbeat_seconds, wait_minutes=hosts.wait_minutes
    ) as process:
        ending.end_at_once_when_interrupted()
        cli.log_recipe(changes)
        result = train(config, FLAGS.workdir)
        cli.print_result(
            result,
            f"trained {result['step']} steps, {next(iter(result))} "
            f"{next(iter(result.values())):.4f}: {FLAGS.workdir}",
            process,
        )


def _train_all(runs: "dict[str, ConfigDict]") -> None:
    """`train` of an experiment of several runs."""
    if FLAGS.dry_run:
        from vit_jax.planning.dry_run import dry_run

        found = {name: dry_run(config, None, tuple(runs))[0] for name, config in runs.items()}
        lines = [
            f"{name}: {one['model']}, {one['parameters']:,} parameters, {one['steps']:,} steps"
            for name, one in found.items()
        ]
        cli.print_result(found, "\n".join(lines))
        return

    from vit_jax.checkpoints import storage
    from vit_jax.reports import report as reports
    from vit_jax.training.sweep import run_all

    workdir = storage.locate_to_save(FLAGS.workdir, "--workdir")
    hosts = next(iter(runs.values())).hosts
    with cli.hosts(
        heartbeat_seconds=hosts.heartbeat_seconds, wait_minutes=hosts.wait_minutes
    ) as process:
        ending.end_at_once_when_interrupted()
        run_all(runs, FLAGS.workdir)
        if process == 0:
            result = reports.report([FLAGS.workdir], workdir / "report")
            cli.print_result(result, reports.text(result))


def sweep() -> None:
    """Choose settings and repeat with seeds: --config=FILE --workdir=DIR --grid=FIELD=VALUES [--json].

    Every setting of the grid is trained without some of the training examples, by which the best is
    chosen; that is trained on all of them with several seeds. Runs that have ended are not repeated. It
    ends with a report of all of them, in the workdir.
    """
    settings = cli.define_config()
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
    cli.parse()
    cli.require(workdir="DIR", grid="FIELD=VALUE,VALUE…")

    from vit_jax.checkpoints import storage
    from vit_jax.reports.report import report
    from vit_jax.training.sweep import sweep, table

    config, changes = cli.load_config(settings)
    cli.log_recipe(changes)
    grid = {name: cli.values(text) for name, text in cli.options(FLAGS.grid, "grid").items()}
    ending.end_at_once_when_interrupted()
    workdir = storage.locate_to_save(FLAGS.workdir, "--workdir")
    result = sweep(config, workdir, grid, select=FLAGS.select, seeds=FLAGS.seeds)
    summary = report([workdir], workdir / "report")
    cli.print_result(result, f"{table(result)}\nreport: {summary['report']}")


def vtab() -> None:
    """VTAB-1k, 19 fine-tunings: --checkpoint=CHECKPOINT --workdir=DIR [--rates=0.001,0.003,0.01,0.03]
    [--config=configs/finetune.py] [--config.FIELD=VALUE …] [--json].

    Of every task the rate is chosen by its 200 validation examples; then it is trained on all 1,000. Tasks whose data
    is not there are named and left out. Started again, it goes on.
    """
    settings = cli.define_config()
    cli.define_checkpoint()
    flags.DEFINE_string("workdir", None, "a folder for all the runs")
    flags.DEFINE_list(
        "rates", [], "learning rates to choose from; by default those of the ViT paper"
    )
    flags.DEFINE_integer(
        "seeds", 1, "final runs of each task, each with another seed", lower_bound=1
    )
    cli.parse()
    cli.require(checkpoint="CHECKPOINT", workdir="DIR")

    from vit_jax.training.vtab import RATES, table, vtab

    recipe = FLAGS.config or "configs/finetune.py"
    settings = [("init_from", FLAGS.checkpoint), *settings]

    def config_of(task: str) -> "ConfigDict":
        return cli.load_config(settings, f"{recipe}:{task}")[0]

    ending.end_at_once_when_interrupted()
    rates = cli.numbers("rates") or RATES
    result = vtab(config_of, FLAGS.workdir, rates=rates, seeds=FLAGS.seeds)
    cli.print_result(result, table(result))


def models() -> None:
    """Models with their parameters, GFLOPs and tokens: [NAME …] [--image_size=224] [--json|--markdown|--published].

    All names, or those that are said. By default for images of the size that a model was published with.
    Patches that do not divide the image are counted at the next smaller size that they do. --published lists
    the weights of others that are known to work, by their names in timm, with their images' size and
    preparation.
    """
    flags.DEFINE_integer("image_size", None, "side of the square images in pixels", lower_bound=1)
    flags.DEFINE_bool("markdown", False, "families with sources and published accuracies")
    flags.DEFINE_bool("published", False, "names of other people's weights instead")
    cli.define_json()
    cli.define_register()
    names = cli.parse("NAME", optional=True)

    from vit_jax.models import listing

    if FLAGS.published:
        rows = listing.published_table()
        cli.print_result(rows, listing.published_text(rows))
        return
    rows = listing.table(FLAGS.image_size, names)
    cli.print_result(rows, listing.page(rows) if FLAGS.markdown else listing.text(rows))


def plan() -> None:
    """What a run needs on a pod that is not here: --config=FILE --topology=v5p:8x8x16 [--slices=2]
    [--fit] [--json].

    Compiles the train step for it: memory of a chip, traffic, time of a step, time and cost of the
    run. Topologies are KIND:SHAPE of v4, v5e, v5p, v6e and tpu7x, or cpu:N for simulated devices.
    """
    settings = cli.define_config()
    flags.DEFINE_string("topology", None, "KIND:SHAPE, e.g. v5e:16x16, or cpu:N")
    flags.DEFINE_integer("slices", 1, "how many of them, joined by the data center's network")
    flags.DEFINE_bool("fit", False, "look for the fastest remat, mesh and accumulation that fit")
    flags.DEFINE_float("price_per_chip_hour", None, "to tell the cost", lower_bound=0)
    flags.DEFINE_integer(
        "num_classes", None, "of the data, where nothing else tells", lower_bound=1
    )
    flags.DEFINE_integer("examples", None, "to train on, where nothing else tells", lower_bound=1)
    cli.parse()
    cli.require(topology="KIND:SHAPE")

    from vit_jax.planning import report
    from vit_jax.planning.fit import fit
    from vit_jax.planning.plan import make_assembly, make_plan
    from vit_jax.planning.target import find

    config, _ = cli.load_config(settings)
    data = {"num_classes": FLAGS.num_classes, "examples": FLAGS.examples}
    price = FLAGS.price_per_chip_hour
    target = find(FLAGS.topology, slices=FLAGS.slices)
    if FLAGS.fit:
        result = fit(config, target, price_per_chip_hour=price, **data)
    else:
        assembly = make_assembly(config, **data)
        result = make_plan(assembly, target, price_per_chip_hour=price)
    cli.print_result(result, report.text(result))


def prepare() -> None:
    """Your images, or a TFDS data set, stored for training: SOURCE --out=DIR [--shard=I/N] [--verify] [--json].

    SOURCE is a folder of images or of class folders, a CSV or JSON-lines file of path and label, tar
    files, or the name of a data set; SOURCE and DIR may be in buckets. The same command goes on after it was
    stopped. With --shard=3/16 the process writes a sixteenth of the files; the last of the 16 to end
    completes the set. SOURCE --verify alone reads a prepared data set back, and the exit code is 1 if
    anything is wrong with it.
    """
    flags.DEFINE_string("out", None, "the folder to make")
    flags.DEFINE_list("splits", [], "which splits, e.g. train[:99%],validation; by default all")
    flags.DEFINE_integer("shards", 0, "files per split; 0: one per 4,096 images", lower_bound=0)
    flags.DEFINE_integer("workers", 0, "threads; 0: one per core", lower_bound=0)
    flags.DEFINE_integer(
        "max_side", 0, "shrink images whose smaller side is larger; 0: no", lower_bound=0
    )
    flags.DEFINE_integer(
        "quality", 0, "encode as JPEG of this quality; 0: no, or 90 with --max_side", lower_bound=0,
        upper_bound=100,
    )  # fmt: skip
    flags.DEFINE_integer(
        "max_pixels", 2**26, "an image of more pixels is reported as bad", lower_bound=1
    )
    flags.DEFINE_float(
        "holdout", 0.1, "share of 'test' where there are no splits", lower_bound=0, upper_bound=1
    )
    flags.DEFINE_enum(
        "holdout_by", "file", ["file", "class"], "class: the same share of every class"
    )
    flags.DEFINE_string("data_dir", "", "where TFDS keeps its data sets")
    flags.DEFINE_string(
        "shard", "1/1", "I/N: write every N-th file, from the I-th on, as one of N processes"
    )
    flags.DEFINE_bool("verify", False, "read all of the prepared data set back")
    cli.define_json()
    (source, *more) = cli.parse("SOURCE")
    if more or not (FLAGS.out or FLAGS.verify):
        raise flags.Error("say SOURCE --out=DIR, or DIR --verify")
    part = _part(FLAGS.shard)
    if part[1] > 1 and FLAGS.verify:
        raise flags.Error("--verify reads the whole set: run it alone, once all shards are done")

    from vit_jax.base import places

    for flag in ("out", "data_dir"):
        if FLAGS[flag].value:
            places.locate(FLAGS[flag].value, f"--{flag}")
    if not FLAGS.out:
        places.locate(source, "DIR")

    from vit_jax.data.preparation.prepare import prepare, text
    from vit_jax.data.preparation.shards import Options
    from vit_jax.data.preparation.verify import verify

    result, lines = {}, []
    if FLAGS.out:
        result = prepare(
            source,
            FLAGS.out,
            splits=tuple(FLAGS.splits),
            num_shards=FLAGS.shards,
            workers=FLAGS.workers,
            options=Options(FLAGS.max_side, FLAGS.quality, FLAGS.max_pixels),
            holdout=FLAGS.holdout,
            holdout_by=FLAGS.holdout_by,
            data_dir=FLAGS.data_dir,
            part=part,
        )
        lines = [text(result)]
    if FLAGS.verify:
        result["verified"] = verify(FLAGS.out or source, workers=FLAGS.workers)
        lines += [f"{one['name']}: {one['why']}" for one in result["verified"]["bad"]]
        lines.append(f"{result['verified']['examples']} records are good")
    cli.print_result(result, "\n".join(lines))
    if FLAGS.verify and result["verified"]["bad"]:
        sys.exit(1)


def _part(text: str) -> tuple[int, int]:
    """(3, 16) of '3/16'."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise flags.Error(f"--shard={text}: expected I/N with I from 1 to N, such as 3/16")
    return number, count


def show() -> None:
    """What a checkpoint is: CHECKPOINT [--model=OPTION=VALUE …] [--json].

    CHECKPOINT is a run's workdir, its checkpoints folder, one checkpoint, or a file or folder of any
    format: model, parameters, classes, preprocessing, and which values are assumed because no file contains
    them; of a run also its step, metrics and data.
    """
    cli.define_model()
    cli.define_json()
    cli.define_register()
    paths = cli.parse("CHECKPOINT")
    if len(paths) != 1:
        raise flags.Error(f"one CHECKPOINT, not {' '.join(paths)}")

    from vit_jax.interchange.summary import summarize, text

    summary = summarize(paths[0], **cli.options(FLAGS.model))
    cli.print_result(summary, text(summary))


def convert() -> None:
    """A checkpoint in another format: SOURCE DESTINATION --to=FORMAT [--model=OPTION=VALUE …]
    [--config.data.FIELD=VALUE …] [--allow_nonfinite] [--json].

    The source's format and model are recognised; --model=OPTION=VALUE, once for each option, says
    otherwise. --config.data.mean, std, eval_crop, eval_resize and interpolation say how its images are prepared.
    """
    settings = cli.take_settings()
    flags.DEFINE_string(
        "to", None, "official, big_vision, timm, huggingface, authors or orbax (our own)"
    )
    flags.DEFINE_bool("allow_nonfinite", False, "tensors may have NaNs and infinities")
    cli.define_model()
    cli.define_json()
    cli.define_register()
    paths = cli.parse("SOURCE DESTINATION")
    cli.require(to="FORMAT")
    if len(paths) != 2:
        raise flags.Error(f"SOURCE and DESTINATION, not {' '.join(paths)}")

    from vit_jax.config import default_config
    from vit_jax.evaluation.overrides import of_images
    from vit_jax.interchange.formats import describe
    from vit_jax.interchange.loading import convert

    foreign = convert(
        *paths,
        FLAGS.to,
        data=of_images(default_config(), settings, "convert"),
        allow_nonfinite=FLAGS.allow_nonfinite,
        **cli.options(FLAGS.model),
    )
    config, source = foreign.model_config, foreign.layout.get("format", "orbax")
    cli.print_result(
        {"format": source, "model": dataclasses.asdict(config)},
        f"{describe(config, foreign.called)}: {source} {paths[0]} -> {FLAGS.to} {paths[1]}",
    )


COMMANDS: dict[str, Callable[[], None]] = {
    command.__name__: command
    for command in (
        train,
        sweep,
        vtab,
        evaluate,
        predict,
        exits,
        export,
        serve,
        inspect,
        report,
        show,
        prepare,
        convert,
        models,
        plan,
        benchmark,
    )
}


def run() -> None:
    """The entry point: runs the command that the command line names."""
    with ending.with_a_sentence():
        _run(sys.argv[1:])


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments:
        raise flags.Error(f"which command?\n\n{_usage()}")
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        print(_usage())
        return
    if name == "--version":
        print(f"vit_jax {__version__}")
        return
    if name not in COMMANDS:
        from vit_jax.base.schema import nearest

        raise flags.Error(f"unknown command {name!r}{nearest(name, COMMANDS)}\n\n{_usage()}")
    sys.argv = [f"vit_jax {name}", *rest]
    try:
        COMMANDS[name]()
    except cli.HelpWanted:
        print(cli.help_of(COMMANDS[name]))


def _usage() -> str:
    lines = [
        f"  {name:<10} {command.__doc__.splitlines()[0]}" for name, command in COMMANDS.items()
    ]
    text = "vit_jax: Vision Transformers in JAX, from a laptop to a TPU pod.\n\n"
    return text + "\n".join(lines) + "\n\n'vit_jax COMMAND --help' says more."
