"""Ports for processes that must be told theirs."""

import random
import socket

# Below those that the system gives to connections and to servers that ask for any: until the process that a port is
# for listens on it, which takes seconds, many of these are made.
_PORTS = range(10_000, 30_000)


def free_port() -> int:
    """A port on which nothing listens."""
    while True:
        port = random.SystemRandom().choice(_PORTS)  # whatever a test has seeded
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
