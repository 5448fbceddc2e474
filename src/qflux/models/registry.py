"""The families there are: a name and a folder each. Nothing is imported before it is asked for, so anybody may ask.

A folder has `facts.py`, what is known of its models without torch, and `family.py`, what computes.
"""

from __future__ import annotations

import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qflux.errors import ConfigError
from qflux.models.facts import Described

if TYPE_CHECKING:
    from qflux.models.facts import Facts, Shipped, Size
    from qflux.models.family import Family

_FOLDERS = {
    "flux-kontext": "flux_kontext",
    "qwen-image": "qwen_image",
    "qwen-image-edit": "qwen_image",
    "qwen-image-edit-plus": "qwen_image",
    "flux2": "flux2",
    "flux3": "flux3",
    "qwen-image-2.1": "qwen_image21",
}
"""ADD A FAMILY HERE."""

DEFAULT = "flux-kontext"
"""What a config means that names none."""
WITHOUT_CONTROLS = "qwen-image"
"""What data without any image to edit are trained with, if nobody says."""


ORIGINAL_DEFAULT = "QwenImageEdit"
"""What a config of the original qflux means that names no trainer."""


def names() -> tuple[str, ...]:
    """All families, in the order of their release."""
    return tuple(_FOLDERS)


def facts_of(name: str) -> Facts:
    """What is known of a family without torch."""
    facts: Facts = import_module(f"qflux.models.{_folder(name)}.facts").FACTS[name]
    return facts


def get_family(name: str) -> Family:
    """The family of that name."""
    family: Family = import_module(f"qflux.models.{_folder(name)}.family").FAMILIES[name]
    return family


def all_facts() -> list[Facts]:
    """Of all families."""
    return [facts_of(name) for name in names()]


def shipped() -> Shipped:
    """The small model that comes with qflux."""
    return next(facts.shipped for facts in all_facts() if facts.shipped)


def local_folder(pretrained: str) -> Path:
    """Where a model would lie on this machine: a folder, or the small model that comes with qflux."""
    folder, small = Path(pretrained).expanduser(), shipped()
    return small.folder if pretrained == small.name and not folder.is_dir() else folder


def described(pretrained: str, folder: Path | None = None, override: Path | None = None) -> Described:
    """What a checkpoint says of itself; if it is not on this machine, its name is all that is known.

    `override` is the folder of a transformer that takes the place of its own.
    """
    folder = folder or local_folder(pretrained)
    index = _json(folder / "model_index.json") or _json(folder / "modular_model_index.json")
    transformer = _json((override or folder / "transformer") / "config.json")
    heads, channels = (transformer.get(key) for key in ("num_attention_heads", "attention_head_dim"))
    text, guidance = transformer.get("joint_attention_dim"), transformer.get("guidance_embeds")
    class_name = transformer.get("_class_name") or _class_in(index.get("transformer"))
    return Described(
        name=pretrained,
        pipeline=index.get("_class_name"),
        transformer=class_name if isinstance(class_name, str) else None,
        is_distilled=index.get("is_distilled") is True or transformer.get("flow_map") is True,
        width=heads * channels if isinstance(heads, int) and isinstance(channels, int) else None,
        text_channels=text if isinstance(text, int) else None,
        embeds_guidance=guidance if isinstance(guidance, bool) else None,
        sigmas=_levels(index.get("sample_sigmas")),
    )


def _levels(values: Any) -> tuple[float, ...]:
    """Noise levels in (0, 1], falling; nothing if it is anything else."""
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        return ()
    levels = tuple(map(float, values))
    falling = all(high > low for high, low in pairwise(levels))
    return levels if falling and all(0 < level <= 1 for level in levels) else ()


def _class_in(entry: Any) -> Any:
    """The class of a part: behind its library, or in the hint that a modular pipeline gives instead."""
    if not isinstance(entry, list) or not entry:
        return None
    hint = entry[-1].get("type_hint") if isinstance(entry[-1], dict) else entry
    return hint[-1] if isinstance(hint, list) and hint else None


def families_of(checkpoint: Described) -> list[str]:
    """The families that a checkpoint may be of, the likeliest first: by transformer and pipeline, or by hub id."""
    known = [variant for facts in all_facts() for variant in (facts, *facts.variants)]
    if checkpoint.transformer is not None:
        known = [facts for facts in known if facts.transformer == checkpoint.transformer]
    by_pipeline = [facts for facts in known if facts.pipeline == checkpoint.pipeline]
    by_id = [facts for facts in known if facts.hub_id.lower() == checkpoint.name.lower()]
    found = by_pipeline or by_id or (known if checkpoint.transformer else [])
    return list(dict.fromkeys(facts.name for facts in found))


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def size_presets() -> dict[str, tuple[Size, ...]]:
    """Lists of sizes that a config may name, by what they are called."""
    return {name: sizes for facts in all_facts() for name, sizes in facts.size_presets.items()}


def _folder(name: str) -> str:
    if name not in _FOLDERS:
        raise ConfigError(f"unknown family {name!r}", f"known families: {', '.join(_FOLDERS)}.")
    return _FOLDERS[name]
