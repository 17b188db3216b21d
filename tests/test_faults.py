"""The faults that `tools/faults.py` plants: each is found by the test that it names."""

import ast
import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("faults", ROOT / "tools" / "faults.py")
faults = sys.modules["faults"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(faults)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_every_fault_fits_the_code_and_names_a_test(name):
    fault = faults.FAULTS[name]
    text = faults.planted(fault, (ROOT / "vit_jax" / fault.file).read_text())
    ast.parse(text)
    file, _, test = fault.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_fault_that_does_not_fit_is_an_error():
    fault = faults.Fault("x.py", "a", "b", "")
    for text in ("c", "a a"):
        with pytest.raises(ValueError, match=r"x\.py has 'a' [02] times"):
            faults.planted(fault, text)


@pytest.mark.slow
def test_every_fault_is_caught(tmp_path):
    faults.copy_checkout(tmp_path)
    assert faults.passes(tmp_path, sorted({fault.test for fault in faults.FAULTS.values()}))
    assert faults.missed(list(faults.FAULTS), tmp_path) == []
