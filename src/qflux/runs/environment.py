"""What qflux runs on: versions, devices, attention kernels, what is installed and what is not."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from qflux.launch import launched
from qflux.version import VERSION

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "huggingface_hub",
    "pillow",
    "numpy",
)
OPTIONAL = {
    "triton": ("pip install triton", "fused kernels for sampling on a GPU; comes with torch's CUDA builds"),
    "bitsandbytes": ("qflux[bitsandbytes]", "model.quantization: nf4, 8-bit optimizers"),
    "torchao": ("qflux[torchao]", "model.quantization: int8 and fp8"),
    "datasets": ("qflux[datasets]", "Hugging Face data sets"),
    "prodigyopt": ("qflux[prodigyopt]", "the Prodigy optimizer"),
    "tensorboard": ("qflux[tensorboard]", "train.trackers: tensorboard"),
    "wandb": ("qflux[wandb]", "train.trackers: wandb"),
    "swanlab": ("qflux[swanlab]", "train.trackers: swanlab"),
}
"""Packages that something needs: how to get them, and what for."""


def environment() -> dict[str, Any]:
    """Plain values, for files and for people."""
    import torch  # noqa: PLC0415  (who only reads what a run has written does not need it)

    return {
        "qflux": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "devices": devices(),
        "cpu_threads": torch.get_num_threads(),
        "processes": str(launched().world_size),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[dict[str, Any]]:
    """The GPUs there are."""
    import torch  # noqa: PLC0415

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def attention_backends() -> dict[str, bool]:
    """Which kernels attention can take on the first GPU; on a CPU there is one."""
    import torch  # noqa: PLC0415

    from qflux.ragged import fused  # noqa: PLC0415

    gpu = torch.cuda.is_available()
    recent = gpu and torch.cuda.get_device_capability(0) >= (8, 0)
    return {
        "cuDNN (long samples, Hopper and later)": gpu
        and torch.backends.cudnn.is_available()
        and torch.cuda.get_device_capability(0) >= (9, 0),
        "variable-length flash (short samples)": recent and torch.backends.cuda.is_flash_attention_available(),
        "flash": recent and torch.backends.cuda.is_flash_attention_available(),
        "memory-efficient": gpu and torch.backends.cuda.mem_efficient_sdp_enabled(),
        "plain": True,
        "fused kernels around it (Triton)": gpu and fused.HAS_TRITON,
    }
