"""What every answer and every request must have: a Host we know, headers that let the page load nothing else."""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


class Guarded:
    """Refuses requests whose Host is not this server's, and adds the headers to what is answered.

    A page elsewhere can make its own name point to 127.0.0.1 (DNS rebinding) and would then be let in by the browser;
    its requests still carry its name.

    Args:
        app: What is guarded.
        host: The address that the server listens on.
    """

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self.app = app
        self.names = LOOPBACK | {host.lower()}
        self.any_address = not _is_loopback(host)
        if self.any_address:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        host = host_name(Headers(scope=scope).get("host", ""))
        answer: ASGIApp = self.app
        if not self.knows(host):
            answer = PlainTextResponse("This server does not answer under that name.\n", status_code=421)
        elif scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse("This server only shows; nothing can be changed here.\n", status_code=405)
        await answer(scope, receive, send_guarded)

    def knows(self, host: str) -> bool:
        """Whether a request for this host is meant for this server."""
        if host in self.names:
            return True
        # Under an address there is no name that somebody else could have pointed here.
        return self.any_address and _is_address(host)


def host_name(header: str) -> str:
    """The host of a Host header, without its port.

    >>> host_name("LOCALHOST:80"), host_name("[::1]:80"), host_name("a.example")
    ('localhost', '::1', 'a.example')
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if ":" in header else header


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
