"""Bodies of requests: what counts of them, and that one client leaves room for others; with real connections."""

import contextlib
import socket

import pytest

from tests.serving.conftest import Slow, encoded
from tests.waiting import PATIENCE, until
from vit_jax.serving.bodies import client_of

HEAD = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def connect():
    """`connect(server, size, sent, source)`: a connection that has announced a body and sent a part of it, so many
    zeros or these bytes.
    """
    with contextlib.ExitStack() as connections:

        def start(server, size: int, sent: int | bytes, source: str = "127.0.0.1") -> socket.socket:
            host, port = server.place.split(":")
            connection = connections.enter_context(
                socket.create_connection(
                    (host, int(port)), timeout=PATIENCE, source_address=(source, 0)
                )
            )
            connection.sendall(HEAD % size + bytes(sent))
            return connection

        yield start


@pytest.fixture
def small(monkeypatch):
    from vit_jax.serving import server

    monkeypatch.setattr(server, "_MOST_HELD", 3_000_000)


def test_connections_that_send_nothing_hold_nothing(serving, network, connect):
    server = serving(network)
    for _ in range(150):  # of 10 MB each
        connect(server, 10_000_000, 0)
    assert server.ask("/predict", encoded())[0] == 200


def test_a_client_that_holds_much_is_refused_more_and_others_are_served(
    small, serving, network, connect
):
    server = serving(network)
    for _ in range(2):
        connect(server, 2_000_000, 700_000)
    until(lambda: server.server.bodies.held == 1_400_000)
    more = connect(server, 200_000, 150_000)  # of 3 MB; it would have more than is left
    assert more.recv(4096).startswith(b"HTTP/1.1 503")
    other = connect(server, 700_000, 700_000, source="127.0.0.2")
    assert other.recv(4096).startswith(b"HTTP/1.1 415")  # received; and it is no image
    third = connect(server, 900_000, 900_000, source="127.0.0.3")
    assert third.recv(4096).startswith(b"HTTP/1.1 503")


def test_bytes_count_until_they_are_answered_or_the_client_has_gone(
    small, serving, network, connect
):
    server = serving(network)
    connection = connect(server, 600_000, 500_000)
    until(lambda: server.server.bodies.held == 500_000)
    connection.sendall(bytes(100_000))
    assert connection.recv(4096).startswith(b"HTTP/1.1 415") and server.server.bodies.held == 0
    gone = connect(server, 600_000, 500_000)
    until(lambda: server.server.bodies.held == 500_000)
    gone.close()
    until(lambda: server.server.bodies.held == 0)
    assert server.ask("/predict", encoded())[0] == 200


def test_a_client_is_an_address_or_a_network_of_ipv6():
    assert client_of("192.0.2.7") == "192.0.2.7" and client_of(None) == ""
    assert client_of("2001:db8:1:2::3") == client_of("2001:db8:1:2:ffff::1") == "2001:db8:1:2::/64"
    assert client_of("::ffff:192.0.2.7") != client_of("::ffff:192.0.2.8")


def test_of_a_full_queue_another_client_gets_a_place_of_the_one_with_most(
    serving, network, connect
):
    slow = Slow(network)
    server = serving(slow, queue=8)
    image = encoded()

    def ask(source: str) -> socket.socket:
        return connect(server, len(image), image, source)

    greedy = [ask("127.0.0.1")]
    until(lambda: slow.batches)  # it is being computed
    for count in range(2, 9):
        greedy.append(ask("127.0.0.1"))
        until(lambda count=count: len(server.server._waiting) == count)
    assert ask("127.0.0.1").recv(4096).startswith(b"HTTP/1.1 503")  # no more for itself
    others = [ask(f"127.0.0.{number}") for number in (2, 2, 2, 3)]
    lost = [connection.recv(4096) for connection in greedy[-4:]]
    assert all(one.startswith(b"HTTP/1.1 503") and b"others wait too" in one for one in lost)
    assert len(server.server._waiting) == 8
    slow.go_on.set()
    answers = [connection.recv(4096) for connection in (*greedy[:-4], *others)]
    assert all(one.startswith(b"HTTP/1.1 200") for one in answers)
