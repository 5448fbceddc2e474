"""Who may ask the studio for anything: the browser that was given its address, and nothing else.

1. The address that is printed holds a token, which is good once: it is exchanged for a cookie, and a new one is
   printed. With `--host`, a password stands for the token.
2. Every request has the cookie, calls this machine by its own name (a foreign one that leads here is refused), and does
   not come from another page.
3. A request's body is limited before it is read.
4. Answers allow nothing but this server's own scripts, styles and pictures.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "qflux_studio"
MOST_BODY = 64 * 2**20
"""Bytes of a request: a picture."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' blob: data:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_OPEN = "/open/"
_AFTER_A_GUESS = 1.0
"""Seconds that a wrong password takes; guesses are looked at one after another."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
"""What a browser on this machine calls it. The port may be another one: that of a tunnel from elsewhere."""
_SIGN_IN = """<!doctype html><meta charset="utf-8"><title>qflux studio</title>
<body style="font: 16px system-ui; margin: 15vh auto; max-width: 26em; padding: 0 1em">
<h1 style="font-size: 20px">qflux studio</h1>{body}</body>"""
_NO_TOKEN = "<p>This page needs the address that the terminal shows: it opens the studio once, in one browser.</p>"
_PASSWORD = (
    '<form method="post" action="/sign-in"><label>Password <input name="password" type="password" autofocus></label> '
    "<button>Open</button></form>"
)


class Guard:
    """What stands in front of the application."""

    def __init__(self, app: ASGIApp, port: int, host: str = "127.0.0.1", password: str | None = None) -> None:
        self._app = app
        self._port = port
        self._cookie = f"{COOKIE}_{port}"
        """Browsers do not tell ports apart, and there may be several studios."""
        self._password = password
        self._is_open = host not in _LOOPBACK
        """It listens beyond loopback; then any name may lead here, and the password stands guard."""
        self._one_guess = asyncio.Lock()
        self._session = secrets.token_urlsafe(32)
        self._token = secrets.token_urlsafe(16)
        self.on_used: Callable[[], None] = lambda: None
        """Called when a token was used, so that the next one can be shown."""

    @property
    def address(self) -> str:
        """Opens the studio once."""
        return f"http://127.0.0.1:{self._port}{_OPEN}{self._token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        refused = self._refused(request)
        if refused is None and request.url.path == "/sign-in" and request.method == "POST":
            refused = await self._signed_in(request)
        if refused is None and not self._is_known(request):
            refused = self._let_in(request)
        elif refused is None and request.url.path.startswith(_OPEN):
            refused = RedirectResponse("/", status_code=303)
        if refused is not None:
            await refused(scope, receive, _with_headers(send))
            return
        await self._app(scope, _limited(receive), _with_headers(send))

    def _refused(self, request: Request) -> Response | None:
        """Of a request that no page of ours can have made."""
        host = request.headers.get("host", "")
        if not self._is_open and not _LOCAL.fullmatch(host):
            return _error(421, "this studio is not called that")
        if self._is_foreign(request, host):
            return _error(403, "requests of other pages are refused")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MOST_BODY:
            return _error(413, f"at most {MOST_BODY // 2**20} MB")
        return None

    def _is_foreign(self, request: Request, host: str) -> bool:
        """Another page has made the request; following a link to this one is no harm."""
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "none")
        if origin is not None and urlsplit(origin).netloc != host:
            return True
        is_look = request.method == "GET" and not request.url.path.startswith("/api/")
        return site not in ("same-origin", "none") and not is_look

    def _is_known(self, request: Request) -> bool:
        return hmac.compare_digest(request.cookies.get(self._cookie, "").encode(), self._session.encode())

    def _let_in(self, request: Request) -> Response:
        """A cookie for who brings the token; otherwise what is missing."""
        path = request.url.path
        is_page = request.method == "GET" and (path == "/" or path.startswith(_OPEN))
        token = path.removeprefix(_OPEN)
        if is_page and self._password is None and hmac.compare_digest(token.encode(), self._token.encode()):
            self._token = secrets.token_urlsafe(16)
            self.on_used()
            return self._welcome()
        if is_page:
            body = _PASSWORD if self._password is not None else _NO_TOKEN
            return HTMLResponse(_SIGN_IN.format(body=body), status_code=401)
        return _error(401, "this needs the address that the terminal shows")

    async def _signed_in(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > 4096:
                return _error(413, "that is no password")
        given = parse_qs(body.decode(errors="replace")).get("password", [""])[0]
        async with self._one_guess:
            is_right = self._password is not None and hmac.compare_digest(given.encode(), self._password.encode())
            if not is_right:
                await asyncio.sleep(_AFTER_A_GUESS)
        if not is_right:
            return HTMLResponse(_SIGN_IN.format(body="<p>That is not it.</p>" + _PASSWORD), status_code=401)
        return self._welcome()

    def _welcome(self) -> Response:
        response = RedirectResponse("/", status_code=303)
        response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", path="/")
        return response


def _limited(receive: Receive) -> Receive:
    """Ends a request whose body goes on for longer than its header said it would."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > MOST_BODY else message

    return counted


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            known = {name for name, _ in message["headers"]}
            extra = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in known]
            if b"cache-control" not in known:
                extra.append((b"cache-control", b"no-store"))
            message["headers"] = [*message["headers"], *extra]
        await send(message)

    return sent


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)
