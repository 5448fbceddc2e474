"""Model families. To add one: a folder like `flux_kontext/` and a line in `FAMILIES`."""

from qflux.errors import ConfigError
from qflux.models.family import Family
from qflux.models.flux_kontext.family import FLUX_KONTEXT
from qflux.models.flux_kontext.transformer import FluxTransformer2DModel

FAMILIES: dict[str, Family] = {FLUX_KONTEXT.name: FLUX_KONTEXT}


def get_family(name: str) -> Family:
    """The family of that name."""
    if name not in FAMILIES:
        raise ConfigError(f"unknown family {name!r}", f"known families: {', '.join(FAMILIES)}.")
    return FAMILIES[name]


__all__ = ["FAMILIES", "Family", "FluxTransformer2DModel", "get_family"]
