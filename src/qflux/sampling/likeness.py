"""How alike two pictures are to a network that looks at pictures: DINO, CLIP, SigLIP, or whatever somebody has.

Nothing of this is needed to measure edits (`measures.edit`). Who has such a network names it in
`validation.perceptual`; it is loaded with transformers, from a folder or from the hub, and never from a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from qflux.errors import CheckpointError, cut
from qflux.measures.edit import EditMeasures


@dataclass(frozen=True)
class _Network:
    """A vision model, and how pictures reach it."""

    model: Any
    side: int
    mean: Tensor
    std: Tensor

    @torch.no_grad()
    def features(self, image: Image.Image) -> Tensor:
        """`(C,)` of unit length."""
        small = image.convert("RGB").resize((self.side, self.side), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.asarray(small, dtype=np.float32) / 255).permute(2, 0, 1)
        found = self.model(pixel_values=((pixels - self.mean) / self.std)[None])
        # CLIP and SigLIP pool their tokens; DINO's first token is the picture's.
        pooled = getattr(found, "pooler_output", None)
        vector = found.last_hidden_state[:, 0] if pooled is None else pooled
        return torch.nn.functional.normalize(vector[0].float(), dim=0)


class Likeness:
    """Networks by name, and what they have to say of edits."""

    def __init__(self, networks: Mapping[str, str]) -> None:
        """An error names the network that can't be loaded. They stay on the CPU: the GPU's memory is planned."""
        self._networks = {name: _loaded(name, where) for name, where in networks.items()}

    def added(
        self, measures: EditMeasures, output: Image.Image, control: Image.Image | None, wanted: Image.Image | None
    ) -> EditMeasures:
        """The measures of an edit with the cosine of its features and those of the wanted image, or of the control.

        A picture is squeezed into the network's square as it is: what is compared is of one size.
        """
        reference, of = (wanted, "wanted") if wanted is not None else (control, "control")
        if reference is None or not self._networks:
            return measures
        found = {
            f"{name}_{of}": float(network.features(output) @ network.features(reference))
            for name, network in self._networks.items()
        }
        return replace(measures, perceptual=found)


def _loaded(name: str, where: str) -> _Network:
    from transformers import AutoConfig, AutoImageProcessor, AutoModel  # noqa: PLC0415  (slow to import)

    try:
        config = AutoConfig.from_pretrained(where)
        model: Any = AutoModel.from_pretrained(where, use_safetensors=True)
        processor: Any = AutoImageProcessor.from_pretrained(where)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"validation.perceptual.{name}: {cut(where)} can't be loaded: {str(error).splitlines()[0]}",
            "give a folder or a hub id of a vision model in transformers' format, with safetensors weights.",
        ) from None
    model = getattr(model, "vision_model", model)  # of CLIP and SigLIP, one of two
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", 224)
    mean, std = (torch.tensor(getattr(processor, key))[:, None, None] for key in ("image_mean", "image_std"))
    return _Network(model.eval(), int(side), mean, std)
