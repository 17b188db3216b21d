"""The commands that use a trained model: `evaluate`, `exits`, `export`, `serve`, `inspect`; `predict` is in
`predict_command`. Each imports what it needs when it runs.
"""

import sys

from absl import flags

from vit_jax.commands import config_flags
from vit_jax.commands import flags as cli

FLAGS = flags.FLAGS


def evaluate() -> None:
    """Measure accuracy and loss of a checkpoint: --checkpoint=DIR [--suite=NAME] [--budget=GFLOPS] [--follow]
    [--classes=FILE] [--config.FIELD=VALUE …] [--model=OPTION=VALUE …] [--json].

    Data and preprocessing are those of the run, unless --config.data.FIELD says otherwise; a checkpoint of
    another format has its own preprocessing, and --config.data names the data. A batch is as large as the run's, unless
    --config.eval.batch_size sets another, on which no result depends. With --budget
    or --threshold images leave a model with exits early. With --suite the model is judged on
    all sets of that name that are there. With --follow, beside a run that trains, each of its checkpoints is evaluated
    as it appears, into WORKDIR/evaluations and its TensorBoard, until the run is done.
    """
    settings = config_flags.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_list(
        "evaluators",
        [],
        "instead of the run's own: accuracy, classification, few_shot, knn, zero_shot",
    )
    flags.DEFINE_string("suite", "", "imagenet, few_shot, knn or zero_shot, instead of evaluators")
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
    cli.define_engine()
    cli.define_json()
    cli.define_register()
    cli.define_hosts()
    cli.parse_flags()
    cli.require(checkpoint="DIR")

    if cli.uses_engine() and (FLAGS.follow or FLAGS.budget is not None or FLAGS.threshold):
        raise flags.Error(
            "--engine and --precision are for the classes of one checkpoint: pass them without --follow, --budget and "
            "--threshold"
        )
    if FLAGS.follow and (FLAGS.model or FLAGS.classes or FLAGS.budget is not None):
        raise flags.Error(
            "--follow is for the checkpoints of a run: set it without --model, --classes and --budget (--threshold "
            "works)"
        )
    if FLAGS.name and not FLAGS.follow:
        raise flags.Error("--name is for --follow: it names the file of the evaluations")

    from vit_jax.base import places
    from vit_jax.evaluation.progress import with_progress
    from vit_jax.evaluation.run import evaluate_run, text
    from vit_jax.evaluation.suites import table
    from vit_jax.prediction.overrides import load_to_evaluate

    with cli.hosts("evaluate", from_environment=False) as process:
        evaluators = tuple(FLAGS.evaluators)
        if FLAGS.suite and (evaluators or cli.thresholds()):
            raise flags.Error("pass --suite without --evaluators, --budget and --threshold")
        if FLAGS.data_dir and not FLAGS.suite:
            raise flags.Error("--data_dir is for --suite; otherwise set --config.data.path=DIR")
        if FLAGS.data_dir:
            places.locate(FLAGS.data_dir, "--data_dir")
        if thresholds := cli.thresholds():
            if evaluators:
                raise flags.Error("pass --budget and --threshold without --evaluators")
            evaluators = (("early_exit", {"thresholds": thresholds}),)
        if evaluators:
            settings.append(("eval.evaluators", repr(evaluators)))
        if FLAGS.follow:
            _follow(settings, process)
            return
        model_options = cli.model_options()
        run, config = load_to_evaluate(
            FLAGS.checkpoint, settings, model_options, needs_data=not FLAGS.suite
        )
        classifier = None
        if cli.uses_engine():
            from vit_jax.export.engines import make_classifier

            classifier = make_classifier(run, FLAGS.engine, FLAGS.precision, config.data)
        result, absent = evaluate_run(
            run, config, watch=with_progress, suite=FLAGS.suite, data_dir=FLAGS.data_dir,
            logits_of=classifier and classifier.logits,
        )  # fmt: skip
        lines = "\n".join(table(result, absent)) if FLAGS.suite else text(result)
        cli.print_result(result | ({"left_out": absent} if absent else {}), lines, process)


def _follow(settings: list[tuple[str, str]], process: int) -> None:
    """`evaluate --follow`."""
    from vit_jax.evaluation.progress import with_progress
    from vit_jax.training.upkeep.follow import What, follow, text

    what = What(tuple(settings), FLAGS.suite, FLAGS.data_dir, FLAGS.name)
    result = follow(FLAGS.checkpoint, what, watch=with_progress)
    cli.print_result(result, text(result), process)


def exits() -> None:
    """Find thresholds for early exit: --checkpoint=DIR --budgets=GFLOPS,… [--images=50000]
    [--config.data.FIELD=VALUE …] [--model=OPTION=VALUE …] [--json].

    For each budget (10⁹ multiply-adds per image on average) it finds the thresholds with the best accuracy on
    training images, and measures them on the evaluation images, beside the official code's, entropy and chance. They
    are kept beside the checkpoint as exits.json, for --budget of predict, evaluate and benchmark, with a
    picture, exits.png. The same command replaces both.
    """
    settings = config_flags.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_list("budgets", [], "10⁹ multiply-adds of an image in the mean, e.g. 0.75,1.0,1.5")
    flags.DEFINE_integer("images", 50_000, "training images to solve with, at most", lower_bound=1)
    cli.define_json()
    cli.define_register()
    cli.parse_flags()
    cli.require(checkpoint="DIR", budgets="GFLOPS,…")
    budgets = sorted(set(cli.numbers("budgets")))

    from vit_jax.evaluation.early_exit import calibration, report
    from vit_jax.evaluation.progress import with_progress
    from vit_jax.prediction.overrides import load_to_evaluate

    run, config = load_to_evaluate(FLAGS.checkpoint, settings, cli.model_options())
    result = calibration.calibrate(run, config, budgets, images=FLAGS.images, watch=with_progress)
    path = calibration.keep(run.directory, result)
    picture = path.with_name(calibration.PICTURE)
    report.draw_report(result, picture)
    cli.print_result(result, f"{report.text(result)}\n\n{path}\n{picture}")


def export() -> None:
    """Write a trained model as a file that runs without vit_jax: --checkpoint=DIR --to=onnx|stablehlo --out=FILE
    [--outputs=probabilities] [--batch_size=0] [--normalization=inside] [--weights=float32] [--images=PATTERN]
    [--classes=FILE] [--config.data.FIELD=VALUE …] [--model=OPTION=VALUE …] [--json].

    The file has a program with its weights, which takes cropped images and gives probabilities, or the outputs
    that --outputs names, or scores of pixels if the model segments, and a description: the classes, how images are
    cropped, and the line of Python that calls it. With --images the file's answers are compared with the model's: how
    many images keep their best class, and the accuracy over images in folders with the names of classes. If one cannot
    be read, the exit code is 1.
    """
    settings = config_flags.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_enum("to", None, ["onnx", "stablehlo"], "what the program is written in")
    flags.DEFINE_string("out", None, "FILE.onnx, or FILE.zip for stablehlo")
    flags.DEFINE_list(
        "outputs",
        [],
        "of probabilities, logits and features (the input of the head); of a model that segments: scores, masks and "
        "classes; by default probabilities, features of a model without head, and all of one that segments",
    )
    flags.DEFINE_integer("batch_size", 0, "images at a time; 0: any number", lower_bound=0)
    flags.DEFINE_enum(
        "normalization", "inside", ["inside", "beside"],
        "inside: the program takes uint8; beside: floats with mean and deviation taken out",
    )  # fmt: skip
    flags.DEFINE_enum(
        "weights",
        "float32",
        ["float32", "bfloat16", "int8", "float16"],
        "in how many bits they are stored; float16, for onnx: the program computes in it too",
    )
    flags.DEFINE_multi_string("images", [], "images to compare answers on: a folder or a pattern")
    cli.define_json()
    cli.define_register()
    cli.parse_flags()
    cli.require(checkpoint="DIR", to="onnx|stablehlo", out="FILE")

    from vit_jax.export.run import export, text
    from vit_jax.prediction.images import check_all_read

    result = export(
        FLAGS.checkpoint,
        FLAGS.out,
        to=FLAGS.to,
        batch_size=FLAGS.batch_size,
        normalization=FLAGS.normalization,
        precision=FLAGS.weights,
        outputs=FLAGS.outputs,
        images=FLAGS.images,
        settings=settings,
        model_options=cli.model_options(),
    )
    cli.print_result(result, text(result, FLAGS.out))
    if compared := result.get("compared"):
        check_all_read(compared["images"], compared["unreadable"])


def serve() -> None:
    """Serve a model over HTTP, with a page to drop images on: --checkpoint=DIR [--port=8000] [--host=127.0.0.1]
    [--follow] [--drain=SECONDS] [--classes=FILE] [--config.data.FIELD=VALUE …] [--model=OPTION=VALUE …] [--json].

    POST an image, or several as a form, to /predict for classes or to /features for features, or drop one on the
    page; of a model that segments POST it to /mask for its mask. /healthz says whether requests are taken, /metrics
    how many there were, for Prometheus. Images that arrive together are computed together. Ctrl-C or SIGTERM ends it,
    once the requests that are there are answered. With --follow the newest checkpoint of a run that trains is served.
    """
    settings = config_flags.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_string(
        "host", "127.0.0.1", "the address to listen on; 0.0.0.0: all of this machine"
    )
    flags.DEFINE_list(
        "names",
        [],
        "host names that requests may have beside addresses and localhost, e.g. a proxy's",
    )
    flags.DEFINE_integer("port", 8000, "0: any that is free", lower_bound=0, upper_bound=65535)
    flags.DEFINE_integer("batch_size", 32, "images computed together, at most", lower_bound=1)
    flags.DEFINE_float("megabytes", 10, "of an image's file, at most", lower_bound=0.001)
    flags.DEFINE_float("seconds", 30, "to send an image, and to be answered", lower_bound=0.001)
    flags.DEFINE_float(
        "drain",
        0,
        "after SIGTERM: how long requests are still taken while /healthz says 503, for a readiness probe to see it",
        lower_bound=0,
    )
    cli.define_engine()
    flags.DEFINE_integer("images", 64, "of one request, at most", lower_bound=1)
    flags.DEFINE_integer("queue", 256, "images that may wait for an answer", lower_bound=1)
    flags.DEFINE_bool(
        "follow", False, "serve each newer checkpoint of the run in WORKDIR; WORKDIR/best: the best"
    )
    cli.define_json()
    cli.define_register()
    cli.parse_flags()
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
        limits=Limits(FLAGS.megabytes, FLAGS.seconds, FLAGS.queue, FLAGS.images),
        announce=announce,
        names=FLAGS.names,
        follow=FLAGS.follow,
        drain=FLAGS.drain,
        engine=FLAGS.engine,
        precision=FLAGS.precision,
        settings=settings,
        model_options=cli.model_options(),
    )


def inspect() -> None:
    """Draw what a model has learned, such as attention and filters: --checkpoint=DIR|FILE --images='photos/*.jpg'
    --out=REPORT [--shown=6] [--patch=0.5,0.5] [--map_classes=NAME,…] [--flow] [--config.data.FIELD=VALUE …]
    [--model=OPTION=VALUE …] [--json].

    REPORT/report.html shows attention distance, rollout, maps by class, heads, mean maps, collapse, features, filters,
    positions, health and more, of any family, and states what has no meaning for a model. The checkpoint is a run
    or a file of any format. An image that cannot be read is named, the others are inspected, and the exit
    code is 1.
    """
    settings = config_flags.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    flags.DEFINE_multi_string(
        "images", [], "an image, a folder, or a pattern in quotes; several: pass it again"
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
    flags.DEFINE_list(
        "map_classes",
        [],
        "the classes whose maps are drawn; by default the predicted one of each image",
    )
    cli.define_json()
    cli.define_register()
    cli.parse_flags()
    cli.require(checkpoint="DIR", images="PATTERN", out="REPORT")
    patch = tuple(cli.numbers("patch"))
    if len(patch) != 2 or not all(0 <= share <= 1 for share in patch):
        raise flags.Error("--patch must be two numbers between 0 and 1: rows first, e.g. 0.5,0.25")

    from vit_jax.inspection import run

    options = run.InspectOptions(
        FLAGS.batch_size,
        FLAGS.shown,
        patch,
        tuple(cli.confidences("threshold")),
        FLAGS.flow,
        tuple(FLAGS.map_classes),
    )
    result = run.inspect(
        FLAGS.checkpoint,
        FLAGS.images,
        FLAGS.out,
        options=options,
        settings=settings,
        model_options=cli.model_options(),
    )
    cli.print_result(result, run.text(result))
    if result["unreadable"]:
        sys.exit(1)
