"""The command that helps shells to complete command lines: `completion`. It imports neither JAX nor what does the work,
since it runs whenever somebody presses TAB.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

from absl import flags

from vit_jax.commands import flags as cli

FLAGS = flags.FLAGS

BASH = r"""# vit_jax completion bash > ~/.local/share/bash-completion/completions/vit_jax
_vit_jax() {
  local line=${COMP_LINE:0:COMP_POINT} breaks='' prefix='' word
  mapfile -t COMPREPLY < <("${1/#\~/$HOME}" completion --line="$line" 2>/dev/null)
  COMPREPLY=("${COMPREPLY[@]%%$'\t'*}")
  # Of --config=NAME readline completes NAME alone.
  [[ $COMP_WORDBREAKS == *=* ]] && breaks+='='
  [[ $COMP_WORDBREAKS == *:* ]] && breaks+=':'
  word=${line##* }
  [[ -n $breaks && $word == *["$breaks"]* ]] && prefix=${word%"${word##*["$breaks"]}"}
  COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
  return 0
}
complete -o default -F _vit_jax vit_jax
"""
ZSH = r"""#compdef vit_jax
# vit_jax completion zsh > a folder of $fpath/_vit_jax
_vit_jax() {
  local entry word line="${(j: :)words[1,CURRENT-1]} $PREFIX"
  local -a done shown_done open shown_open
  for entry in ${(f)"$(${~words[1]} completion --line="$line" 2>/dev/null)"}; do
    word=${entry%%$'\t'*}
    if [[ $word == *[=.] ]]; then
      open+=($word) shown_open+=("${entry/$'\t'/  -- }")
    else
      done+=($word) shown_done+=("${entry/$'\t'/  -- }")
    fi
  done
  (( $#open )) && compadd -S '' -l -d shown_open -a open
  (( $#done )) && compadd -l -d shown_done -a done
  (( $#open + $#done )) || { compset -P '*='; _files }
}
if [ "$funcstack[1]" = _vit_jax ]; then _vit_jax "$@"; else compdef _vit_jax vit_jax; fi
"""
FISH = r"""# vit_jax completion fish > ~/.config/fish/completions/vit_jax.fish
function __vit_jax_complete
    set -l words (vit_jax completion --line=(commandline -cp | string collect) 2>/dev/null)
    if test (count $words) -gt 0
        printf '%s\n' $words
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c vit_jax -f -a '(__vit_jax_complete)'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion() -> None:
    """Print what lets a shell complete commands, flags, recipes, fields and models: bash|zsh|fish.

    For this shell only: source <(vit_jax completion bash). The first line of what is printed says where to keep it.
    """
    flags.DEFINE_string("line", None, "for shells: print what can follow this command line")
    shells = cli.parse_flags("bash, zsh or fish", optional=True)
    if FLAGS.line is not None:
        for word, doc in complete(FLAGS.line):
            print(f"{word}\t{doc}" if doc else word)
        return
    if len(shells) != 1 or shells[0] not in SHELLS:
        raise flags.Error(f"expected {', '.join(SHELLS)}, not {' '.join(shells)!r}")
    print(SHELLS[shells[0]], end="")


def complete(line: str) -> Iterator[tuple[str, str]]:
    """The words that can stand where a command line ends, each with what it is.

    Args:
      line: up to the cursor, from the name of the program on.
    """
    words = line.split()[1:] if line.endswith(" ") else line.split()[1:-1]
    last = "" if line.endswith(" ") else line.split()[-1]
    yield from ((word, doc) for word, doc in _candidates(words, last) if word.startswith(last))


def _candidates(words: list[str], last: str) -> Iterable[tuple[str, str]]:
    """All words of one kind, not only those that begin like the last one."""
    from vit_jax.commands.main import COMMANDS

    commands = [(name, command.__doc__.partition(":")[0]) for name, command in COMMANDS.items()]
    match words:
        case []:
            return [*commands, ("--help", ""), ("--version", "")]
        case ["help"]:
            return commands
        case ["launch", *others] if "--" in others:
            return _candidates(others[others.index("--") + 1 :], last)
        case ["launch", *others]:
            return _of_launch(others, last)
        case [name, *others] if name in COMMANDS:
            return _of_command(name, others, last)
    return []


def _of_command(name: str, words: list[str], last: str) -> Iterable[tuple[str, str]]:
    """Flags and fields of a command, their values, and what else it takes."""
    if last.startswith("--config."):
        return _of_config(last)
    named, takes_fields = _flags_of(name)
    flag, equals, _ = last.removeprefix("--").partition("=")
    if equals and flag in named:
        values = getattr(named[flag].parser, "enum_values", None) or ()
        return _plain(f"--{flag}={value}" for value in (_recipes() if flag == "config" else values))
    if last.startswith("-"):
        shown = [
            (f"--{flag}{'' if f.boolean else '='}", _line(f.help)) for flag, f in named.items()
        ]
        return [*shown, ("--config.", "a field of the config")] if takes_fields else shown
    match name, words:
        case _, [*_, "--config"] if "config" in named:
            return _plain(_recipes())
        case "recipes", []:
            return _plain([*_recipes(), "copy"])
        case "recipes", ["copy"]:
            return _plain(_recipes())
        case "models", _:
            return _plain(_fields()["model.name"])
        case "completion", []:
            return _plain(SHELLS)
    return []


def _flags_of(name: str) -> tuple[dict[str, flags.Flag], bool]:
    """The flags of a command, by name, and whether it takes fields of the config."""
    from vit_jax.commands.main import COMMANDS

    sys.argv = [name, "--help"]
    with contextlib.suppress(cli.HelpWanted):
        COMMANDS[name]()
    named = {flag.name: flag for flag in cli.own_flags() if flag.name != "line"}
    return named, "config" in named or "--config." in COMMANDS[name].__doc__


def _of_config(last: str) -> Iterable[tuple[str, str]]:
    """--config.FIELD=, sections before what is in them, and the values of a field that has few."""
    fields, (name, equals, _) = _fields(), last.removeprefix("--config.").partition("=")
    if equals:
        return _plain(f"--config.{name}={value}" for value in fields.get(name, ()))
    section, dot, _ = name.partition(".")
    if dot:
        return _plain(f"--config.{field}=" for field in fields if field.startswith(f"{section}."))
    parts = (field.partition(".") for field in fields)
    return _plain(dict.fromkeys(f"--config.{part}{dot or '='}" for part, dot, _ in parts))


def _of_launch(words: list[str], last: str) -> Iterable[tuple[str, str]]:
    """Engines, their actions and flags, read from the text of their files, since these import JAX."""
    shipped = _shipped()
    engines = {path.stem: path for path in (shipped.launch_folder() / "engines").glob("[a-z]*.py")}
    if not words:
        return _plain(sorted(engines))
    if words[0] not in engines:
        return []
    shipped.find_launch()
    table, known = importlib.import_module("launch.flags"), _constants(engines[words[0]])
    command = ("--", "behind it the command to run")
    if last.startswith("-"):
        shown = [(name, table.FLAGS[name]) for name in (*known["FLAGS"], *table.COMMON)]
        return [command, *((f"--{n}{'' if f.default is False else '='}", f.help) for n, f in shown)]
    return [*_plain(known["ACTIONS"]), command]


def _constants(path: pathlib.Path) -> dict[str, list[str]]:
    """The names in each tuple or dict at the top of a file, those of other tuples there included."""
    constants: dict[str, list[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Dict):
            parts = node.value.keys if isinstance(node.value, ast.Dict) else node.value.elts
            names: list[str] = []
            for part in parts:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names.append(part.value)
                elif isinstance(part, ast.Starred) and isinstance(part.value, ast.Name):
                    names += constants.get(part.value.id, [])
            constants.update({t.id: names for t in node.targets if isinstance(t, ast.Name)})
    return constants


def _plain(words: Iterable[str]) -> list[tuple[str, str]]:
    return [(word, "") for word in words]


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _fields() -> dict[str, list[str]]:
    """The fields of the config with the values of those that have few; `tools/generated.py` writes the file."""
    return json.loads(pathlib.Path(__file__).with_name("completion.json").read_text())


def _recipes() -> list[str]:
    return _shipped().recipe_names()


def _shipped() -> ModuleType:
    """`vit_jax.recipes.shipped`, without the package that it is in, which imports JAX."""
    path = pathlib.Path(__file__).resolve().parents[1] / "recipes" / "shipped.py"
    spec = importlib.util.spec_from_file_location("shipped", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
