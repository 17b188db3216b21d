"""Compares the facts that all processes of a run must share, before anything depends on them.

Process 0 shares its values through JAX's coordination service, and every other process compares them with its own:
no collective runs and no device is used. `training/agreement.py` has the facts of a training run.
"""

import json
import socket
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import ConfigError
from vit_jax.devices import processes

_SHOWN = 60  # characters of a value in a message
_NAMED = 5  # further fields that a message names
_ABSENT = "nothing"


def check_agreement(
    subject: str, fields: Mapping[str, Any], minutes: float = processes.WAIT_MINUTES
) -> None:
    """Ends the run in all processes unless they all pass the same fields.

    Args:
      subject: names the comparison in messages about processes that do not come.
      fields: values that JSON can hold, by the names that a message gives them.
      minutes: how long processes wait for each other.

    Raises:
      ConfigError: some process has another value than process 0. All processes raise the same sentence, which names
        the process and its host, the field and both values.
      HostsError: other processes cannot be reached.
    """
    if processes.count() == 1:
        return
    host = socket.gethostname()
    text = json.dumps({"host": host, "fields": dict(fields)})
    own = json.loads(text)  # JSON has no tuples: both sides are compared as it holds them
    first = json.loads(processes.broadcast_from_first(subject, text, minutes))
    difference = find_difference(first["fields"], own["fields"])
    report = json.dumps(difference | {"host": host}) if difference else ""
    reports = processes.failures(subject, report, minutes)
    if reports:
        parsed = {process: json.loads(text) for process, text in reports.items()}
        raise ConfigError(describe_differences(parsed, first["host"]))


def find_difference(first: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The first field with different values in two processes, in the order of process 0; {} if they agree.

    Args:
      first: the fields of process 0.
      own: the fields of the other process.

    Returns:
      `field`, both values as text, `first` and `own`, and `more`: the names of all further fields that differ.
    """
    names = [name for name in (first | own) if first.get(name) != own.get(name)]
    if not names:
        return {}
    field = names[0]
    before = first.get(field, _ABSENT)
    now = own.get(field, _ABSENT)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        index = next(i for i, value in enumerate(before) if value != now[i])
        before = before[index]
        now = now[index]
        field = f"{field}, number {index}"
    return {"field": field, "first": _text(before), "own": _text(now), "more": names[1:]}


def describe_differences(reports: Mapping[int, Mapping[str, Any]], first_host: str) -> str:
    """The sentence for the reports of all processes that differ from process 0.

    Args:
      reports: by process, the result of `find_difference` with `host`.
      first_host: the host of process 0.
    """
    process = min(reports)
    report = reports[process]
    also = ""
    if len(reports) > 1:
        others = ", ".join(str(other) for other in sorted(reports) if other != process)
        also = f" Processes that differ from process 0 too: {others}."
    more = ""
    if report["more"]:
        named = ", ".join(report["more"][:_NAMED])
        rest = len(report["more"]) - _NAMED
        more = f" They also differ in {named}{f' and {rest} more' if rest > 0 else ''}."
    return (
        f"the processes of this run do not agree on {report['field']}: process {process} on {report['host']} has "
        f"{report['own']}, and process 0 on {first_host} has {report['first']}.{more}{also} Start every process with "
        "the same command, files, data, versions and environment"
    )


def _text(value: Any) -> str:
    text = value if value is _ABSENT else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
