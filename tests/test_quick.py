"""The quick tests are there, and leave no folder of tests out."""

from tests.quick import ROOT, choose, quick_tests
from tools.faults import FAULTS


def test_every_folder_and_every_planted_fault_has_a_quick_test():
    tests = quick_tests()
    files = {test.partition("::")[0] for test in tests}
    assert all((ROOT / file).is_file() for file in files)
    all_folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert {(ROOT / file).parent for file in files} == all_folders
    for fault in FAULTS.values():
        assert fault.test in tests or fault.test.partition("::")[0] in tests


def test_files_are_chosen_by_their_cost_and_the_cheapest_of_each_folder():
    log = "    0.4 s    3 tests  tests/a/test_x.py\n    9.0 s    1 tests  tests/a/test_y.py\n"
    log += "   20.5 s   10 tests  tests/b/test_z.py\n   30.5 s    1 tests  tests/b/test_w.py\n"
    assert choose(log) == ["tests/a/test_x.py", "tests/b/test_z.py"]
