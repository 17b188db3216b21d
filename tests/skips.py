"""`pytest --nothing_skipped`: a test that would be skipped fails, with the reason. The gate runs so (`.ci/run`)."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--nothing_skipped", action="store_true", help="a skipped test fails")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return _failed_if_skipped((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _failed_if_skipped((yield), collector.config)


def _failed_if_skipped(report, config):
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped and not expected_to_fail and config.getoption("nothing_skipped"):
        *_, reason = report.longrepr
        report.outcome, report.longrepr = "failed", f"with --nothing_skipped: {reason}"
    return report
