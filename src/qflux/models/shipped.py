"""The small model that ships with qflux: a FLUX Kontext of 9 million weights (see `qflux.demo.base`)."""

from __future__ import annotations

from pathlib import Path

SMALL = "qflux-small"
"""What `model.pretrained` calls it."""
FOLDER = Path(__file__).parents[1] / "demo" / "model"
TEXT_TOKENS = 24
"""The length every prompt is padded to, as FLUX does."""
RATE = 0.006
TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "net.0.proj",
    "net.2",
    "proj_mlp",
    "proj_out",
    "norm.linear",
    "norm1.linear",
)
"""What trains: a model that small has little to spare, so its modulation does too."""


def local_folder(pretrained: str) -> Path:
    """Where a model would lie on this machine."""
    folder = Path(pretrained).expanduser()
    return FOLDER if pretrained == SMALL and not folder.is_dir() else folder
