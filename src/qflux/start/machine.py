"""The GPU of this machine, found without loading torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """What training would run on."""

    gpu: str | None = None
    """Its name."""
    memory_gib: float = 0.0

    def __str__(self) -> str:
        return f"{self.gpu}, {self.memory_gib:.0f} GiB" if self.gpu else "a CPU"


def this_machine() -> Machine:
    """The first GPU that a process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return Machine()
    tool = shutil.which("nvidia-smi")
    if tool:
        chosen = ["--id=" + visible.split(",")[0]] if visible else []
        asked = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", *chosen]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        lines = [line.rsplit(",", 1) for line in found.stdout.splitlines() if "," in line]
        if found.returncode == 0 and lines and lines[0][1].strip().isdigit():
            return Machine(lines[0][0].strip(), int(lines[0][1]) / 1024)
    if tool or Path("/dev/kfd").exists():  # a card that the tool does not describe: torch knows
        import torch  # noqa: PLC0415

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            return Machine(properties.name, properties.total_memory / 2**30)
    return Machine()
