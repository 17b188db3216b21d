"""The command `predict`: classes, features or maps of images. It imports what it needs when it runs."""

import functools
from typing import TYPE_CHECKING

from absl import flags

from vit_jax.commands import config_flags
from vit_jax.commands import flags as cli

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vit_jax.checkpoints.trained_model import TrainedModel
    from vit_jax.prediction.images import Named

FLAGS = flags.FLAGS


def predict() -> None:
    """Classify images, or write their features or masks: --checkpoint=DIR IMAGE… [--topk=5] [--json|--jsonl|--csv]
    [--picture=FILE.png] [--features --out=FILE.npz] [--out=FOLDER [--words=A,B,C [--word_threshold=0.1]]]
    [--budget=GFLOPS] [--classes=FILE] [--config.data.FIELD=VALUE …] [--model=OPTION=VALUE …].

    Images are prepared as in the run, unless --config.data.mean, std, eval_crop, eval_resize or interpolation
    are set; --config.data.image_size and --config.model.patch resize the model. An IMAGE is a file, a folder, of
    which all images are taken, a pattern in quotes, or -: standard input, which is an image or the names of images,
    one per line. Each is printed as soon as it is classified. One that cannot be read is named, the others are still
    predicted, and the exit code is 1. After SIGTERM or Ctrl-C finished work stays, and the code is 42. With --features
    nothing is classified: features go to a .npz or .parquet file, with the names of the images; --layers=3,7,11 adds
    the outputs of these layers, --maps as maps of the image. A model that segments writes masks, overlays and
    maps.json to the folder --out; one of images and texts does so of --words. The checkpoint may also be a file that
    'vit_jax export' wrote: it has its classes and preprocessing. With --budget or --threshold images
    leave a model with exits early.
    """
    settings = config_flags.take_settings()
    cli.define_checkpoint()
    cli.define_model()
    cli.define_exits()
    cli.define_json()
    cli.define_register()
    flags.DEFINE_bool("csv", False, "print comma-separated values: file, rank, class, probability")
    flags.DEFINE_bool("jsonl", False, "print an object of JSON for each image, one a line")
    flags.DEFINE_integer("topk", 5, "how many classes to name for each image", lower_bound=1)
    flags.DEFINE_integer("batch_size", 32, "images classified at a time", lower_bound=1)
    flags.DEFINE_string(
        "picture", None, "also draw the images with their classes into this PNG file"
    )
    cli.define_engine()
    _define_features()
    flags.DEFINE_string(
        "out",
        None,
        "features: the file, FILE.npz or FILE.parquet; a model that segments: the folder of masks",
    )
    flags.DEFINE_string(
        "words",
        None,
        "masks of what these words say, separated by commas, by a model of images and texts",
    )
    flags.DEFINE_float(
        "word_threshold",
        None,
        "--words: pixels are of none of them, if no cosine of a patch and a word is as high; -1: all are of a word; by "
        "default as in the run's evaluation",
        lower_bound=-1,
        upper_bound=1,
    )
    flags.DEFINE_enum(
        "windows",
        None,
        ("whole", "sliding"),
        "a model that segments: it sees the whole image squeezed, or windows; by default as in its evaluation",
    )
    images = cli.parse_flags("IMAGE…")
    cli.require(checkpoint="DIR")
    if FLAGS.csv + FLAGS.json + FLAGS.jsonl > 1:
        raise flags.Error("pass one of --csv, --json and --jsonl")
    if FLAGS.jsonl and (_features_are_wanted() or FLAGS.out):
        raise flags.Error("--jsonl is for classes: pass it without --features and --out")
    if FLAGS.words is not None and (FLAGS.features or not FLAGS.out):
        raise flags.Error("--words is for masks: pass --out=FOLDER, without --features")
    if FLAGS.word_threshold is not None and FLAGS.words is None:
        raise flags.Error("--word_threshold is for --words")
    is_export = _is_export(FLAGS.checkpoint)
    if is_export and (_features_are_wanted() or FLAGS.out):
        raise flags.Error(
            f"{FLAGS.checkpoint} is an export, which gives classes: for --features and --out pass the checkpoint that "
            "it was made of"
        )
    if _features_are_wanted():
        _write_features(images, settings)
        return
    if FLAGS.out:
        _write_maps(images, settings)
        return
    if FLAGS.windows:
        raise flags.Error("--windows is for masks: pass --out=FOLDER")

    from vit_jax.base import outputs
    from vit_jax.prediction.images import find_images
    from vit_jax.prediction.output_names import never_writing_over
    from vit_jax.prediction.predict import predict_files, print_results

    thresholds = cli.thresholds()
    if thresholds and FLAGS.engine not in ("auto", "xla"):
        raise flags.Error(
            f"--engine={FLAGS.engine} computes all exits: pass it without --budget and --threshold"
        )
    if FLAGS.native_tokens and (thresholds or cli.uses_engine()):
        raise flags.Error("pass --native_tokens without --engine, --budget and --threshold")
    picture = FLAGS.picture and outputs.file_to_write(FLAGS.picture, "--picture")
    files = find_images(images)
    if picture:
        files = never_writing_over(files, picture, "--picture")
        files = files if "-" in images else list(files)  # so that it is refused at once
    forms = [name for name in ("json", "jsonl", "csv") if FLAGS[name].value]
    form = forms[0] if forms else "text"
    if is_export:
        results = _predict_exported(files, settings)
        print_results(results, form, picture)
        return
    run = _load(settings)
    predict_files(
        run,
        files,
        topk=FLAGS.topk,
        batch_size=FLAGS.batch_size,
        form=form,
        picture=picture,
        thresholds=thresholds,
        best=None if thresholds else _best(run),
    )


def _predict_exported(files: "Iterable[Named]", settings: list[tuple[str, str]]):
    """Predictions of a file that `export` wrote, which has its own preprocessing and classes."""
    from vit_jax.export.exported import predict_with, read_classifier

    given = [f"--config.{name}" for name, _ in settings]
    unused = ("model", "ignore", "classes", "budget", "threshold", "native_tokens")
    given += [f"--{name}" for name in unused if FLAGS[name].value]
    if FLAGS.precision != "float32":
        given.append("--precision")
    if given:
        raise flags.Error(
            f"{given[0]} is for checkpoints: {FLAGS.checkpoint} is an export, whose classes and preprocessing are "
            "those that it was written with"
        )
    engine = "" if FLAGS.engine in ("auto", "xla") else FLAGS.engine
    classifier = read_classifier(FLAGS.checkpoint, engine)
    batch_size = classifier.batch_size or FLAGS.batch_size
    return predict_with(classifier, files, topk=FLAGS.topk, batch_size=batch_size)


def _is_export(checkpoint: str) -> bool:
    """Whether a checkpoint is a file that `export` wrote."""
    if not checkpoint.endswith((".onnx", ".zip")):
        return False
    from vit_jax.export.exported import is_export

    return is_export(checkpoint)


def _best(run: "TrainedModel"):
    """What computes the classes, by --engine."""
    from vit_jax.prediction.predict import check_head, make_best

    check_head(run)
    if not cli.uses_engine():
        return make_best(run, native_tokens=FLAGS.native_tokens)
    from vit_jax.export.engines import make_classifier

    classifier = make_classifier(run, FLAGS.engine, FLAGS.precision)
    return make_best(run, classifier and classifier.logits)


def _load(settings: list[tuple[str, str]]) -> "TrainedModel":
    """The model of --checkpoint; images are prepared as `settings` say."""
    from vit_jax.prediction.overrides import load_for_images

    return load_for_images(FLAGS.checkpoint, settings, "predict", cli.model_options())


def _write_maps(images: list[str], settings: list[tuple[str, str]]) -> None:
    """`predict` of a model that segments, or with --words."""
    if FLAGS.csv or FLAGS.picture or cli.thresholds() or FLAGS.native_tokens:
        raise flags.Error(
            "pass --out without --csv, --picture, --budget, --threshold and --native_tokens"
        )
    from vit_jax.prediction.images import check_all_read, find_images
    from vit_jax.prediction.maps import Segmenter, write_maps

    if FLAGS.words is None:
        make = Segmenter
    else:
        from vit_jax.prediction.words import WordSegmenter, check_words

        words = [word.strip() for word in FLAGS.words.split(",")]
        check_words(words, FLAGS.word_threshold)
        make = functools.partial(WordSegmenter, words=words, threshold=FLAGS.word_threshold)
    files = find_images(images)
    segmenter = make(_load(settings), windows=FLAGS.windows)
    result = write_maps(segmenter, files, FLAGS.out, batch_size=FLAGS.batch_size)
    cli.print_result(result, f"masks of {result['images']} images: {FLAGS.out}")
    check_all_read(result["images"], result["unreadable"])


def _define_features() -> None:
    flags.DEFINE_string(
        "features", None, "write features instead, to --out; --features=FILE is short for both"
    )
    FLAGS["features"].boolean = True  # without a value it is a switch
    flags.DEFINE_list(
        "layers",
        [],
        "features: of these layers too: numbers from 0, or from the end if negative, or names such as stage3",
    )
    flags.DEFINE_bool(
        "maps",
        False,
        "features: the patches of layers, by default of the last, as maps (h, w, D) of the image",
    )
    flags.DEFINE_bool("norm", True, "features: the outputs of layers after the model's last norm")
    flags.DEFINE_string(
        "image_size",
        None,
        "features: another size of images, e.g. 512 or 256x448: positions are interpolated",
    )
    flags.DEFINE_integer(
        "stride",
        0,
        "features: windows of the model's own size slide over images of --image_size, this many pixels at a time",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "native_tokens",
        None,
        "each image is seen at the size and aspect of its own that so many patches allow; 0: all at one size; by "
        "default as the run was trained",
        lower_bound=0,
    )


def _features_are_wanted() -> bool:
    """Whether --features is passed. Raises `flags.Error` for flags that go with it, or against it."""
    wanted = FLAGS.features not in (None, "false")
    if (wanted or FLAGS.out) and cli.uses_engine():
        raise flags.Error(
            "--engine and --precision are for classes: pass them without --features and --out"
        )
    if wanted and (FLAGS.csv or FLAGS.picture or cli.thresholds()):
        raise flags.Error("pass --features without --csv, --picture, --budget and --threshold")
    others = [name for name in ("layers", "maps", "image_size", "stride") if FLAGS[name].value]
    others += [] if FLAGS.norm else ["nonorm"]
    if others and not wanted:
        raise flags.Error(f"--{others[0]} is for --features")
    if wanted and not FLAGS.norm and not FLAGS.layers:
        raise flags.Error("--nonorm is for --layers: pass --layers=-1 for the last one")
    return wanted


def _write_features(images: list[str], settings: list[tuple[str, str]]) -> None:
    """`predict --features`."""
    from vit_jax.base import sizes
    from vit_jax.prediction.feature_files import file_to_write, write_features
    from vit_jax.prediction.features import Wanted
    from vit_jax.prediction.images import check_all_read, find_images

    flag, out = "--out", FLAGS.out
    if FLAGS.features != "true":
        flag, out = "--features", FLAGS.features
    elif not out:
        raise flags.Error("--out=FILE.npz is missing: where --features writes to")
    size = None if FLAGS.image_size is None else sizes.parse(FLAGS.image_size, "--image_size")
    named = FLAGS.layers or (["-1"] if FLAGS.maps else [])
    layers = tuple(int(x) if x.lstrip("-").isdigit() else x for x in named)
    target, files = file_to_write(out, flag), find_images(images)
    result = write_features(
        _load(settings),
        files,
        target,
        batch_size=FLAGS.batch_size,
        wanted=Wanted(layers, FLAGS.maps, FLAGS.norm, size, FLAGS.stride, FLAGS.native_tokens),
    )
    lines = [f"{result['images']} x {result['width']}: {out}"]
    lines += [f"  {name} {'x'.join(map(str, n))}" for name, n in result.get("arrays", {}).items()]
    cli.print_result(result, "\n".join(lines))
    check_all_read(result["images"], result["unreadable"])
