"""Jobs one after another: a lane for each GPU (or one for the CPU), and one for what needs neither.

All of it is on disk: a studio that is opened again goes on with what was queued.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qflux.errors import DataError, cut
from qflux.files.atomic import sweep
from qflux.studio.processes import Job, JobFolder

SIDE = "side"
_KEPT = 200


@dataclass(frozen=True)
class Device:
    """Where runs go."""

    lane: str
    name: str
    memory_gib: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        if not self.lane.startswith("cuda:"):
            return {}
        # nvidia-smi counts by bus, CUDA by speed unless it is told.
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.lane.removeprefix("cuda:")}


def devices() -> list[Device]:
    """The GPUs of this machine that may be used; without any, its CPU."""
    tool, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    found = []
    if tool and (visible is None or visible.strip() not in ("", "-1")):
        asked = [tool, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
        asked += [f"--id={visible}"] if visible else []
        try:
            printed = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout
        except (OSError, subprocess.TimeoutExpired):
            printed = ""
        for line in printed.splitlines():
            parts = [part.strip() for part in line.split(",")]
            if len(parts) == 3 and parts[0].isdigit() and parts[2].isdigit():
                found.append(Device(f"cuda:{parts[0]}", parts[1], int(parts[2]) / 1024))
    return found or [Device("cpu", "CPU")]


class Queue:
    """The jobs of a workspace."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder = folder
        self._root = root
        self.devices = devices()
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def open(self) -> None:
        """Begin to start what is queued."""
        sweep(self._folder)
        self._thread.start()

    def close(self) -> None:
        """Start nothing more. What runs goes on."""
        self._ended.set()

    def add(self, job: Job) -> JobFolder:
        found = JobFolder.create(self._folder, job)
        self.advance()
        return found

    def jobs(self) -> list[JobFolder]:
        """All jobs, oldest first."""
        try:
            return [JobFolder(path) for path in sorted(self._folder.iterdir()) if not path.name.startswith(".")]
        except OSError:
            return []

    def __getitem__(self, name: str) -> JobFolder:
        found = next((job for job in self.jobs() if job.id == name), None)
        if found is None:
            raise DataError(f"there is no job {cut(name)}")
        return found

    def advance(self) -> None:
        """Start the next job of every lane that is free."""
        with self._lock:
            busy, waiting = set(), []
            jobs = self.jobs()
            for found in jobs:
                job, state = found.job, found.state
                if job is not None and state == "running":
                    busy.add(job.lane)
                elif job is not None and state == "queued":
                    waiting.append((found, job))
            lanes = {SIDE: {"CUDA_VISIBLE_DEVICES": ""}} | {each.lane: each.environment for each in self.devices}
            for found, job in waiting:
                if job.lane in lanes and job.lane not in busy:  # what is for a GPU that is not here waits for it
                    busy.add(job.lane)
                    found.start(self._root, lanes[job.lane])
            self._tidy(jobs)

    def free_lane(self) -> str:
        """A device that nothing waits for, or else the first."""
        busy = {job["lane"] for job in self.described() if job["state"] in ("queued", "running")}
        return next((each.lane for each in self.devices if each.lane not in busy), self.devices[0].lane)

    def described(self) -> list[dict[str, Any]]:
        found = []
        for item in self.jobs()[-_KEPT:]:
            job = item.job
            if job is not None:
                known = {"id": item.id, "kind": job.kind, "lane": job.lane, "state": item.state}
                found.append(job.about | known | {"stopping": item.is_stopping})
        return found

    def of_run(self, run: str) -> JobFolder | None:
        """The newest job that trains a run."""
        return next(reversed(self._all_of(run)), None)

    def forget(self, run: str) -> None:
        """Everything about a run that is gone."""
        for item in self._all_of(run):
            shutil.rmtree(item.path, ignore_errors=True)

    def _all_of(self, run: str) -> list[JobFolder]:
        known = [(item, item.job) for item in self.jobs()]
        return [item for item, job in known if job and job.kind == "train" and job.about.get("run") == run]

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            try:
                self.advance()
            except OSError:  # a full disk, say: what is queued stays so
                continue

    def _tidy(self, jobs: list[JobFolder]) -> None:
        """Forget the oldest that have ended; results are elsewhere."""
        for found in jobs[:-_KEPT]:
            if found.state not in ("queued", "running"):
                shutil.rmtree(found.path, ignore_errors=True)
