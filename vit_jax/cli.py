"""What the commands of `main.py` share: flags, the config on the command line, help, output."""

import ast
import contextlib
import inspect
import json
import logging as python_logging
import os
import sys
from collections.abc import Callable, Iterator

from absl import flags, logging

FLAGS = flags.FLAGS


class HelpWanted(Exception):
    """A command was asked what it does."""


def help_of(command: Callable) -> str:
    """What a command does, its flags, and the fields of the config where it takes one."""
    own = [
        flag
        for module in (command.__module__, __name__)
        for flag in FLAGS.get_key_flags_for_module(sys.modules[module])
    ]
    text = (
        inspect.getdoc(command)
        + "\n\n"
        + "\n".join(f"  --{flag.name}: {flag.help}" for flag in own)
    )
    if "--config" not in text:
        return text
    from vit_jax.base.schema import describe
    from vit_jax.config import config_class

    return f"{text}\n\nFields of the config, with their defaults:\n\n{describe(config_class())}"


def define_config() -> None:
    """Flags --config=FILE[:ARGUMENT], whose file is read now, and --config.FIELD=VALUE."""
    define_json()
    if wants_help():
        return
    given = [
        argument.removeprefix("--config=")
        for argument in sys.argv
        if argument.startswith("--config=")
    ]
    if not given:
        raise flags.Error("which config? --config=FILE[:ARGUMENT], e.g. --config=configs/digits.py")
    sys.argv = [argument for argument in sys.argv if not argument.startswith("--config=")]

    from ml_collections import config_flags

    from vit_jax.user_files import load_config

    check_overrides()
    config_flags.DEFINE_config_dict("config", load_config(given[-1]))


def check_overrides() -> None:
    """Says the nearest name for a --config.FIELD that does not exist."""
    from vit_jax.base.schema import nearest, walk
    from vit_jax.config import config_class

    known = [name for name, _ in walk(config_class())]
    for argument in sys.argv[1:]:
        name = argument.partition("=")[0].removeprefix("--config.")
        if argument.startswith("--config.") and name not in known:
            namesakes = [field for field in known if field.endswith("." + name.split(".")[-1])]
            hint = f"; did you mean {namesakes[0]!r}?" if namesakes else nearest(name, known)
            raise flags.Error(f"config has no field {name}{hint}")


def wants_help() -> bool:
    return bool({"-h", "--help"} & set(sys.argv[1:]))


def options(assignments: list[str], flag: str = "model") -> dict:
    """['heads=3', 'activation=gelu'] as a dict; what is no Python literal is a string."""
    options = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise flags.Error(f"--{flag}={assignment}: say --{flag}=OPTION=VALUE")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return options


def values(told) -> list:
    """The values of '0.01,0.1', '500 steps,1000 steps' or one alone, as `options` gives them."""
    if isinstance(told, tuple):
        return list(told)
    return told.split(",") if isinstance(told, str) else [told]


def define_checkpoint() -> None:
    flags.DEFINE_string(
        "checkpoint",
        None,
        "a run's workdir, its checkpoints folder, or one checkpoint",
        required=True,
    )


def define_json() -> None:
    flags.DEFINE_bool("json", False, "print one JSON object on the last line of standard output")


def define_hosts() -> None:
    """Flags of a run of several processes; see `processes.initialize` for what is found without
    them.
    """
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, if the run has several")
    flags.DEFINE_integer("num_processes", None, "how many processes the run has", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "which of them this is, from 0", lower_bound=0)
    flags.DEFINE_bool("log_all_processes", False, "not only process 0 says what it is doing")


@contextlib.contextmanager
def hosts(**options) -> Iterator[int]:
    """What several processes do together, and end together; yields which of them this is.

    Args:
      **options: of `processes.initialize`.
    """
    from vit_jax.devices import processes

    processes.initialize(FLAGS.coordinator, FLAGS.num_processes, FLAGS.process_id, **options)
    if processes.count() == 1:
        yield 0
        return
    log_to_stderr()
    try:
        yield processes.index()
    except BaseException as error:
        processes.leave_on_error(error)


def parse(positional: str = "") -> list[str]:
    """Parses the flags that were defined and returns the other arguments, which `positional` names.

    Raises:
      HelpWanted: --help is among them.
      flags.Error: they cannot be understood.
    """
    if wants_help():
        raise HelpWanted
    arguments = FLAGS(sys.argv)[1:]
    if positional and not arguments:
        raise flags.Error(f"what is missing: {positional}")
    if arguments and not positional:
        raise flags.Error(f"cannot make anything of {' '.join(arguments)}")
    log_to_stderr()
    return arguments


def log_to_stderr() -> None:
    """Says what happens in lines a person can read; of libraries only their warnings. Of several
    processes each names itself, and only the first says more than warnings unless asked to.
    """
    processes = sys.modules.get("vit_jax.devices.processes")  # not loaded: one process
    several = processes and processes.count() > 1
    FLAGS.mark_as_parsed()  # From Python there are no flags; absl waits for them before it logs.
    logging.use_absl_handler()
    quiet = several and processes.index() and not FLAGS.log_all_processes
    logging.set_verbosity(logging.WARNING if quiet else logging.INFO)
    prefix = f"[{processes.index()}] " if several else ""
    line = f"{prefix}%(asctime)s %(levelname).1s %(message)s"
    handler = logging.get_absl_handler()
    handler.setFormatter(python_logging.Formatter(line, datefmt="%H:%M:%S"))
    handler.addFilter(
        lambda record: (
            record.levelno >= python_logging.WARNING
            or f"{os.sep}vit_jax{os.sep}" in record.pathname
        )
    )


def print_result(result: dict, text: str, process: int = 0) -> None:
    """Prints a command's result, of several processes the first."""
    if process == 0:
        print(json.dumps(result) if FLAGS.json else text)
