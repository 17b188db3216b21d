"""The command that measures speed: `benchmark`. It imports what it needs when it runs."""

import functools

from absl import flags

from vit_jax.commands import config_flags
from vit_jax.commands import flags as cli

FLAGS = flags.FLAGS


def benchmark() -> None:
    """Measure the throughput of a step, of inference or of the input: {step|inference|input|speed}
    --config=FILE [--config.FIELD=VALUE …] [--steps=20] [--against=FILE] [--profile=DIR] [--breakdown]
    [--latency_ms=50] [--decode=copy] [--json].

    'inference --checkpoint=DIR --budget=GFLOPS' lets images of the run's data leave a model with exits
    early, against always continuing to the last exit; 'inference --config=FILE --shares=0.5,0.25,0.25' does
    so with a new model and made-up images, of which these shares leave at its exits. 'speed
    --models=ViT-B/32,ViT-B/16 --image_sizes=128,224,384 --out=DIR' draws inference over the size of images.
    """
    settings = config_flags.define_config()
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
    what, *more = cli.parse_flags("step, inference, input or speed")
    if more:
        raise flags.Error(f"one of step, inference, input or speed, not {what} {' '.join(more)}")

    if what == "speed":
        _benchmark_speed(settings)
        return
    from vit_jax.benchmarks import early_exit, input, step

    against = config_flags.load_config(settings, FLAGS.against)[0] if FLAGS.against else None
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
        from vit_jax.prediction.overrides import load_to_evaluate

        run, typed = load_to_evaluate(FLAGS.checkpoint, settings)
        result = early_exit.of_checkpoint(run, typed, thresholds=chosen, steps=FLAGS.steps)
    else:
        config, _ = config_flags.load_config(settings)
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
    from vit_jax.config import Config, default_config

    config = config_flags.load_config(settings)[0] if FLAGS.config else default_config()
    if not FLAGS.config:
        change(config, Config, settings)
    sizes = [round(size) for size in cli.numbers("image_sizes")]
    result = speed(config, models=FLAGS.models, image_sizes=sizes, steps=FLAGS.steps, out=FLAGS.out)
    cli.print_result(result, text(result))
