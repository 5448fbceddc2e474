"""Every key is documented where it is defined; the schema and the reference page follow from it."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from qflux.config.reader import parse_yaml
from qflux.config.root import Config
from qflux.config.schema import _sections_of, json_schema, reference

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def every_field(section=Config, path=""):
    for name, field in section.model_fields.items():
        yield f"{path}{name}", field
        for inner in _sections_of(field):
            yield from every_field(inner, f"{path}{name}.")


def test_every_key_says_what_it_is():
    assert [path for path, field in every_field() if not field.description] == []


def test_the_reference_page_is_what_the_code_says():
    assert (ROOT / "docs/reference.md").read_text() == reference(), (
        "qflux schema --reference --output docs/reference.md"
    )


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_fit_the_schema(recipe):
    assert list(VALIDATOR.iter_errors(parse_yaml(recipe.read_text()))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"famly": "flux-kontext"},
        {"lora": {"rank": 0}},
        {"lora": {"rank": "16"}},
        {"train": {"lr_scheduler": "cosin"}},
        {"data": {"path": "x", "processor": {"target_size": [100, 64]}}},
        {"data": {"path": "x", "processor": {"multi_resolutions": ["512"]}}},
        {"data": {"sources": [{"type": "csv"}]}},
    ],
    ids=str,
)
def test_an_editor_is_told_what_is_wrong(change):
    values = {"model": {"pretrained": "x"}, "data": {"path": "x"}, **change}
    assert list(VALIDATOR.iter_errors(values))


@pytest.mark.parametrize(
    "processor",
    [
        {"multi_resolutions": ["512*512", 4096]},
        {"multi_resolutions": "kontext"},
        {"multi_resolutions": {"target": ["512x768"], "controls": [["256*256"]]}},
        {"target_size": [512, 768]},
        {"target_pixels": "1024*1024", "controls_pixels": [65536]},
    ],
    ids=str,
)
def test_every_spelling_of_sizes_is_known_to_editors(processor):
    values = {"model": {"pretrained": "x"}, "data": {"sources": [{"path": "x"}], "processor": processor}}
    assert list(VALIDATOR.iter_errors(values)) == []
