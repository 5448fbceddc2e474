"""The families there are."""

from qflux.errors import ConfigError
from qflux.models.family import Family
from qflux.models.flux_kontext.family import FLUX_KONTEXT
from qflux.models.qwen_image.family import QWEN_IMAGE, QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS

FAMILIES: dict[str, Family] = {
    family.name: family for family in (FLUX_KONTEXT, QWEN_IMAGE, QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS)
}


def get_family(name: str) -> Family:
    """The family of that name."""
    if name not in FAMILIES:
        raise ConfigError(f"unknown family {name!r}", f"known families: {', '.join(FAMILIES)}.")
    return FAMILIES[name]
