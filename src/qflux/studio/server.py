"""The addresses of the studio, and what answers them. Whatever reads files does so in a thread."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from qflux.errors import DataError, QfluxError, redacted
from qflux.files.hashing import key_of
from qflux.models.registry import all_facts, shipped
from qflux.runs.paths import RunPaths
from qflux.studio import starting, watching
from qflux.studio.drafts import checked, fields_of, with_value
from qflux.studio.library import Library
from qflux.studio.processes import Job
from qflux.studio.queue import SIDE, Queue
from qflux.studio.trying import Tries, small_picture
from qflux.studio.workspace import Workspace
from qflux.version import VERSION

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
MOST_STREAMS = 16
"""Pages that watch at once; a browser opens one each."""
_FORMATS = ("diffusers", "comfyui")
_JSON_LIMIT = 2 * 2**20

Answer = dict[str, Any] | list[Any] | Response
Handler = Callable[["Studio", Request, dict[str, Any]], Answer]


class Studio:
    """A workspace, and everything that a page can ask of it."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.library = Library(workspace)
        self.queue = Queue(workspace.own / "jobs", workspace.root)
        self.tries = Tries(workspace, self.queue)
        self.streams = 0

    def app(self) -> Starlette:
        routes: list[Any] = [Route("/", lambda _: FileResponse(STATIC / "index.html"))]
        routes += [
            Route(path, _answering(self, handler), methods=[method]) for (method, path), handler in ADDRESSES.items()
        ]
        routes.append(Route("/api/events", self._events))
        routes.append(Mount("/static", StaticFiles(directory=STATIC)))
        return Starlette(routes=routes)

    async def _events(self, request: Request) -> Response:
        """Server-sent events: the list of runs, and new steps of the one that is watched, as they come."""
        if self.streams >= MOST_STREAMS:
            return JSONResponse({"error": f"{MOST_STREAMS} pages watch already"}, status_code=429)
        watched, since = request.query_params.get("run"), int(request.query_params.get("since", "0") or 0)

        async def stream() -> AsyncIterator[str]:
            self.streams += 1
            told, at = "", since
            try:
                while not await request.is_disconnected():
                    now, at = await run_in_threadpool(self._news, watched, at)
                    text = json.dumps(now)
                    if text != told:
                        told = text
                        yield f"data: {text}\n\n"
                    else:
                        yield ": still here\n\n"
                    await asyncio.sleep(1.0)
            finally:
                self.streams -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _news(self, watched: str | None, since: int) -> tuple[dict[str, Any], int]:
        news: dict[str, Any] = {"runs": watching.summaries(self.workspace, self.queue), "jobs": self.queue.described()}
        if watched:
            try:
                run = self.workspace.run(watched)
            except QfluxError:
                return news, since
            fresh = [line for line in run.steps if line["step"] > since]
            news["curves"] = watching.curves(fresh)
            news["validations"] = len(run.validations)
            news["edits"] = sum(len(edit.outputs) for edit in run.edits)
            since = fresh[-1]["step"] if fresh else since
        return news, since


def _answering(studio: Studio, handler: Handler) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        try:
            body: dict[str, Any] = {}
            if request.method in ("POST", "PUT", "DELETE") and "json" in request.headers.get("content-type", ""):
                body = _parsed(await request.body())
            elif request.method in ("POST", "PUT"):
                body = {"bytes": await request.body()}
            found = await run_in_threadpool(handler, studio, request, body)
        except QfluxError as error:
            text = {"error": redacted(error.problem), "remedy": redacted(error.remedy)}
            return JSONResponse(text, status_code=404 if error.problem.startswith("there is no") else 400)
        except (ValueError, TypeError, KeyError) as error:
            return JSONResponse({"error": f"that can't be understood: {error}"}, status_code=400)
        except OSError as error:
            return JSONResponse({"error": f"{error.filename or ''}: {error.strerror}"}, status_code=500)
        return found if isinstance(found, Response) else JSONResponse(found)

    return answer


def _parsed(data: bytes) -> dict[str, Any]:
    if len(data) > _JSON_LIMIT:
        raise DataError("that is too much at once")
    try:
        value = json.loads(data or b"{}")
    except RecursionError:
        raise DataError("that can't be understood") from None
    if not isinstance(value, dict):
        raise DataError("that is no object")
    return value


def _session(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    small = shipped()
    return {
        "version": VERSION,
        "root": studio.workspace.root.name,
        "devices": [asdict(device) for device in studio.queue.devices],
        "families": [{"name": f.name, "title": f.title, "hub": f.hub_id} for f in all_facts()],
        "small": {"name": small.name, "family": small.family},
        "data": studio.library.sets(),
    }


def _data(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    found = studio.library[request.query_params["set"]]
    if request.query_params.get("again"):
        found.refresh()
    return found.described()


def _samples(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    asked = request.query_params
    found = studio.library[asked["set"]]
    return found.window(
        int(asked.get("start", "0")), int(asked.get("count", "50")), asked.get("words", ""), asked.get("only", "")
    )


def _sample_picture(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    asked = request.query_params
    content, kind = studio.library[asked["set"]].picture(asked["sample"], asked["role"], asked.get("large") == "1")
    return Response(content, media_type=kind, headers={"cache-control": "private, max-age=300"})


def _change(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    found = studio.library[body["set"]]
    changes = body["changes"]
    if not isinstance(changes, list) or not all(isinstance(change, dict) for change in changes):
        raise DataError("changes are a list")
    found.change(changes)
    return found.described()


def _undo(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    found = studio.library[body["set"]]
    done = found.redo() if body.get("again") else found.undo()
    return {"done": done, **found.described()}


def _replace(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    found = studio.library[body["set"]]
    changes = found.replace_words(str(body["find"]), str(body["put"]), bool(body.get("try")))
    return {"count": len(changes), "examples": changes[:5]}


def _paint(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    asked = request.query_params
    found = studio.library[asked["set"]]
    found.paint(asked["sample"], body["bytes"])
    return found.described()


def _inspect(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    data = studio.library[body["set"]]
    text = starting.draft(studio.workspace, data, body)
    report = _report_of(studio, data.id)
    report.unlink(missing_ok=True)
    options = ["--json", studio.workspace.relative(report)]
    return {"job": starting.side_job(studio.queue, studio.workspace, "inspect", text, options).id}


def _report_of(studio: Studio, data: str) -> Path:
    """Where `inspect` writes what it finds in a data set."""
    return studio.workspace.own / f"inspect-{key_of(data)[:16]}.json"


def _findings(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    data = studio.library[body["set"]]
    report = _report_of(studio, data.id)
    data.take_findings(json.loads(report.read_text(encoding="utf-8")))
    return data.described()


def _draft(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    data = studio.library[body["set"]]
    return _judged(studio, starting.draft(studio.workspace, data, body))


def _judged(studio: Studio, text: str) -> dict[str, Any]:
    _, problems = checked(text, studio.workspace)
    return {"text": text, "fields": fields_of(text), "problems": [asdict(problem) for problem in problems]}


def _check_draft(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    text = str(body["text"])
    for path, value in body.get("set", {}).items():
        text = with_value(text, path, value)
    return _judged(studio, text)


def _plan(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    # A side job sees no GPU: what the chosen one has is told, unless the config says what it may take.
    device = next((each for each in studio.queue.devices if each.lane == body.get("lane")), studio.queue.devices[0])
    says_it = "memory" in fields_of(str(body["text"]))
    options = ["--json"] + (["--memory", f"{device.memory_gib:.1f}GiB"] if device.memory_gib and not says_it else [])
    return {"job": starting.side_job(studio.queue, studio.workspace, "check", str(body["text"]), options).id}


def _job(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    job = studio.queue[request.query_params["job"]]
    found = job.job
    plan = starting.plan_of(job) if found is not None and found.kind == "check" else []
    return {"id": job.id, "state": job.state, "code": job.code, "log": redacted(job.log()), "checks": plan}


def _stop_job(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    studio.queue[str(body["job"])].stop()
    return {}


def _runs(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    return watching.summaries(studio.workspace, studio.queue)


def _run(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    name = request.query_params["run"]
    job = studio.queue.of_run(name)
    known = {"job": job.id, "state": job.state, "log": redacted(job.log())} if job is not None else {}
    try:
        return watching.described(studio.workspace.run(name), studio.workspace) | known
    except DataError:
        if job is None:
            raise
        return {"run": name, "name": Path(name).name, "status": "new", "edits": [], "curves": {}, **known}


def _run_picture(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    asked = request.query_params
    run = studio.workspace.run(asked["run"])
    path = watching.picture(run, int(asked["edit"]), asked["what"], int(asked.get("step", "0")))
    if path is None:
        raise DataError("there is no such picture")
    return Response(
        small_picture(path, 1024), media_type="image/webp", headers={"cache-control": "private, max-age=60"}
    )


def _start(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    lane = str(body.get("lane") or studio.queue.devices[0].lane)
    job = starting.start(studio.workspace, studio.queue, str(body["text"]), lane)
    found = job.job
    return {"job": job.id, "run": found.about["run"] if found else ""}


def _stop(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    job = studio.queue.of_run(str(body["run"]))
    if job is None:
        raise DataError(f"{body['run']} was not started here", "stop it with Ctrl-C where it was.")
    job.stop()
    return {}


def _resume(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    lane = str(body.get("lane") or studio.queue.devices[0].lane)
    return {"job": starting.resume(studio.workspace, studio.queue, str(body["run"]), lane).id}


def _duplicate(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    return _judged(studio, starting.duplicate(studio.workspace, str(body["run"])))


def _delete(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    starting.delete(studio.workspace, studio.queue, str(body["run"]))
    return {}


def _export(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    run, kind = studio.workspace.run(str(body["run"])), str(body.get("format"))
    if kind not in _FORMATS:
        raise DataError(f"{kind!r} is no format", f"use one of {', '.join(_FORMATS)}.")
    command = ["export", "--config", str(run.paths.config), "--format", kind]
    job = studio.queue.add(Job("export", command, {"run": studio.workspace.relative(run.path)}, SIDE))
    return {"job": job.id}


def _files(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    run = studio.workspace.run(request.query_params["run"])
    return [{"name": name, "bytes": path.stat().st_size} for name, path in watching.files(run).items()]


def _download(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    run = studio.workspace.run(request.query_params["run"])
    path = watching.files(run).get(request.query_params["file"])
    if path is None:
        raise DataError("there is no such file")
    name = f"{run.path.name}-{path.name}" if path.parent != RunPaths(run.path).root else path.name
    return FileResponse(path, filename=name, media_type="application/octet-stream")


def _upload(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    return studio.tries.upload(body["bytes"])


def _uploaded(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    return FileResponse(studio.tries.uploaded(request.query_params["id"]), media_type="image/png")


def _try(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    return {"jobs": [job.id for job in studio.tries.start(body)]}


def _tries(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    return studio.tries.described()


def _result(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    return FileResponse(studio.tries.result(request.query_params["id"]), media_type="image/png")


def _forget(studio: Studio, request: Request, body: dict[str, Any]) -> Answer:
    studio.tries.forget(str(body["id"]))
    return {}


ADDRESSES: dict[tuple[str, str], Handler] = {
    ("GET", "/api/session"): _session,
    ("GET", "/api/data"): _data,
    ("GET", "/api/samples"): _samples,
    ("GET", "/api/sample-picture"): _sample_picture,
    ("POST", "/api/changes"): _change,
    ("POST", "/api/undo"): _undo,
    ("POST", "/api/replace"): _replace,
    ("PUT", "/api/mask"): _paint,
    ("POST", "/api/inspect"): _inspect,
    ("POST", "/api/findings"): _findings,
    ("POST", "/api/draft"): _draft,
    ("POST", "/api/draft/check"): _check_draft,
    ("POST", "/api/draft/plan"): _plan,
    ("GET", "/api/job"): _job,
    ("POST", "/api/job/stop"): _stop_job,
    ("GET", "/api/runs"): _runs,
    ("GET", "/api/run"): _run,
    ("GET", "/api/run/picture"): _run_picture,
    ("POST", "/api/run/start"): _start,
    ("POST", "/api/run/stop"): _stop,
    ("POST", "/api/run/resume"): _resume,
    ("POST", "/api/run/duplicate"): _duplicate,
    ("POST", "/api/run/delete"): _delete,
    ("POST", "/api/run/export"): _export,
    ("GET", "/api/run/files"): _files,
    ("GET", "/api/run/download"): _download,
    ("PUT", "/api/upload"): _upload,
    ("GET", "/api/upload"): _uploaded,
    ("POST", "/api/try"): _try,
    ("GET", "/api/tries"): _tries,
    ("GET", "/api/try"): _result,
    ("POST", "/api/try/forget"): _forget,
}
