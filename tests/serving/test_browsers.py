"""A stranger's page, in a browser that can reach the server, learns nothing from it."""

import base64
import contextlib
import hashlib
import re

import pytest

from tests.serving.conftest import encoded
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def server(network):
    from tests.serving.conftest import Running

    running = Running(network, names=["Vit.Example"])
    yield running
    running.stop().result(PATIENCE)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:{port}", "localhost:{port}", "LocalHost", "192.168.0.7:80", "[::1]:{port}",
     "vit.example:{port}", "VIT.example."],
)  # fmt: skip
def test_a_request_by_an_address_localhost_or_a_name_that_was_given_is_answered(server, host):
    host = host.format(port=server.place.split(":")[1])
    assert server.ask("/model", Host=host)[0] == 200


@pytest.mark.parametrize("path", ["/", "/model", "/metrics", "/healthz", "/predict", "/nowhere"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "[::1", ""]
)  # fmt: skip
def test_a_request_by_another_name_gets_421_and_nothing_else(server, path, host):
    """As of a page whose name was made to mean 127.0.0.1."""
    host = host.format(port=server.place.split(":")[1])
    body = encoded() if path == "/predict" else None
    status, answer = server.ask(path, body, Host=host)
    assert status == 421 and list(answer) == ["error"] and "--names=NAME" in answer["error"]


def test_a_page_of_the_server_may_post_and_one_from_elsewhere_may_not(server):
    mine = [f"http://{server.place}", "https://vit.example", "http://VIT.example:81"]
    for origin in mine:
        assert server.ask("/predict", encoded(), Origin=origin)[0] == 200, origin
    port = server.place.split(":")[1]
    others = ["http://evil.example", "null", "http://127.0.0.1:1", f"http://localhost:{port}"]
    for origin in others:
        status, answer = server.ask("/predict", encoded(), Origin=origin)
        assert status == 403 and "may not use this server" in answer["error"], origin


def headers_of(server, path: str) -> tuple[dict, str]:
    with contextlib.closing(server.connect()) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return dict(response.headers), response.read().decode()


@pytest.mark.parametrize("path", ["/", "/model", "/metrics", "/healthz", "/nowhere"])
def test_no_answer_is_taken_for_another_kind_or_shown_inside_of_another_page(server, path):
    headers, _ = headers_of(server, path)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_the_page_runs_its_own_script_and_no_other(server):
    headers, page = headers_of(server, "/")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"\s(on\w+|style)=", page)  # which a hash does not allow
