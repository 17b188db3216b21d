"""The command line: which function is which command. A command defines its flags, parses the command
line, and calls what does the work.
"""

import sys
from collections.abc import Callable

from absl import flags

from vit_jax import __version__
from vit_jax.base import limits
from vit_jax.commands import exit_codes
from vit_jax.commands import flags as cli
from vit_jax.commands.benchmark_command import benchmark
from vit_jax.commands.file_commands import convert, merge, models, prepare, push, show
from vit_jax.commands.launch_command import launch
from vit_jax.commands.model_commands import evaluate, exits, export, inspect, serve
from vit_jax.commands.predict_command import predict
from vit_jax.commands.recipe_command import recipes, tutorial
from vit_jax.commands.run_commands import plan, report, sweep, train, vtab

COMMANDS: dict[str, Callable[[], None]] = {
    command.__name__: command
    for command in (
        recipes,
        tutorial,
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
        merge,
        push,
        models,
        plan,
        launch,
        benchmark,
    )
}


def run() -> None:
    """The entry point: runs the command that the command line names."""
    limits.raise_open_files()
    with exit_codes.report_errors():
        _run(sys.argv[1:])


def _run(arguments: list[str]) -> None:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help", *arguments[2:]]
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
        f"  {name:<10} {command.__doc__.partition(':')[0]}" for name, command in COMMANDS.items()
    ]
    text = "vit_jax: Vision Transformers in JAX, from a laptop to a TPU pod.\n"
    end = "'vit_jax COMMAND --help' describes a command and its flags."
    return "\n".join([text, *lines, "", end])
