"""The command that starts runs on clusters: `launch`. What it runs is in `launch/`."""

import importlib
import sys
from types import SimpleNamespace

from absl import flags

from vit_jax.commands import command_help
from vit_jax.commands import flags as cli

FLAGS = flags.FLAGS


def launch() -> None:
    """Start a run on a cluster: ENGINE [ACTION] [FLAGS] -- train --config=RECIPE --workdir=DIR … [-- FLAGS].

    Engines are gke, tpu_vm, xpk, slurm, ray, skypilot and local; 'vit_jax launch ENGINE --help' lists the flags of one.
    First the training command's own --dry_run checks it for the devices of the cluster. What stands behind a second
    -- are flags of the program that the engine calls. With --dry_run it prints what would run, and starts nothing.
    """
    from vit_jax.commands.main import COMMANDS
    from vit_jax.recipes import shipped

    shipped.find_launch()
    main, table = (importlib.import_module(f"launch.{name}") for name in ("main", "flags"))
    program, *arguments = sys.argv
    arguments, command, further = _split(arguments)
    engine, action = _engine_and_action(arguments, main)
    if engine is None:
        sys.argv = [program, *arguments]
        cli.parse_flags()
        lines = [f"\n  {name:<9} {where}" for name, where in main.ENGINES.items()]
        raise flags.Error(f"which engine?{''.join(lines)}")
    module = main.engine_of(engine)
    names = [*module.FLAGS, *table.COMMON]
    rest = arguments[2 if action else 1 :]
    for name in names:
        _define(name, table.FLAGS[name], module.DEFAULTS.get(name))
    if cli.wants_help():
        print(command_help.help_of(module))
        if module.PROGRAM:
            print(
                f"\nFlags of '{module.PROGRAM}' stand behind the training command, after a second --."
            )
        return
    for word in rest:
        flag = word.lstrip("-").partition("=")[0]
        if word.startswith("--") and flag in table.FORMER and flag not in names:
            raise flags.Error(f"{word}: this flag is now {table.FORMER[flag]}")
    sys.argv = [f"{program} {engine}", *rest]
    cli.parse_flags()
    action = action or next(iter(module.ACTIONS))
    if further and not module.PROGRAM:
        raise flags.Error(
            f"{' '.join(further)}: {engine} calls no program that takes further flags"
        )
    options = SimpleNamespace(**{name: FLAGS[name].value for name in names})
    main.start(engine, action, options, command, further, COMMANDS)


def _split(arguments: list[str]) -> tuple[list[str], list[str], list[str]]:
    """What stands before the first --, between both, and behind the second."""
    parts: list[list[str]] = [[]]
    for word in arguments:
        if word == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(word)
    first, command, further = [*parts, [], []][:3]
    return first, command, further


def _engine_and_action(arguments: list[str], main) -> tuple[str | None, str | None]:
    """The engine, and its action if there is one."""
    from vit_jax.base.schema import nearest

    words = []
    for word in arguments:
        if word.startswith("-"):
            break
        words.append(word)
    if not words:
        return None, None
    engine, *others = words
    if engine not in main.ENGINES:
        raise flags.Error(f"there is no engine {engine!r}{nearest(engine, main.ENGINES)}")
    known = main.engine_of(engine).ACTIONS
    if others and (len(others) > 1 or others[0] not in known):
        more = f"; actions of {engine} are {', '.join(known)}" if len(known) > 1 else ""
        raise flags.Error(f"{' '.join(others)!r}: what is to run follows --{more}")
    return engine, others[0] if others else None


def _define(name: str, flag, default: object) -> None:
    """A flag of absl, by the table's."""
    value = flag.default if default is None else default
    define = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        tuple: flags.DEFINE_multi_string,
    }.get(type(flag.default), flags.DEFINE_string)
    shown = f" ({value})" if value or type(value) is int else ""
    define(name, value, flag.help + shown)
