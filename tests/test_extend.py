"""What `vit_jax.extend` promises: its names, what they are called with, and that an import of it costs little."""

import ast
import dataclasses
import inspect
import json
import pathlib
import re
import subprocess
import sys

from vit_jax import extend

GUESTS_EXTEND = (extend.ClassifierConfig, extend.EvaluatorOptions, extend.StackedConfig)
SNAPSHOT = pathlib.Path(__file__).with_name("extend_names.json")
CHANGED = """vit_jax.extend changed. What users call must keep working: leave an earlier name, parameter or
method in place, or write a line on it in CHANGELOG.md under Changed. Then write what is promised from now on:
python tests/test_extend.py
"""


def parameters_of(function) -> str:
    """'(name, *, option=…)': names, kinds and whether there is a default; types and defaults may change."""
    shown, was = [], None
    for parameter in inspect.signature(function).parameters.values():
        kind, text = parameter.kind, parameter.name
        if kind is parameter.KEYWORD_ONLY and was not in (kind, parameter.VAR_POSITIONAL):
            shown.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        default = "" if parameter.default is parameter.empty else "=…"
        shown.append(f"{stars}{text}{default}")
        was = kind
    return f"({', '.join(shown)})"


def members_of(cls: type) -> dict[str, str]:
    """How it is made, public methods with their parameters, and other public names; those that this package defines."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    if any("doc" in f.metadata for f in fields) and not issubclass(cls, GUESTS_EXTEND):
        return {}  # A section of the config: its options come and go.
    found = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("vit_jax."):
            continue
        for name, member in vars(base).items():
            member = getattr(member, "__func__", member)
            is_made = name == "__init__" and not getattr(cls, "_is_protocol", False)
            if is_made or name == "__call__" or not name.startswith("_"):
                found[name] = parameters_of(member) if inspect.isfunction(member) else ""
    return {name: found[name] for name in sorted(found.keys() - {f.name for f in fields})}


def promised() -> dict:
    found = {}
    for name in sorted(extend.__all__):
        value = getattr(extend, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            found[name] = [base.__name__ for base in value.__mro__[1:-2]]
        elif inspect.isclass(value) and value.__module__.startswith("vit_jax."):
            found[name] = members_of(value)
        elif inspect.isfunction(value):
            found[name] = parameters_of(value)
        elif inspect.ismodule(value):
            functions = inspect.getmembers(value, inspect.isfunction)
            found[name] = {n: parameters_of(f) for n, f in functions if not n.startswith("_")}
        else:
            found[name] = ""  # a type
    return found


def test_the_public_surface_is_what_was_promised():
    assert promised() == json.loads(SNAPSHOT.read_text()), CHANGED


def test_type_checkers_see_the_names_that_are_there():
    tree = ast.parse(pathlib.Path(extend.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        for alias in node.names
    }
    assert seen.keys() == set(extend.__all__)
    for name, (module, there) in seen.items():
        source = extend._SOURCES[name]
        as_module = f"vit_jax.{source.rstrip(':')}" == f"{module}.{there}"
        assert as_module or f"vit_jax.{source}" in (module, f"{module}:{there}"), name


def test_the_reference_lists_the_names():
    page = (pathlib.Path(__file__).resolve().parents[1] / "docs/reference.md").read_text()
    rows = re.findall(r"^\| (?!for)[^|`]+ \| (.*) \|$", page, flags=re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(extend.__all__)


def test_an_import_of_it_loads_nothing_else():
    code = "import sys, vit_jax.extend; print(*(name for name in sys.modules if name.startswith(('vit_jax', 'jax'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "vit_jax", "vit_jax.devices", "vit_jax.devices.libtpu", "vit_jax.extend",
    }  # fmt: skip


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(promised(), indent=1, ensure_ascii=False) + "\n")
