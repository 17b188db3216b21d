"""The commands on names and files: `show`, `convert`, `merge` and `push` checkpoints, list `models`, `prepare` a
data set. Each imports what it needs when it runs.
"""

import dataclasses
import re
import sys

from absl import flags

from vit_jax.commands import config_flags
from vit_jax.commands import flags as cli

FLAGS = flags.FLAGS


def show() -> None:
    """Describe a checkpoint: CHECKPOINT [--parameters] [--model=OPTION=VALUE …] [--json].

    CHECKPOINT is a run's workdir, its checkpoints folder, one checkpoint, or a file or folder of any
    format: model, parameters, classes, preprocessing, and which values are assumed because no file contains
    them; of a run also its step, metrics and data. With --parameters a table of all parameters follows:
    their names, which patterns such as config.optim.freeze match, with shapes and sizes.
    """
    flags.DEFINE_bool("parameters", False, "also a table of all parameters, with names and shapes")
    cli.define_model()
    cli.define_json()
    cli.define_register()
    paths = cli.parse_flags("CHECKPOINT")
    if len(paths) != 1:
        raise flags.Error(f"one CHECKPOINT, not {' '.join(paths)}")

    from vit_jax.base import patterns
    from vit_jax.interchange.summary import parameter_table, shapes, summarize, text

    options = cli.model_options()
    summary = summarize(paths[0], **options)
    lines = [text(summary)]
    if FLAGS.parameters:
        weights = shapes(paths[0], **cli.options(FLAGS.model))
        summary["shapes"] = {name: x.shape for name, x in patterns.named(weights.params).items()}
        lines.append(parameter_table(weights))
    cli.print_result(summary, "\n\n".join(lines))


def prepare() -> None:
    """Store your images, or a TFDS data set, for fast reading: SOURCE --out=DIR [--shard=I/N] [--verify] [--index]
    [--json].

    SOURCE is a folder of images or of class folders, a CSV or JSON-lines file of path and label, tar
    files, or the name of a data set; SOURCE and DIR may be in buckets. The same command continues after it was
    stopped. With --shard=3/16 the process writes a sixteenth of the files; the last of the 16 to end
    completes the set. SOURCE --verify alone reads a prepared data set back, and the exit code is 1 if
    anything is wrong with it. SOURCE --index alone stores beside files of records where these are, if that is not
    stored yet: for sets in buckets, tar files and TFRecord, which otherwise the first start does.
    SOURCE --tokenizer=8000 --out=FILE trains a tokenizer on the captions of pairs of images and texts.
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
    flags.DEFINE_string(
        "holdout_from",
        "",
        "where no split is to judge by: hold out 'test' from this one, e.g. train",
    )
    flags.DEFINE_enum(
        "layout",
        "auto",
        ["auto", "classes", "splits", "parts"],
        "what folders are, where their names can be understood in several ways",
    )
    flags.DEFINE_enum(
        "mask_files",
        "ask",
        ["ask", "skip", "keep"],
        "what files are that are named like masks of images beside them",
    )
    flags.DEFINE_string(
        "label_separator", "", "between several labels of an image in a list, such as '|'"
    )
    flags.DEFINE_bool(
        "examine",
        False,
        "read a folder of images first: what is held out is chosen by content, copies together",
    )
    flags.DEFINE_string("data_dir", "", "where TFDS keeps its data sets")
    features = {
        "image_feature": "TFDS: the feature with the image, if it is not called image",
        "mask_feature": "TFDS: the feature with the mask, or auto; by default labels are classes",
        "mask_table": "TFDS: a CSV file that names the values or colours of masks",
    }
    for flag, doc in features.items():
        flags.DEFINE_string(flag, "", doc)
    flags.DEFINE_string(
        "shard", "1/1", "I/N: write every N-th file, from the I-th on, as one of N processes"
    )
    flags.DEFINE_bool("verify", False, "read all of the prepared data set back")
    flags.DEFINE_bool("index", False, "store where the records of the set are")
    flags.DEFINE_integer(
        "tokenizer",
        0,
        "train a tokenizer of this many tokens on the captions; 0: no",
        lower_bound=0,
    )
    cli.define_json()
    (source, *more) = cli.parse_flags("SOURCE")
    if more or not (FLAGS.out or FLAGS.verify or FLAGS.index):
        raise flags.Error("expected SOURCE --out=DIR, DIR --verify, or DIR --index")
    part = _part(FLAGS.shard)
    for flag in ("verify", "index"):
        if part[1] > 1 and FLAGS[flag].value:
            raise flags.Error(
                f"--{flag} is of the whole set: run it alone, once all shards are done"
            )

    from vit_jax.base import places

    for flag in ("out", "data_dir"):
        if FLAGS[flag].value:
            places.locate(FLAGS[flag].value, f"--{flag}")
    if not FLAGS.out:
        places.locate(source, "DIR")

    if FLAGS.tokenizer:
        if not FLAGS.out:
            raise flags.Error("--tokenizer needs --out=FILE, such as tokenizer.json")
        from vit_jax.data.preparation import tokenizer

        trained = tokenizer.train_tokenizer(source, FLAGS.out, FLAGS.tokenizer)
        cli.print_result(trained, tokenizer.text(trained))
        return

    from vit_jax.data.preparation import index
    from vit_jax.data.preparation.prepare import prepare, text
    from vit_jax.data.preparation.shards import ShardOptions
    from vit_jax.data.preparation.verify import verify

    result, lines = {}, []
    if FLAGS.out:
        result = prepare(
            source,
            FLAGS.out,
            splits=tuple(FLAGS.splits),
            num_shards=FLAGS.shards,
            workers=FLAGS.workers,
            options=ShardOptions(FLAGS.max_side, FLAGS.quality, FLAGS.max_pixels),
            holdout=FLAGS.holdout,
            holdout_by=FLAGS.holdout_by,
            examine=FLAGS.examine,
            holdout_from=FLAGS.holdout_from,
            layout=FLAGS.layout,
            mask_files=FLAGS.mask_files,
            label_separator=FLAGS.label_separator,
            data_dir=FLAGS.data_dir,
            features={flag: FLAGS[flag].value for flag in features},
            part=part,
        )
        lines = [text(result)]
    if FLAGS.index:
        result["index"] = index.index(FLAGS.out or source, data_dir=FLAGS.data_dir)
        lines.append(index.text(result["index"]))
    if FLAGS.verify:
        result["verified"] = verify(FLAGS.out or source, workers=FLAGS.workers)
        lines += [f"{record['name']}: {record['why']}" for record in result["verified"]["bad"]]
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


def convert() -> None:
    """Convert a checkpoint to another format: SOURCE DESTINATION --to=FORMAT [--model=OPTION=VALUE …]
    [--config.data.FIELD=VALUE …] [--thresholds=FILE] [--allow_nonfinite] [--json].

    The source's format and model are recognised; --model=OPTION=VALUE, once for each option, overrides what is
    recognised. --config.data.mean, std, eval_crop, eval_resize and interpolation set its preprocessing. With
    --thresholds=FILE the model also keeps how probable each class has to be to count as predicted.
    """
    settings = config_flags.take_settings()
    flags.DEFINE_string(
        "to", None, "official, big_vision, timm, huggingface, authors, peft or orbax (our own)"
    )
    flags.DEFINE_string(
        "thresholds",
        "",
        "a table of class and threshold, as 'evaluate' writes it, to keep with the model",
    )
    flags.DEFINE_bool("allow_nonfinite", False, "tensors may have NaNs and infinities")
    cli.define_model()
    cli.define_json()
    cli.define_register()
    paths = cli.parse_flags("SOURCE DESTINATION")
    cli.require(to="FORMAT")
    if len(paths) != 2:
        raise flags.Error(f"SOURCE and DESTINATION, not {' '.join(paths)}")

    from vit_jax.config import default_config
    from vit_jax.interchange.formats import describe_model
    from vit_jax.interchange.loading import convert
    from vit_jax.prediction.overrides import of_images

    checkpoint = convert(
        *paths,
        FLAGS.to,
        data=of_images(default_config(), settings, "convert"),
        thresholds=FLAGS.thresholds,
        allow_nonfinite=FLAGS.allow_nonfinite,
        **cli.model_options(),
    )
    config, source = checkpoint.model_config, checkpoint.layout.get("format", "orbax")
    cli.print_result(
        {"format": source, "model": dataclasses.asdict(config)},
        f"{describe_model(config, checkpoint.called)}: {source} {paths[0]} -> {FLAGS.to} {paths[1]}",
    )


def merge() -> None:
    """Average models, or the last checkpoints of a run: CHECKPOINT … --out=DIR [--last=N] [--greedy]
    [--config.data.FIELD=VALUE …] [--json].

    The checkpoints, runs or files of any format, must be fine-tuned from the same weights. All are averaged (a
    uniform soup); with --last=5 the last 5 checkpoints of each run. With --greedy models are added in the order
    of their accuracy, and kept if they do not lower it. They are judged on the images of the first run's
    config.data.eval_split, unless --config.data names others: these must not be the images that you report on.
    """
    settings = config_flags.take_settings()
    flags.DEFINE_string("out", None, "the folder to make")
    flags.DEFINE_integer("last", 1, "how many checkpoints of each run", lower_bound=1)
    flags.DEFINE_bool("greedy", False, "add a model only if the average gets no worse")
    cli.define_json()
    cli.define_register()
    paths = cli.parse_flags("CHECKPOINT")
    cli.require(out="DIR")
    if settings and not FLAGS.greedy:
        raise flags.Error("--config fields name the images that judge: they are for --greedy")

    from vit_jax.interchange import averaging, formats, orbax

    if FLAGS.last > 1:
        paths = [
            str(checkpoint)
            for run in paths
            for checkpoint in averaging.last_checkpoints(run, FLAGS.last)
        ]
    orbax.check_unused(formats.to_write(FLAGS.out, orbax.NAME))
    models = averaging.read_alike(paths)
    result = {"averaged": paths}
    if FLAGS.greedy:
        from vit_jax.evaluation import soups
        from vit_jax.prediction.overrides import load_to_evaluate

        judge = soups.Judge(*load_to_evaluate(paths[0], settings))
        scores = [judge([model]) for model in models]
        chosen = soups.greedy(scores, lambda numbers: judge([models[n] for n in numbers]))
        models = [models[number] for number in chosen]
        result = {
            "averaged": [paths[number] for number in chosen],
            judge.order.metric: {
                path: abs(score) for path, score in zip(paths, scores, strict=True)
            },
        }
    formats.write_checkpoint(averaging.average(models), FLAGS.out, orbax.NAME)
    lines = [f"{len(models)} of {len(paths)} averaged: {FLAGS.out}", *result["averaged"]]
    cli.print_result(result, "\n  ".join(lines))


def push() -> None:
    """Upload a model to the Hugging Face hub: CHECKPOINT OWNER/NAME [--private] [--dry_run] [--format=timm|huggingface]
    [--license=ID] [--overwrite] [--model=OPTION=VALUE …] [--json].

    CHECKPOINT is a run's workdir, one checkpoint, or a file of any format. It uploads the weights as safetensors
    in a layout that timm or transformers load, config, preprocessing, label names, and a model card with data,
    metrics and recipe, without paths, and nothing else. The token is that of 'hf auth login' or HF_TOKEN. With
    --dry_run the files and the card are printed, and nothing is uploaded.
    """
    flags.DEFINE_bool("private", False, "create the repository as a private one")
    flags.DEFINE_bool("dry_run", False, "print what would be uploaded")
    flags.DEFINE_bool(
        "overwrite",
        False,
        "also if the repository holds another model, or a model card that somebody edited",
    )
    flags.DEFINE_string("license", "", "for the model card, e.g. apache-2.0; by default not stated")
    flags.DEFINE_string(
        "format", "", "timm or huggingface; by default the first that has the model"
    )
    cli.define_model()
    cli.define_json()
    cli.define_register()
    names = cli.parse_flags("CHECKPOINT OWNER/NAME")
    if len(names) != 2:
        raise flags.Error(f"CHECKPOINT and OWNER/NAME, not {' '.join(names)}")

    from vit_jax.api import load_run
    from vit_jax.interchange.pushing import check_push, text

    path, repository = names
    check_push(repository, FLAGS.format, dry_run=FLAGS.dry_run)
    result = load_run(path, model=cli.model_options()).push(
        repository,
        format=FLAGS.format,
        private=FLAGS.private,
        license=FLAGS.license,
        overwrite=FLAGS.overwrite,
        dry_run=FLAGS.dry_run,
    )
    cli.print_result(result, text(result))


def models() -> None:
    """List models with their sizes, GFLOPs and tokens: [NAME …] [--parameters] [--image_size=224]
    [--json|--markdown|--published].

    It lists all models, or those that are named, for images of the size that they were published with, or of
    --image_size; if that does not fit a model, for the next smaller size that does. Parameters are counted of named
    models, with --parameters and in JSON and Markdown: for all models that takes half a minute. --published lists
    weights of others that are known to work, by their names in timm, with the size of their images and their
    preprocessing.
    """
    flags.DEFINE_integer("image_size", None, "side of the square images in pixels", lower_bound=1)
    flags.DEFINE_bool("parameters", False, "count the parameters of all models")
    flags.DEFINE_bool("markdown", False, "families with sources and published accuracies")
    flags.DEFINE_bool("published", False, "names of other people's weights instead")
    cli.define_json()
    cli.define_register()
    names = cli.parse_flags("NAME", optional=True)

    from vit_jax.interchange import listing

    if FLAGS.published:
        rows = listing.published_table()
        cli.print_result(rows, listing.published_text(rows))
        return
    counted = bool(names) or FLAGS.parameters or FLAGS.markdown or FLAGS.json
    rows = listing.model_rows(FLAGS.image_size, names, parameters=counted)
    cli.print_result(rows, listing.page(rows) if FLAGS.markdown else listing.text(rows))
