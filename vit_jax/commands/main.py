"""The command line: which function is which command, imported when it is called. A command defines its flags,
parses the command line, and calls what does the work.
"""

import sys
from collections.abc import Callable

from absl import flags

from vit_jax import __version__
from vit_jax.base import limits
from vit_jax.base.lazy_table import LazyTable
from vit_jax.commands import command_help, exit_codes
from vit_jax.commands import flags as cli

COMMANDS: LazyTable[Callable[[], None]] = LazyTable(
    {
        "recipes": "vit_jax.commands.recipe_command:recipes",
        "tutorial": "vit_jax.commands.recipe_command:tutorial",
        "classify": "vit_jax.commands.classify_command:classify",
        "train": "vit_jax.commands.run_commands:train",
        "sweep": "vit_jax.commands.run_commands:sweep",
        "vtab": "vit_jax.commands.run_commands:vtab",
        "evaluate": "vit_jax.commands.model_commands:evaluate",
        "predict": "vit_jax.commands.predict_command:predict",
        "exits": "vit_jax.commands.model_commands:exits",
        "export": "vit_jax.commands.model_commands:export",
        "serve": "vit_jax.commands.model_commands:serve",
        "inspect": "vit_jax.commands.model_commands:inspect",
        "report": "vit_jax.commands.run_commands:report",
        "show": "vit_jax.commands.file_commands:show",
        "prepare": "vit_jax.commands.file_commands:prepare",
        "convert": "vit_jax.commands.file_commands:convert",
        "merge": "vit_jax.commands.file_commands:merge",
        "push": "vit_jax.commands.file_commands:push",
        "models": "vit_jax.commands.file_commands:models",
        "plan": "vit_jax.commands.run_commands:plan",
        "launch": "vit_jax.commands.launch_command:launch",
        "benchmark": "vit_jax.commands.benchmark_command:benchmark",
        "completion": "vit_jax.commands.completion_command:completion",
    }
)


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
        print(command_help.help_of(COMMANDS[name]))


def _usage() -> str:
    lines = [
        f"  {name:<10} {command.__doc__.partition(':')[0]}" for name, command in COMMANDS.items()
    ]
    text = "vit_jax: Vision Transformers in JAX, from a laptop to a TPU pod.\n"
    end = "'vit_jax COMMAND --help' describes a command and its flags."
    return "\n".join([text, *lines, "", end])
