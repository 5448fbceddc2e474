"""Encoders and transformers of the size that people use, with empty weights and the small models' tokenizers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage
from mixed_batch import Scale
from PIL import Image
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qflux.models import QwenImageTransformer2DModel, get_family
from qflux.models.qwen_image.prompts import PromptProcessor

_FLUX_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 1024,
    "shift_factor": 0.1159,
    "scaling_factor": 0.3611,
}
_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_T5 = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
_QWEN3 = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
    "layer_types": ["full_attention"] * 36,
}
_QWEN25 = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "layer_types": ["full_attention"] * 28,
    "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1e6, "rope_type": "default"},
}
_QWEN25_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


class Components:
    """A family's parts; those that a pipeline does not have are missing."""

    def __init__(self, parts: dict[str, Any], sees_images: bool) -> None:
        self.__dict__.update(parts)
        self._sees_images = sees_images

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    @property
    def text_models(self) -> list[nn.Module]:
        models = (part for name, part in vars(self).items() if name.startswith("text_encoder"))
        return sorted(models, key=lambda model: sum(p.numel() for p in model.parameters()))

    def seen(self, side: int) -> tuple[Image.Image, ...]:
        """What the text encoder is shown."""
        return (Image.new("RGB", (side, side)),) if self._sees_images else ()


def full_components(name: str, scale: Scale, is_full: bool) -> Components:
    """Everything that an edit needs, on the host; without `is_full`, the small encoders."""
    parts = {key: part for key, part in vars(get_family(scale.family).tiny(0)).items() if part is not None}
    if is_full:
        for key, part in list(parts.items()):
            if key.startswith("text_encoder"):
                parts[key] = _larger(part, name)
        if "processor" in parts:  # the published limits on images
            parts["processor"] = PromptProcessor(parts["tokenizer"], Qwen2VLImageProcessorPil())
        vaes: dict[str, Any] = {
            "flux": lambda: AutoencoderKL(**_FLUX_VAE),
            "klein": AutoencoderKLFlux2,
            "qwen": AutoencoderKLQwenImage,
        }
        parts["vae"] = _empty(vaes[name], scale.dtype)
    parts["transformer"] = _empty(lambda: get_family(scale.family).transformer(**scale.shape), scale.dtype)
    if isinstance(parts["transformer"], QwenImageTransformer2DModel):  # its tables are plain attributes
        pos_embed = parts["transformer"].pos_embed
        parts["transformer"].pos_embed = type(pos_embed)(theta=10000, axes_dim=[16, 56, 56], scale_rope=True)
    return Components(parts, sees_images=name == "qwen")


def _larger(model: nn.Module, name: str) -> nn.Module:
    config: Any = model.config
    if name == "qwen":
        _set(config.text_config, _QWEN25)
        _set(config.vision_config, _QWEN25_VISION)
    elif name == "klein":
        _set(config, _QWEN3)
    else:
        _set(config, _CLIP if config.model_type.startswith("clip") else _T5)
    larger = _empty(lambda: type(model)(config), torch.bfloat16)
    if hasattr(larger, "lm_head"):
        larger.lm_head = nn.Identity()
    return larger


def _set(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def _empty(make: Any, dtype: torch.dtype) -> nn.Module:
    """Zeros on the host, which take no time to make."""
    with torch.device("meta"):
        model: nn.Module = make()
    model = model.to(dtype).to_empty(device="cpu").requires_grad_(False).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = torch.zeros_like(tensor)
    return model
