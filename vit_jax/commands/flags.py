"""What the commands share: flags, and how they are parsed; those of the config are in `config_flags`."""

import contextlib
import math
import re
import sys
from collections.abc import Iterator

from absl import flags

from vit_jax.base import logs, places
from vit_jax.commands import exit_codes

FLAGS = flags.FLAGS
_ILLEGAL = re.compile(r"flag --(\w+)=(.*?): ", re.DOTALL)


class HelpWanted(Exception):
    """Help on a command was asked for."""


def wants_help() -> bool:
    return bool({"-h", "--help"} & set(sys.argv[1:]))


def options(assignments: list[str], flag: str = "model") -> dict:
    """['heads=3', 'activation=gelu'] as a dict; what is no Python literal is a string."""
    from vit_jax.base.settings import literal

    options = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise flags.Error(f"--{flag}={assignment}: pass --{flag}=OPTION=VALUE")
        options[name] = literal(value)
    return options


def values(value: object) -> list:
    """The values of '0.01,0.1', '500 steps,1000 steps' or one alone, as `options` gives them."""
    if isinstance(value, tuple):
        return list(value)
    return value.split(",") if isinstance(value, str) else [value]


def define_checkpoint() -> None:
    flags.DEFINE_string(
        "checkpoint",
        None,
        "a run's workdir, its checkpoints folder, or a checkpoint of any format: a file, a folder, or "
        "hf://OWNER/NAME",
    )


def define_model() -> None:
    """Flags --model, --ignore and --classes, by which a user states facts that a checkpoint lacks."""
    flags.DEFINE_multi_string(
        "model", [], "OPTION=VALUE of the checkpoint's model, where its file does not tell: heads=6"
    )
    flags.DEFINE_string(
        "ignore",
        None,
        "tensors of the checkpoint's file to skip, a pattern of their names; also FILE#ignore=PATTERN",
    )
    flags.DEFINE_string(
        "classes",
        None,
        "a file with the names of the checkpoint's classes, one a line, in the order of its outputs, where it does not "
        "state them",
    )


def model_options() -> dict:
    """The values of --model and --classes, as `loading.load_run` takes them."""
    stated = options(FLAGS.model)
    if FLAGS.classes is None:
        return stated
    from vit_jax.data.labels.class_files import read_classes

    return stated | {"classes": read_classes(FLAGS.classes, "--classes")}


def define_engine() -> None:
    """Flags --engine and --precision."""
    flags.DEFINE_enum(
        "engine",
        "xla",
        ("auto", "xla", "onnxruntime", "openvino"),
        "what computes classes: onnxruntime and openvino from an export that is made once, in ~/.cache/vit_jax/onnx; "
        "auto: on CPUs what is fastest here",
    )
    flags.DEFINE_enum(
        "precision",
        "float32",
        ("float32", "bfloat16", "int8"),
        "what another engine computes products in: bfloat16 is openvino's, int8 onnxruntime's",
    )


def uses_engine() -> bool:
    """Whether --engine or --precision ask for another engine than XLA, which needs no export."""
    return (FLAGS.engine, FLAGS.precision) != ("xla", "float32")


def define_exits() -> None:
    flags.DEFINE_float(
        "budget",
        None,
        "of a model with exits: 10⁹ multiply-adds of an image in the mean; images leave early by the "
        "thresholds that 'vit_jax exits' keeps beside the checkpoint",
        lower_bound=0,
    )
    flags.DEFINE_list(
        "threshold",
        [],
        "instead of a budget: how probable the best class has to be to leave at each exit but the "
        "last, e.g. 0.8,0.9",
    )


def thresholds() -> tuple[float, ...]:
    """What --budget or --threshold ask for, of the checkpoint in --checkpoint; () without either."""
    if FLAGS.threshold and FLAGS.budget is not None:
        raise flags.Error("pass --budget or --threshold, not both")
    if FLAGS.threshold:
        return tuple(confidences("threshold"))
    if FLAGS.budget is None:
        return ()
    from vit_jax.evaluation.early_exit.calibration import for_budget

    return for_budget(FLAGS.checkpoint, FLAGS.budget)


def numbers(flag: str) -> list[float]:
    """The values of a flag that lists numbers."""
    try:
        values = [float(value) for value in FLAGS[flag].value]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        given = ",".join(FLAGS[flag].value)
        raise flags.Error(f"--{flag}={given} must be numbers: {FLAGS[flag].help}")
    return values


def confidences(flag: str) -> list[float]:
    """The values of a flag that lists how probable something has to be."""
    probabilities = numbers(flag)
    if not all(value >= 0 for value in probabilities):
        given = ",".join(FLAGS[flag].value)
        raise flags.Error(
            f"--{flag}={given} must be numbers from 0 on (above 1: never): {FLAGS[flag].help}"
        )
    return probabilities


def define_json() -> None:
    flags.DEFINE_bool(
        "json", False, "print the result as JSON, on the last line of standard output"
    )


def define_register() -> None:
    flags.DEFINE_multi_string(
        "register", [], "a Python file of yours that adds a model family, objective or data source"
    )


def define_hosts() -> None:
    """Flags of a run of several processes; see `processes.initialize` for what is found without
    them.
    """
    flags.DEFINE_string(
        "coordinator",
        None,
        "HOST:PORT of process 0, if the run has several; auto: as the environment says (SLURM, TPU pods, …)",
    )
    flags.DEFINE_integer("num_processes", None, "how many processes the run has", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "which of them this is, from 0", lower_bound=0)
    flags.DEFINE_bool(
        "log_all_processes",
        False,
        "log the messages of all processes, not those of process 0 alone",
    )


@contextlib.contextmanager
def hosts(command: str, **options) -> Iterator[int]:
    """Joins the run's other processes, and ends together with them; yields which of them this is.

    Args:
      command: which command of vit_jax this is, the same in all processes of a run.
      **options: of `processes.initialize`.
    """
    from vit_jax.devices import processes

    processes.initialize(
        FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id, command=command, **options
    )
    if processes.count() == 1:
        yield 0
        return
    from vit_jax.base import native_log

    native_log.keep_from_stdout()  # and so from --json
    index = processes.index()
    logs.to_stderr(index, quiet=index > 0 and not FLAGS.log_all_processes)
    try:
        yield index
    except KeyboardInterrupt:
        processes.abort_all("stopped", exit_codes.STOPPED)
    except BaseException as error:
        processes.abort_all_on_error(exit_codes.as_user_error(error) or error)


def parse_flags(positional: str = "", *, optional: bool = False) -> list[str]:
    """Parses the flags that were defined, imports the files to --register, and returns the other
    arguments.

    Args:
      positional: what the other arguments are, at least one of which is needed unless they are
        `optional`; '': none are expected.

    Raises:
      HelpWanted: --help is among them.
      flags.Error: they cannot be understood.
    """
    if wants_help():
        raise HelpWanted
    try:
        arguments = FLAGS(sys.argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise flags.Error(_unknown_flag(error.flagname)) from None
    except flags.IllegalFlagValueError as error:
        raise flags.Error(_illegal_value(str(error))) from None
    for flag in own_flags():
        if isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise flags.Error(f"--{flag.name}={flag.value} must be finite: {flag.help}")
    if positional and not arguments and not optional:
        raise flags.Error(f"{positional} is missing")
    if "" in arguments:
        raise flags.Error(f"{positional or 'an argument'} is empty; was a variable not set?")
    if arguments and not positional:
        raise flags.Error(f"{' '.join(arguments)!r}: nothing is expected here but flags")
    logs.to_stderr()
    if "ignore" in FLAGS and FLAGS.ignore:
        arguments = _with_ignored(arguments)
    if "register" in FLAGS and FLAGS.register:
        from vit_jax.recipes import user_files

        for path in FLAGS.register:
            user_files.register(path)
    return arguments


def _with_ignored(arguments: list[str]) -> list[str]:
    """The arguments with --ignore as part of the checkpoint's name, which is the first of them or --checkpoint."""
    from vit_jax.interchange.remote import with_ignored

    if "checkpoint" not in FLAGS:
        return [with_ignored(arguments[0], FLAGS.ignore), *arguments[1:]]
    if FLAGS.checkpoint:
        FLAGS.checkpoint = with_ignored(FLAGS.checkpoint, FLAGS.ignore)
    return arguments


def require(**values: str) -> None:
    """Raises `flags.Error` unless these flags were passed; `values` are what each takes: 'DIR'."""
    for name, value in values.items():
        if not FLAGS[name].value:
            raise flags.Error(f"--{name}={value} is missing: {_meaning(FLAGS[name])}")


def print_result(result: dict | list, text: str, process: int = 0) -> None:
    """Prints a command's result, of several processes the first."""
    if process == 0:
        print(places.json_text(result) if FLAGS.json else logs.printable(text))


def own_flags() -> list[flags.Flag]:
    """The flags of a command, not those that libraries define."""
    modules = FLAGS.flags_by_module_dict()
    ours = [name for name in modules if name.startswith(f"{__package__}.")]
    ours.sort(key=lambda name: name.endswith("flags"))  # those that commands share come last
    return [flag for name in ours for flag in modules[name]]


def _unknown_flag(name: str) -> str:
    from vit_jax.base.schema import likeliest

    if name == "model" and "config" in FLAGS:
        return (
            "there is no flag --model: set --config.model.name=NAME, or --config.model.OPTION=VALUE"
        )
    # Without their dashes, which all have in common.
    known = [flag.name for flag in own_flags()]
    close = likeliest(name, known, alike=0.65)
    if close not in known:
        close = _field_called(name)
    command = " ".join(["vit_jax", *sys.argv[0].split()[1:]])
    hint = f"; did you mean '--{close}'?" if close else f"; '{command} --help' lists all"
    return f"there is no flag --{name}{hint}"


def _field_called(name: str) -> str:
    """'config.optim.lr' for lr and learning_rate; '' if no field is called so, or the command takes none."""
    from vit_jax.base.schema import likeliest, walk
    from vit_jax.config import Config

    fields = {field.rpartition(".")[2]: field for field, _ in reversed(list(walk(Config)))}
    close = likeliest(name, fields, alike=0.9) if "config" in FLAGS else ""
    return f"config.{fields[close]}" if close in fields else ""


def _illegal_value(message: str) -> str:
    """What absl says of a value that a flag cannot have, in our words."""
    match = _ILLEGAL.match(message)
    if not match or match[1] not in FLAGS:
        return message
    flag = FLAGS[match[1]]
    wanted, values = flag.parser.syntactic_help, getattr(flag.parser, "enum_values", ())
    if flag.boolean or values:
        wanted = " or ".join(values or ("true", "false"))
    return f"--{match[1]}={match[2]} must be {wanted}: {_meaning(flag)}"


def _meaning(flag: flags.Flag) -> str:
    """The help of a flag, without what absl adds to it."""
    values = "|".join(getattr(flag.parser, "enum_values", ()))
    return flag.help.removeprefix(f"<{values}>: ").partition(";\n    repeat this option")[0]
