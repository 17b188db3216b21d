"""What keeps a stranger's page, in a browser that can reach the server, from using it: the names under which the
server answers, and the headers of its answers.
"""

import base64
import hashlib
import ipaddress
import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from vit_jax.serving.limits import Refusal

# No answer is taken for another kind of content, or shown inside of a page from elsewhere; nor does it name the library
# that gives it, and its version.
HEADERS = {
    "Server": "vit_jax",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def check_names(headers: Mapping[str, str], listening: str, names: Collection[str]) -> None:
    """Raises `Refusal` for a request by another name, or from a page of another server.

    A page may have its own name resolved to this machine: then the browser takes the server for that page's own, and
    lets it read all answers, but sends its name as `Host`.

    Args:
      headers: of the request. Browsers always send `Host`, and `Origin` where a page posts.
      listening: the host on which the server listens.
      names: others under which it is known, beside addresses and localhost; all in lower case.
    """
    host, origin = headers.get("Host"), headers.get("Origin")
    if host is not None and not _is_ours(_hostname(f"//{host}"), {listening, *names}):
        raise Refusal(
            421, f"this server is not asked as {host[:100]!r}: use its address, or start it with --names=NAME"
        )  # fmt: skip
    if origin is not None and origin.partition("//")[2] != host and _hostname(origin) not in names:
        raise Refusal(
            403, f"pages of {origin[:100]!r} may not use this server, unless it is started with --names=NAME"
        )  # fmt: skip


def page_headers(page: str) -> dict[str, str]:
    """`HEADERS` of a page whose scripts and styles are in it: these run, and nothing else."""
    sources = {
        kind: " ".join(map(_hash, re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)))
        for kind in ("script", "style")
    }
    policy = "; ".join([
        "default-src 'none'", f"script-src {sources['script']}", f"style-src {sources['style']}",
        "img-src data: blob:", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ])  # fmt: skip
    return HEADERS | {"Content-Security-Policy": policy}


def _is_ours(name: str, names: Collection[str]) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name in names
    return True


def _hostname(address: str) -> str:
    """The host of an address, in lower case; '' if there is none."""
    try:
        return (urlsplit(address).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
