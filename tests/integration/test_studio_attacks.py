"""What somebody might try against a studio: nothing gets in, nothing gets out, nothing hangs."""

from __future__ import annotations

import io
import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from PIL import Image

from helpers import run
from qflux.demo.data import write_data_set
from studios import StudioProcess, studio

HOSTILE = '<script>document.title="broken"</script><img src=x onerror=alert(1)>"\'&'
ADDRESSES = ("/", "/api/session", "/api/runs", "/api/data?set=data", "/static/app.js", "/api/events")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("attacked") / "work"
    write_data_set(root / "data", count=6, seed=1)
    (root.parent / "secret.txt").write_text("very secret")
    Image.new("RGB", (16, 16), "red").save(root.parent / "secret.png")
    (root.parent / "other/training_images").mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(root.parent / "other/training_images/a.png")
    (root.parent / "other/training_images/a.txt").write_text("very secret")
    (root / "link").symlink_to(root.parent / "other")
    (root / "runs").mkdir()
    (root.parent / "foreign").mkdir()
    (root.parent / "foreign/config.yaml").write_text("secret: 1")
    (root / "runs/linked").symlink_to(root.parent / "foreign")
    return root


@pytest.fixture(scope="module")
def server(workspace):
    with studio(workspace) as found:
        found.key = found.cookie()
        yield found


def test_without_the_cookie_nothing_is_answered(server):
    for path in ADDRESSES:
        for cookie in ("", f"qflux_studio_{server.port}=", f"qflux_studio_{server.port}=wrong", "other=1"):
            answer = server.ask("GET", path, cookie=cookie)
            assert answer.status == 401, path
            assert b"data" not in answer.body
    assert server.ask("POST", "/api/changes", {"set": "data", "changes": []}).status == 401
    assert server.ask("GET", "/?token=anything").status == 401
    assert server.ask("GET", "/open/").status == 401


def test_the_address_is_good_once(server):
    first = server.address
    path = first.removeprefix(server.root)
    assert server.ask("GET", path).status == 303
    assert server.ask("GET", path).status == 401
    assert server.address != first
    assert "httponly" in server.ask("GET", server.address.removeprefix(server.root)).headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:{port}", ""]
)
def test_a_foreign_name_for_this_machine_is_refused(server, host):
    """Or a page elsewhere could make its own name lead here, and read what it likes."""
    answer = server.ask("GET", "/api/session", host=host.format(port=server.port), cookie=server.key)
    assert answer.status in (400, 421)


def test_through_a_tunnel_its_port_is_another_one(server):
    """As `ssh -L 9000:localhost:8765` makes it: the browser says 9000, and a page of any other port is foreign."""
    ask = {"host": "localhost:9000", "cookie": server.key}
    assert server.ask("GET", "/api/session", **ask).status == 200
    assert server.ask("POST", "/api/undo", {}, origin="http://localhost:9000", **ask).status != 403
    assert server.ask("POST", "/api/undo", {}, origin=server.root, **ask).status == 403


@pytest.mark.parametrize("path", ["/api/changes", "/api/run/start", "/api/run/delete", "/api/undo"])
def test_other_pages_can_ask_for_nothing(server, path):
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port + 1}"):
        assert server.ask("POST", path, {}, origin=origin, cookie=server.key).status == 403
    assert server.ask("POST", path, {}, sec_fetch_site="cross-site", cookie=server.key).status == 403
    assert server.ask("GET", "/api/session", sec_fetch_site="cross-site", cookie=server.key).status == 403
    allowed = server.ask("GET", "/api/session", origin=server.root, sec_fetch_site="same-origin", cookie=server.key)
    assert allowed.status == 200


PATHS = [
    "../other",
    "link",
    "link/",
    "data/../../other",
    "{parent}/other",
    "/etc",
    "..",
    "data/../..",
    "\0",
    "data\0/../..",
    "x" * 5000,
    "%2e%2e/other",
    "~",
    "runs/../../foreign",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_stay_inside(server, workspace, path):
    name = quote(path.format(parent=workspace.parent), safe="")
    for address in (
        f"/api/data?set={name}",
        f"/api/samples?set={name}",
        f"/api/sample-picture?set={name}&sample=a&role=target",
        f"/api/sample-picture?set=data&sample={name}&role=target",
        f"/api/sample-picture?set=data&sample=scene_000&role={name}",
        f"/api/run?run={name}",
        f"/api/run/files?run={name}",
        f"/api/run/download?run={name}&file=config.yaml",
        f"/api/upload?id={name}",
        f"/api/try?id={name}",
        f"/api/job?job={name}",
        f"/static/{name}",
    ):
        answer = server.ask("GET", address, cookie=server.key)
        assert answer.status in (400, 404), (address, answer.body[:200])
        assert b"very secret" not in answer.body
    path = path.format(parent=workspace.parent)
    for address, body in (
        ("/api/run/delete", {"run": path}),
        ("/api/run/resume", {"run": path}),
        ("/api/run/duplicate", {"run": path}),
        ("/api/run/export", {"run": path, "format": "comfyui"}),
        ("/api/try/forget", {"id": path}),
        ("/api/changes", {"set": path, "changes": []}),
    ):
        answer = server.ask("POST", address, body, cookie=server.key)
        assert answer.status in (400, 404), (address, answer.body[:200])
    assert (workspace.parent / "foreign/config.yaml").exists()
    assert (workspace.parent / "other/training_images/a.png").exists()


def test_links_out_of_the_folder_are_no_runs_and_no_data(server):
    session = server.ask("GET", "/api/session", cookie=server.key).json
    assert [item["id"] for item in session["data"]] == ["data"]
    assert server.ask("GET", "/api/runs", cookie=server.key).json == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("output_dir", "/tmp/elsewhere"),
        ("output_dir", "../elsewhere"),
        ("cache.path", "/tmp/elsewhere"),
        ("loss.class_path", "os.system"),
        ("optimizer.class_path", "subprocess.Popen"),
        ("lora.init_from", "../secret.txt"),
        ("train.resume_from", "/etc"),
        ("run_name", "../../x"),
    ],
)
def test_a_run_from_here_neither_leaves_the_folder_nor_runs_foreign_code(server, workspace, setting, value):
    draft = server.ask("POST", "/api/draft", {"set": "data", "model": "qflux-small"}, cookie=server.key).json
    assert draft["problems"] == []
    changed = server.ask(
        "POST", "/api/draft/check", {"text": draft["text"], "set": {setting: value}}, cookie=server.key
    )
    assert changed.json["problems"], setting
    started = server.ask("POST", "/api/run/start", {"text": changed.json["text"]}, cookie=server.key)
    assert started.status == 400
    assert server.ask("GET", "/api/runs", cookie=server.key).json == []


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"set": 3}',
    b'{"set": {"a": 1}}',
    b'{"changes": 1}',
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_mean_nothing_are_errors(server, body):
    for address in ("/api/changes", "/api/undo", "/api/replace", "/api/draft", "/api/run/start", "/api/try"):
        answer = server.ask("POST", address, body, content_type="application/json", cookie=server.key)
        assert answer.status in (400, 404), (address, answer.status, answer.body[:200])
        assert b"Traceback" not in answer.body


def test_uploads_are_limited_and_decoded_before_they_are_kept(server, workspace):
    uploads = workspace / ".qflux-studio/uploads"
    for data in (b"", b"no picture", b"<svg onload=alert(1)>", b"\x89PNG\r\n\x1a\n" + b"\0" * 100, b"GIF89a"):
        assert server.ask("PUT", "/api/upload", data, cookie=server.key).status == 400
    bomb = io.BytesIO()
    Image.new("1", (60_000, 60_000)).save(bomb, "PNG")  # small as a file, 3.6 gigapixels as a picture
    assert server.ask("PUT", "/api/upload", bomb.getvalue(), cookie=server.key).status == 400
    assert not list(uploads.iterdir()), "of what is no picture nothing is kept"
    good = io.BytesIO()
    Image.new("RGB", (40, 30), "teal").save(good, "JPEG")
    kept = server.ask("PUT", "/api/upload", good.getvalue() + HOSTILE.encode(), cookie=server.key)
    assert kept.status == 200
    (file,) = uploads.iterdir()
    assert HOSTILE.encode() not in file.read_bytes(), "written anew, not as it came"


def test_ten_gigabytes_are_refused_before_they_are_sent(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"PUT /api/upload HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {server.key}\r\n"
        connection.sendall(f"{head}Content-Length: 10737418240\r\n\r\n".encode())
        assert b" 413 " in connection.recv(1000).split(b"\r\n")[0]
    # Without a length, it ends where it has become too much.
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        sent = 0
        chunk = b"100000\r\n" + b"\0" * 0x100000 + b"\r\n"
        try:
            while sent < 200:
                connection.sendall(chunk)
                sent += 1
        except OSError:
            pass
        assert sent < 200, "it was cut off"
    assert server.ask("GET", "/api/session", cookie=server.key).status == 200


def test_a_thousand_requests_at_once_are_all_answered(server):
    paths = [
        ADDRESSES[1],
        ADDRESSES[2],
        "/api/samples?set=data",
        "/api/sample-picture?set=data&sample=scene_000&role=target",
    ]

    def asked(number: int) -> int:
        return server.ask("GET", paths[number % len(paths)], cookie=server.key).status

    with ThreadPoolExecutor(100) as pool:
        assert set(pool.map(asked, range(1000))) == {200}


def test_streams_are_limited_and_end_with_their_page(server):
    open_ = []
    try:
        answers = []
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            head = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {server.key}\r\n\r\n"
            connection.sendall(head.encode())
            answers.append(connection.recv(200).split(b"\r\n")[0])
            open_.append(connection)
        assert any(b"429" in answer for answer in answers)
        assert sum(b"200" in answer for answer in answers) >= 8
    finally:
        for connection in open_:
            connection.close()
    assert server.ask("GET", "/api/session", cookie=server.key).status == 200


def test_what_data_say_is_never_markup(server, workspace):
    server.ask(
        "POST",
        "/api/changes",
        {"set": "data", "changes": [{"sample": "scene_000", "prompt": HOSTILE}]},
        cookie=server.key,
    )
    answer = server.ask("GET", "/api/samples?set=data", cookie=server.key)
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = server.ask("GET", "/", cookie=server.key)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    static = Path(__file__).parents[2] / "src/qflux/studio/static"
    for script in static.glob("*.js"):
        text = script.read_text()
        assert not any(
            word in text for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        )


def test_beyond_loopback_there_is_a_password(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("QFLUX_STUDIO_PASSWORD", raising=False)
    assert run("studio", tmp_path, "--host", "0.0.0.0", "--no-browser", "--port", "0") == 2
    assert "there is no password" in capsys.readouterr().err
    monkeypatch.setenv("QFLUX_STUDIO_PASSWORD", "short")
    assert run("studio", tmp_path, "--host", "0.0.0.0", "--no-browser", "--port", "0") == 2
    write_data_set(tmp_path / "data", count=2, seed=1)
    secret = "correct horse battery"
    server = StudioProcess(tmp_path, "--host", "0.0.0.0", environment=os.environ | {"QFLUX_STUDIO_PASSWORD": secret})
    try:
        assert secret not in server.log.read_text()
        assert server.ask("GET", "/").status == 401
        assert server.ask("GET", "/api/session").status == 401
        wrong = server.ask("POST", "/sign-in", b"password=wrong", content_type="application/x-www-form-urlencoded")
        assert wrong.status == 401
        right = server.ask("POST", "/sign-in", f"password={quote(secret)}".encode(), content_type="text/plain")
        assert right.status == 303
        cookie = right.headers["set-cookie"].split(";")[0]
        assert json.loads(server.ask("GET", "/api/session", cookie=cookie).body)["root"] == tmp_path.name
    finally:
        server.close()


def test_it_listens_on_loopback_alone(server):
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [fields[1] for fields in listening if int(fields[1].split(":")[1], 16) == server.port and fields[3] == "0A"]
    assert mine == [f"0100007F:{server.port:04X}"]
