"""Opening the studio: the server on loopback, its address on the terminal, a browser if wanted."""

from __future__ import annotations

import contextlib
import socket
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qflux.errors import ConfigError

MISSING = "pip install 'qflux[studio]'."


@dataclass(frozen=True)
class Opening:
    """How a studio is opened."""

    folder: Path
    port: int = 8765
    host: str = "127.0.0.1"
    password: str | None = None
    browser: bool = True


def serve(opening: Opening, say: Callable[[str], None]) -> None:
    """Run the studio until it is interrupted."""
    try:
        import uvicorn  # noqa: PLC0415  (an extra)

        from qflux.studio.guard import Guard  # noqa: PLC0415
        from qflux.studio.server import Studio  # noqa: PLC0415
        from qflux.studio.workspace import Workspace  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"the studio needs {error.name}, which is not installed", MISSING) from None
    is_local = opening.host in ("127.0.0.1", "localhost", "::1")
    if not is_local and not opening.password:
        raise ConfigError(
            f"--host {opening.host} lets other machines in, and there is no password",
            "set QFLUX_STUDIO_PASSWORD, or leave --host out.",
        )
    if opening.password is not None and len(opening.password) < 8:
        raise ConfigError("the password is shorter than 8 characters", "take a longer one.")
    studio = Studio(Workspace.opened(opening.folder))
    listening = _socket(opening)
    port = listening.getsockname()[1]
    guard = Guard(studio.app(), port, opening.host, opening.password)
    shown = guard.address if opening.password is None else f"http://{opening.host}:{port}/"
    say(f"studio: {shown}")
    say("Ctrl-C closes it; runs go on.")
    if opening.password is None:
        guard.on_used = lambda: say(f"once more: {guard.address}")
    if opening.browser:
        threading.Timer(0.5, lambda: webbrowser.open(shown)).start()
    studio.queue.open()
    threading.Thread(target=studio.library.sets, daemon=True).start()  # while the browser opens
    config = uvicorn.Config(
        guard, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
    studio.queue.close()


def _socket(opening: Opening) -> socket.socket:
    family = socket.AF_INET6 if ":" in opening.host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((opening.host, opening.port))
        found.listen(512)
    except OSError as error:
        found.close()
        raise ConfigError(
            f"port {opening.port} of {opening.host} can't be had: {error.strerror}", "give another --port."
        ) from None
    return found
