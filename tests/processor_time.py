"""`pytest --processor_time=N`: the N test files that took most processor time, with the processes that they started and
waited for. On a busy machine the clock says little.
"""

import collections
import resource

import pytest

_START = pytest.StashKey[float]()
_SECONDS = "processor seconds"


def pytest_addoption(parser):
    parser.addoption(
        "--processor_time",
        type=int,
        default=0,
        metavar="N",
        help="the N costliest files are listed",
    )


def _now() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[_START] = _now()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    try:
        return (yield)
    finally:
        item.user_properties.append((_SECONDS, _now() - item.stash[_START]))


def pytest_terminal_summary(terminalreporter, config):
    count = config.getoption("processor_time")
    if not count:
        return
    seconds, tests = collections.Counter(), collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown":
                file = report.nodeid.partition("::")[0]
                seconds[file] += dict(report.user_properties).get(_SECONDS, 0.0)
                tests[file] += 1
    terminalreporter.section(f"{seconds.total():.0f} s of processor time in {tests.total()} tests")
    for file, spent in seconds.most_common(count):
        terminalreporter.write_line(f"{spent:8.1f} s  {tests[file]:4} tests  {file}")
