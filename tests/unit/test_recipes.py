from __future__ import annotations

from pathlib import Path

import pytest

from qflux.config import load_config
from qflux.demo.run import SETTINGS

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_valid(recipe):
    load_config(recipe)


def test_the_demo_runs_its_recipe():
    assert load_config(RECIPES[0].with_name("demo.yaml")) == load_config(SETTINGS)
