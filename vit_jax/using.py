"""The commands that use a model: its accuracy, its predictions, its exits, how fast it is. As in
`main.py`, each is a function that imports what it needs when it runs.
"""

import functools
import sys

from absl import flags

from vit_jax import cli
from vit_jax.base.errors import UserError

FLAGS = flags.FLAGS


def evaluate() -> None:
    """Accuracy and loss of a checkpoint: --checkpoint=DIR [--suite=NAME] [--budget=GFLOPS] [--follow]
    [--config.FIELD=VALUE …] [--model=OPTION=VALUE …] [--json].

    Data and preprocessing are those of the run, unless --config.data.FIELD says otherwise; a checkpoint of
    another format has its own preprocessing, and the data is to be said. With --budget
    or --threshold images leave a model with exits early. With --suite=imagenet, few_shot or knn the model is judged on
    all sets of that name that are there. With --follow, beside a run that trains, each of its checkpoints is evaluated
    as it appears, into WORKDIR/evaluations and its TensorBoard, until the run is done.
    """
    settings = cli.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_list(
        "evaluators", [], "instead of the run's own: accuracy, classification, few_shot, knn"
    )
    flags.DEFINE_string("suite", "", "imagenet, few_shot or knn, instead of evaluators")
    flags.DEFINE_string("data_dir", "", "suite: where its data sets are; by default as TFDS has it")
    flags.DEFINE_bool(
        "follow", False, "evaluate each checkpoint of the run as it appears, until the run is done"
    )
    flags.DEFINE_string(
        "name",
        "",
        "follow: of the file and the TensorBoard run; by default the suite's or evaluators'",
    )
    cli.define_exits()
    cli.define_json()
    cli.define_register()
    cli.define_hosts()
    cli.parse()
    cli.require(checkpoint="DIR")

    if FLAGS.follow and (FLAGS.model or FLAGS.budget is not None):
        raise flags.Error(
            "--follow is for the checkpoints of a run: set it without --model and --budget (--threshold works)"
        )
    if FLAGS.name and not FLAGS.follow:
        raise flags.Error("--name is for --follow: it names the file of the evaluations")

    from vit_jax.base import places
    from vit_jax.evaluation.overrides import load_to_evaluate
    from vit_jax.evaluation.progress import shown
    from vit_jax.evaluation.run import evaluate_run, text
    from vit_jax.evaluation.suites import table

    with cli.hosts() as process:
        evaluators = tuple(FLAGS.evaluators)
        if FLAGS.suite and (evaluators or cli.thresholds()):
            raise flags.Error("say --suite without --evaluators, --budget and --threshold")
        if FLAGS.data_dir and not FLAGS.suite:
            raise flags.Error("--data_dir is for --suite; else say --config.data.path=DIR")
        if FLAGS.data_dir:
            places.locate(FLAGS.data_dir, "--data_dir")
        if thresholds := cli.thresholds():
            if evaluators:
                raise flags.Error("say --budget and --threshold without --evaluators")
            evaluators = (("early_exit", {"thresholds": thresholds}),)
        if evaluators:
            settings.append(("eval.evaluators", repr(evaluators)))
        if FLAGS.follow:
            _follow(settings, process)
            return
        said = cli.options(FLAGS.model)
        run, config = load_to_evaluate(FLAGS.checkpoint, settings, said, needs_data=not FLAGS.suite)
        result, absent = evaluate_run(
            run, config, watch=shown, suite=FLAGS.suite, data_dir=FLAGS.data_dir
        )
        lines = "\n".join(table(result, absent)) if FLAGS.suite else text(result)
        cli.print_result(result | ({"left_out": absent} if absent else {}), lines, process)


def _follow(settings: list[tuple[str, str]], process: int) -> None:
    """`evaluate --follow`."""
    from vit_jax.evaluation.progress import shown
    from vit_jax.training.follow import What, follow, text

    what = What(tuple(settings), FLAGS.suite, FLAGS.data_dir, FLAGS.name)
    result = follow(FLAGS.checkpoint, what, watch=shown)
    cli.print_result(result, text(result), process)


def predict() -> None:
    """Class names and probabilities of images: --checkpoint=DIR IMAGE… [--topk=5] [--json|--csv]
    [--picture=FILE.png] [--features=FILE.npz] [--budget=GFLOPS] [--config.data.FIELD=VALUE …]
    [--model=OPTION=VALUE …].

    Images are prepared as in the run, unless --config.data.mean, std, eval_crop, eval_resize or interpolation
    say otherwise. An IMAGE is a file, a folder, of which all images are taken, a pattern in quotes, or -:
    standard input, an image or the names of images, one a line. Each is printed as soon as it is classified.
    One that cannot be read is named, the others are still predicted, and the exit code is 1. With --features
    nothing is classified: features go to a .npz or .parquet file, with the names of the images. With --budget
    or --threshold images leave a model with exits early.
    """
    settings = cli.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    cli.define_exits()
    cli.define_json()
    cli.define_register()
    flags.DEFINE_bool("csv", False, "print comma-separated values: file, rank, class, probability")
    flags.DEFINE_integer("topk", 5, "how many classes to name for each image", lower_bound=1)
    flags.DEFINE_integer("batch_size", 32, "images classified at a time", lower_bound=1)
    flags.DEFINE_string(
        "picture", None, "also draw the images with their classes into this PNG file"
    )
    flags.DEFINE_string("features", None, "write features instead, to FILE.npz or FILE.parquet")
    images = cli.parse("IMAGE…")
    cli.require(checkpoint="DIR")

    if FLAGS.features:
        if FLAGS.csv or FLAGS.picture or cli.thresholds():
            raise flags.Error("say --features without --csv, --picture, --budget and --threshold")
        from vit_jax.evaluation.embed import write_features

        result = write_features(
            FLAGS.checkpoint,
            images,
            FLAGS.features,
            batch_size=FLAGS.batch_size,
            settings=settings,
            said=cli.options(FLAGS.model),
        )
        cli.print_result(result, "{images} x {width}: ".format(**result) + FLAGS.features)
        if bad := result["unreadable"]:
            total = bad + result["images"]
            raise UserError(f"{bad} of {total} images cannot be read, see above")
        return

    from vit_jax.evaluation.predict import predict_files

    form = "json" if FLAGS.json else "csv" if FLAGS.csv else "text"
    predict_files(
        FLAGS.checkpoint,
        images,
        topk=FLAGS.topk,
        batch_size=FLAGS.batch_size,
        form=form,
        picture=FLAGS.picture,
        settings=settings,
        thresholds=cli.thresholds(),
        said=cli.options(FLAGS.model),
    )


def export() -> None:
    """A trained model as a file that runs without vit_jax: --checkpoint=DIR --to=onnx|stablehlo --out=FILE
    [--batch_size=0] [--normalization=inside] [--weights=float32] [--images=PATTERN]
    [--config.data.FIELD=VALUE …] [--model=OPTION=VALUE …] [--json].

    The file has a program with its weights, which takes images that are cut, and gives probabilities; and a
    description: classes, how images are cut, and the line of Python that calls it. With --images the file's
    answers are compared with the model's: how many images have the same best class, and of images in folders
    with the names of classes the accuracy.
    """
    settings = cli.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_enum("to", None, ["onnx", "stablehlo"], "what the program is written in")
    flags.DEFINE_string("out", None, "FILE.onnx, or FILE.zip for stablehlo")
    flags.DEFINE_integer("batch_size", 0, "images at a time; 0: any number", lower_bound=0)
    flags.DEFINE_enum(
        "normalization", "inside", ["inside", "beside"],
        "inside: the program takes uint8; beside: floats with mean and deviation taken out",
    )  # fmt: skip
    flags.DEFINE_enum(
        "weights", "float32", ["float32", "bfloat16", "int8"], "in how many bits they are stored"
    )
    flags.DEFINE_multi_string("images", [], "images to compare answers on: a folder or a pattern")
    cli.define_json()
    cli.define_register()
    cli.parse()
    cli.require(checkpoint="DIR", to="onnx|stablehlo", out="FILE")

    from vit_jax.export.run import export, text

    result = export(
        FLAGS.checkpoint,
        FLAGS.out,
        to=FLAGS.to,
        batch_size=FLAGS.batch_size,
        normalization=FLAGS.normalization,
        precision=FLAGS.weights,
        images=FLAGS.images,
        settings=settings,
        said=cli.options(FLAGS.model),
    )
    cli.print_result(result, text(result, FLAGS.out))


def serve() -> None:
    """A page and an HTTP server for a model: --checkpoint=DIR [--port=8000] [--host=127.0.0.1]
    [--config.data.FIELD=VALUE …] [--model=OPTION=VALUE …] [--json].

    POST an image to /predict for its classes, or drop one on the page. /healthz says whether requests are
    taken, /metrics how many there were, for Prometheus. Images that arrive together are computed together.
    Ctrl-C or SIGTERM ends it, once the requests that are there are answered.
    """
    settings = cli.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_string(
        "host", "127.0.0.1", "the address to listen on; 0.0.0.0: all of this machine"
    )
    flags.DEFINE_integer("port", 8000, "0: any that is free", lower_bound=0, upper_bound=65535)
    flags.DEFINE_integer("batch_size", 32, "images computed together, at most", lower_bound=1)
    flags.DEFINE_float("megabytes", 10, "of an image's file, at most", lower_bound=0.001)
    flags.DEFINE_float("seconds", 30, "to send an image, and to be answered", lower_bound=0.001)
    flags.DEFINE_integer("queue", 256, "images that may wait for an answer", lower_bound=1)
    cli.define_json()
    cli.define_register()
    cli.parse()
    cli.require(checkpoint="DIR")

    from vit_jax.serving.limits import Limits
    from vit_jax.serving.run import serve

    def announce(result: dict) -> None:
        cli.print_result(result, "{model}: {url}".format(**result))
        sys.stdout.flush()

    serve(
        FLAGS.checkpoint,
        host=FLAGS.host,
        port=FLAGS.port,
        batch_size=FLAGS.batch_size,
        limits=Limits(FLAGS.megabytes, FLAGS.seconds, FLAGS.queue),
        announce=announce,
        settings=settings,
        said=cli.options(FLAGS.model),
    )


def exits() -> None:
    """Thresholds for early exit: --checkpoint=DIR --budgets=GFLOPS,… [--images=50000]
    [--config.data.FIELD=VALUE …] [--json].

    For each budget, 10⁹ multiply-adds of an image in the mean, the thresholds with the best accuracy on
    training images; judged on the evaluation images beside the official code's, entropy and chance. They
    are kept beside the checkpoint as exits.json, for --budget of predict, evaluate and benchmark, with a
    picture, exits.png. The same command makes both anew.
    """
    settings = cli.take_settings()
    cli.define_checkpoint()
    flags.DEFINE_list("budgets", [], "10⁹ multiply-adds of an image in the mean, e.g. 0.75,1.0,1.5")
    flags.DEFINE_integer("images", 50_000, "training images to solve with, at most", lower_bound=1)
    cli.define_json()
    cli.define_register()
    cli.parse()
    cli.require(checkpoint="DIR", budgets="GFLOPS,…")
    budgets = sorted(set(cli.numbers("budgets")))

    from vit_jax.evaluation.early_exit import calibration, report
    from vit_jax.evaluation.overrides import load_to_evaluate
    from vit_jax.evaluation.progress import shown

    run, config = load_to_evaluate(FLAGS.checkpoint, settings)
    result = calibration.calibrate(run, config, budgets, images=FLAGS.images, watch=shown)
    path = calibration.keep(run.directory, result)
    picture = path.with_name(calibration.PICTURE)
    report.draw(result, picture)
    cli.print_result(result, f"{report.text(result)}\n\n{path}\n{picture}")


def inspect() -> None:
    """What a model has learnt, as pictures: --checkpoint=DIR|FILE --images='photos/*.jpg' --out=REPORT
    [--shown=6] [--patch=0.5,0.5] [--flow] [--config.data.FIELD=VALUE …] [--json].

    REPORT/report.html shows attention distance, rollout, heads, mean maps, collapse, features, filters,
    positions, health and more, of any family; what has no meaning for one, it says. The checkpoint is a run
    or a file of any format. An image that cannot be read is named, the others are inspected, and the exit
    code is 1.
    """
    settings = cli.take_settings()
    flags.DEFINE_string("checkpoint", None, "a run, or a checkpoint of any format")
    flags.DEFINE_multi_string(
        "images", [], "an image, a folder, or a pattern in quotes; several: say it again"
    )
    flags.DEFINE_string("out", None, "the folder to make")
    flags.DEFINE_integer("batch_size", 16, "images at a time", lower_bound=1)
    flags.DEFINE_integer("shown", 6, "of how many images maps are drawn", lower_bound=1)
    flags.DEFINE_list(
        "patch", ["0.5", "0.5"], "the patch whose attention is drawn: shares of height and width"
    )
    flags.DEFINE_list(
        "threshold", [], "of a model with exits: how probable the best class has to be"
    )
    flags.DEFINE_bool("flow", False, "also attention flow, which takes minutes for each image")
    cli.define_json()
    cli.define_register()
    cli.parse()
    cli.require(checkpoint="DIR", images="PATTERN", out="REPORT")
    patch = tuple(cli.numbers("patch"))
    if len(patch) != 2 or not all(0 <= share <= 1 for share in patch):
        raise flags.Error("--patch must be two numbers between 0 and 1: rows first, e.g. 0.5,0.25")

    from vit_jax.inspection import run

    options = run.Options(
        FLAGS.batch_size, FLAGS.shown, patch, tuple(cli.confidences("threshold")), FLAGS.flow
    )
    result = run.inspect(
        FLAGS.checkpoint, FLAGS.images, FLAGS.out, options=options, settings=settings
    )
    cli.print_result(result, run.text(result))
    if result["unreadable"]:
        sys.exit(1)


def report() -> None:
    """How runs compare: DIR… --out=REPORT [--json].

    A DIR is a run's workdir, a sweep's, or a folder of several. What was varied is found; REPORT/report.html
    has means and ranges over seeds, curves, speed and goodput, report.md the same as Markdown. Runs that
    are not done, or diverged, are shown as such.
    """
    flags.DEFINE_string("out", None, "the folder to make")
    cli.define_json()
    cli.define_register()
    folders = cli.parse("DIR…")
    cli.require(out="REPORT")

    from vit_jax.reports import report as reports

    result = reports.report(folders, FLAGS.out)
    cli.print_result(result, reports.text(result))


def benchmark() -> None:
    """Throughput with its context: {step|inference|input|speed} --config=FILE [--config.FIELD=VALUE …]
    [--steps=20] [--against=FILE] [--profile=DIR] [--breakdown] [--latency_ms=50] [--decode=copy] [--json].

    'inference --checkpoint=DIR --budget=GFLOPS' lets images of the run's data leave a model with exits
    early, against always going on to the last exit; 'inference --config=FILE --shares=0.5,0.25,0.25' does
    so with a new model and made-up images, of which these shares leave at its exits. 'speed
    --models=ViT-B/32,ViT-B/16 --image_sizes=128,224,384 --out=DIR' draws inference over the size of images.
    """
    settings = cli.define_config()
    flags.DEFINE_float(
        "latency_ms",
        0.0,
        "input: milliseconds added to each read, in turn with none",
        lower_bound=0,
    )
    flags.DEFINE_enum(
        "decode", "", ["", "copy"], "input: copy fills images with the bytes of their files"
    )
    flags.DEFINE_integer("steps", 20, "timed steps or batches", lower_bound=1)
    flags.DEFINE_string(
        "against",
        "",
        "step: another recipe, with the same --config.FIELD=VALUE, in turn with the first",
    )
    flags.DEFINE_string("profile", "", "step: a folder for a trace of three further steps")
    flags.DEFINE_bool("breakdown", False, "step: where its time goes, part by part")
    flags.DEFINE_list("shares", [], "inference: of the images that leave at each exit")
    flags.DEFINE_list("models", [], "speed: names of models")
    flags.DEFINE_list("image_sizes", ["128", "224", "384"], "speed: sides of images in pixels")
    flags.DEFINE_string("out", "", "speed: a folder for its pictures")
    cli.define_checkpoint()
    cli.define_exits()
    what = cli.parse("step, inference, input or speed")[0]

    if what == "speed":
        _benchmark_speed(settings)
        return
    from vit_jax.benchmarks import early_exit, input, step

    against = cli.load_config(settings, FLAGS.against)[0] if FLAGS.against else None
    kinds = {
        "step": functools.partial(
            step.step, against=against, profile=FLAGS.profile, breakdown=FLAGS.breakdown
        ),
        "inference": step.inference,
        "input": functools.partial(
            input.input_pipeline, latency_ms=FLAGS.latency_ms, copy=FLAGS.decode == "copy"
        ),
    }
    if what not in kinds:
        raise flags.Error(f"benchmark {what!r}: known are {', '.join(kinds)}, speed")
    if FLAGS.shares and what != "inference":
        raise flags.Error("--shares is for 'benchmark inference'")
    if (FLAGS.latency_ms or FLAGS.decode) and what != "input":
        raise flags.Error("--latency_ms and --decode are for 'benchmark input'")
    if FLAGS.against and what != "step":
        raise flags.Error("--against is for 'benchmark step'")
    if FLAGS.checkpoint:
        if what != "inference" or FLAGS.config or not (chosen := cli.thresholds()):
            raise flags.Error(
                "a --checkpoint is for 'benchmark inference --checkpoint=DIR --budget=GFLOPS', or --threshold"
            )
        from vit_jax.evaluation.overrides import load_to_evaluate

        run, typed = load_to_evaluate(FLAGS.checkpoint, settings)
        result = early_exit.of_checkpoint(run, typed, thresholds=chosen, steps=FLAGS.steps)
    else:
        config, _ = cli.load_config(settings)
        run = kinds[what]
        if FLAGS.shares:
            run = functools.partial(early_exit.of_config, shares=cli.numbers("shares"))
        result = run(config, steps=FLAGS.steps)
    cli.print_result(result, "\n".join(f"{name:<28} {value}" for name, value in result.items()))


def _benchmark_speed(settings: list[tuple[str, str]]) -> None:
    """`benchmark speed`."""
    cli.require(models="NAME,NAME…")

    from vit_jax.base.settings import change
    from vit_jax.benchmarks.speed import speed, text
    from vit_jax.config import config_class, default_config

    config = cli.load_config(settings)[0] if FLAGS.config else default_config()
    if not FLAGS.config:
        change(config, config_class(), settings)
    sizes = [round(size) for size in cli.numbers("image_sizes")]
    result = speed(config, models=FLAGS.models, image_sizes=sizes, steps=FLAGS.steps, out=FLAGS.out)
    cli.print_result(result, text(result))
