"""A config as text and as a form: values change where they stand, comments stay, errors have a place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qflux.config.reader import parse_yaml
from qflux.errors import ConfigError, DataError
from qflux.studio.drafts import checked, fields_of, line_of, with_value
from qflux.studio.workspace import Workspace

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SETTINGS = {
    "run_name": st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
    "seed": st.integers(0, 10**6),
    "memory": st.sampled_from(["12GB", "8GiB"]),
    "model.pretrained": st.sampled_from(["a/b", "some # where", "it's: here"]),
    "data.batch_size": st.integers(1, 64),
    "data.max_tokens": st.integers(1, 10**6),
    "data.processor.enlarge": st.booleans(),
    "data.processor.multi_resolutions": st.lists(st.sampled_from(["512*512", "768*768"]), min_size=1, max_size=3),
    "lora.rank": st.integers(1, 256),
    "optimizer.init_args.lr": st.floats(1e-6, 1e-2),
    "train.max_train_steps": st.integers(1, 10**5),
    "validation.images": st.integers(0, 9),
    "loss.timesteps.low": st.floats(0.0, 0.5),
}


def expected(values: dict, path: str, value: object) -> dict:
    *sections, name = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value
    return values


@settings(max_examples=120, deadline=None)
@given(data=st.data(), recipe=st.sampled_from(RECIPES))
def test_a_value_is_changed_where_it_stands_and_nothing_else(data, recipe):
    """Several changes one after another, of settings that are there and that are not, and some taken out."""
    text = recipe.read_text()
    values = parse_yaml(text)
    comments = [line.strip() for line in text.splitlines() if line.strip().startswith("#")]
    for path in data.draw(st.lists(st.sampled_from(sorted(SETTINGS)), min_size=1, max_size=5)):
        value = data.draw(st.none() | SETTINGS[path])
        before = parse_yaml(text)
        text = with_value(text, path, value)
        expected(before, path, value)
        values = parse_yaml(text)
        assert without_empty(values) == without_empty(before), path
        assert all(section is not None for section in values.values()), "a section of nothing"
    for comment in comments:
        assert comment in text


def without_empty(values: dict) -> dict:
    kept = {key: without_empty(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value != {}}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_fields_are_what_the_text_says(recipe):
    found = fields_of(recipe.read_text())
    values = yaml.safe_load(recipe.read_text())
    assert found["model.pretrained"] == values["model"]["pretrained"]
    assert found.get("lora.rank") == values.get("lora", {}).get("rank")
    assert found.get("data.batch_size") == values["data"].get("batch_size")


def test_errors_have_a_place(tmp_path):
    workspace = Workspace.opened(tmp_path)
    text = (
        "model:\n  pretrained: a/b\ndata:\n  path: data\ntrain:\n  max_train_steps: 0\n  what: 1\nlora: { rank: -1 }\n"
    )
    config, problems = checked(text, workspace)
    assert config is None
    assert {(problem.path, problem.line) for problem in problems} >= {("train.max_train_steps", 6), ("lora.rank", 8)}
    assert checked("model: [", workspace)[1][0].path == ""
    assert checked("- 1\n- 2\n", workspace)[0] is None
    assert line_of(text, "train.nothing") == 5
    assert line_of("{", "train") is None


def test_what_is_no_setting_is_refused():
    for path in ("", "a b", "../x", "train..x", "train.x\n"):
        with pytest.raises(DataError):
            with_value("seed: 1\n", path, 3)
    with pytest.raises(ConfigError, match="no YAML"):
        with_value("a: [", "seed", 3)
    assert with_value("", "train.seed", 3) == "train:\n  seed: 3\n"


@pytest.mark.parametrize(
    "text", ["{a: 1, b: 2}\n", "a: &x {b: 1}\nc: *x\n", "a: 1\n...\n", "--- {a: 1}\n", "? a\n: 1\n"]
)
@pytest.mark.parametrize(("path", "value"), [("b", None), ("c.b", 3), ("d", 4), ("a", 5)])
def test_whatever_way_yaml_is_written_in_nothing_else_is_changed(text, path, value):
    before = fields_of(text)
    try:
        after = fields_of(with_value(text, path, value))
    except ConfigError:
        return
    assert after.get(path) == value
    assert {k: v for k, v in after.items() if not k.startswith(path)} == {
        k: v for k, v in before.items() if not k.startswith(path)
    }
