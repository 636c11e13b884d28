"""Which hosts the server answers, and headers that keep the page from loading anything else."""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
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


def middleware(host: str) -> list[Middleware]:
    """Returns the middleware for a server that listens on `host`.

    A page elsewhere can make its own name point to 127.0.0.1 (DNS rebinding), and the browser would let it in; its
    requests still carry its name in the Host header.
    """
    names = {*LOOPBACK, host.lower()}
    if is_loopback(host):
        return [Middleware(SecurityHeaders), Middleware(TrustedHostMiddleware, allowed_hosts=[*names, "[::1]"])]
    names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return [Middleware(SecurityHeaders), Middleware(TrustedHostOrAddress, allowed_hosts=[*names, "[::1]"])]


class TrustedHostOrAddress(TrustedHostMiddleware):
    """Also answers requests to any IP address: unlike a name, nobody else can point an address here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if _is_address(host) or _is_address(host.rpartition(":")[0].strip("[]")):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class SecurityHeaders:
    """Adds `HEADERS` to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
