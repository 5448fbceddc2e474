"""The plan of the house: what may know of what, where families are named, how large things may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import get_args

import qflux
from qflux.config import Config, load_config
from qflux.config.schema import json_schema
from qflux.config.section import Marks, Section
from qflux.models import FAMILIES, registry
from qflux.start.machine import Machine
from qflux.start.presets import choose_model

SOURCE = Path(qflux.__file__).parent
REPOSITORY = SOURCE.parents[1]

ROOMS = [
    "errors",
    "version",
    "launch",
    "files",
    "ragged.shapes",
    "models.facts",
    "models.registry",
    "config",
    "ragged",
    "memory",
    "pictures",
    "measures",
    "data",
    "losses",
    "models",
    "cache",
    "adapters",
    "capacity",
    "sampling",
    "runs",
    "report",
    "start",
    "training",
    "commands",
    "studio",
    "demo",
    "cli",
    "main",
]
"""From the ground up: what is in a room may import what is in those before it."""
FOLDERS = registry._FOLDERS
LARGE = {
    "models.qwen_image21.transformer.RaggedQwenImage21Block.forward",  # diffusers' signature
    *(f"models.{folder}.transformer.{registry.facts_of(name).transformer}.forward" for name, folder in FOLDERS.items()),
}
"""Functions that may have more than eight parameters."""


@cache
def modules() -> dict[str, ast.Module]:
    """The code of every module, by its name below `qflux`."""
    found = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text())
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    """What of qflux a module imports, wherever in it; what is only for the type checker is left out."""
    ignored = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in ignored and (node.module or "").startswith("qflux."):
            for name in node.names:
                full = f"{node.module}.{name.name}".removeprefix("qflux.")
                yield full if full in modules() else str(node.module).removeprefix("qflux.")


def room(module: str) -> str:
    """The room of a module: the longest name that it begins with."""
    fitting = [name for name in ROOMS if module == name or module.startswith(f"{name}.")]
    assert fitting, f"{module} is in no room: add it to ROOMS, and to docs/architecture.md"
    return max(fitting, key=len)


def test_imports_point_downwards():
    upwards = [
        f"{module} imports {imported}"
        for module, tree in modules().items()
        if module
        for imported in imports(tree)
        if imported != "models"  # its names are looked up when they are asked for
        if room(module) != room(imported) and ROOMS.index(room(imported)) > ROOMS.index(room(module))
    ]
    assert upwards == []


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {module: set(imports(tree)) - {module} for module, tree in modules().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' → '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        for imported in sorted(graph.get(module, ())):
            visit(imported, (*path, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_level_has_more_than_thirteen_modules():
    for folder in (SOURCE, *(path.parent for path in SOURCE.rglob("__init__.py"))):
        files = [file.name for file in folder.glob("*.py") if file.name not in ("__init__.py", "__main__.py")]
        assert len(files) <= 13, f"{folder.name}: {sorted(files)}"


def test_functions_fit_on_a_screen_and_take_few_parameters():
    for module, tree in modules().items():
        for name, function in functions(tree, module):
            length = (function.end_lineno or 0) - function.lineno + 1
            assert length <= 60, f"{name} has {length} lines"
            arguments = function.args
            parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
            if any(ast.unparse(decorator) == "triton.jit" for decorator in function.decorator_list):
                continue  # it takes pointers, strides and sizes one by one
            assert count <= 8 or name in LARGE, f"{name} has {count} parameters"


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else prefix
        if isinstance(child, ast.FunctionDef):
            yield name, child
        yield from functions(child, name)


FAMILY_NAMES = re.compile(r"(?<!q)flux|kontext|qwen", re.IGNORECASE)


def test_shared_code_names_no_family():
    """Docstrings may, as documentation does; the public names of transformers are the one table in `models`."""
    for module, tree in modules().items():
        is_own = module.startswith(tuple(f"models.{folder}" for folder in FOLDERS.values()))
        if is_own or module in ("models", "models.registry"):
            continue
        for node in ast.walk(tree):
            for text in words_of(node):
                assert not FAMILY_NAMES.search(text), f"{module} speaks of {text[:80]!r}"


def words_of(node: ast.AST) -> Iterator[str]:
    """Names and strings of code, without docstrings."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not getattr(node, "is_doc", False):
        yield node.value
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            child.value.is_doc = True  # type: ignore[attr-defined]


def test_registry_config_init_and_schema_know_the_same_families():
    known = registry.names()
    assert tuple(FAMILIES) == known
    assert get_args(Config.model_fields["family"].annotation) == known
    described = json_schema()["properties"]["family"]["anyOf"][0]
    assert tuple(described["enum"]) == known
    for name in known:
        facts = registry.facts_of(name)
        assert (facts.name, FAMILIES[name].facts) == (name, facts)
        assert choose_model(facts.hub_id, None, Machine("a card", 80), has_controls=True).family == name
        assert getattr(qflux, facts.trainer).family_name == name
        assert name in {load_config(recipe).family for recipe in (REPOSITORY / "recipes").glob("*.yaml")}


def test_every_setting_says_whether_it_must_match_on_resume_and_whether_it_is_recorded():
    def walk(section: type[Section], path: str) -> None:
        for name, field in section.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Section):
                walk(inner, f"{path}{name}.")
            elif name != "held_out":  # a section that may be absent; its sources are the data's identity
                assert isinstance(field.json_schema_extra, Marks), f"{path}{name} is not marked"

    walk(Config, "")


def test_the_readme_tree_names_every_module():
    tree = (REPOSITORY / "README.md").read_text().split("src/qflux/\n", 1)[1].split("```")[0]
    for module in modules():
        if module and not module.endswith("__main__"):
            assert re.search(rf"\b{re.escape(module.split('.')[-1])}\b", tree), f"{module} is not in the README's tree"


def test_the_documentation_speaks_of_every_room():
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    for name in ROOMS:
        assert f"`{name}`" in text or f"`{name}/`" in text, f"docs/architecture.md does not speak of {name}"


def test_every_public_name_imports():
    """The names of DESIGN's and the documentation's tables."""
    public = {
        "qflux": ["Trainer", "Config", "load_config", "__version__", *(f.trainer for f in registry.all_facts())],
        "qflux.errors": ["QfluxError", "ConfigError", "DataError", "CacheError", "CheckpointError"],
        "qflux.models": ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "get_family", "FAMILIES", "Family"],
        "qflux.losses": ["MseLoss", "MaskEditLoss", "AttentionMaskMseLoss", "map_mask_to_latent"],
        "qflux.data": ["ImageProcessor", "EmbeddingCacheManager", "EpochPlan"],
        "qflux.ragged": ["PackedLayout", "PaddedLayout", "RaggedLayout"],
        "qflux.ragged.layout": ["PackedLayout"],
        "qflux.adapters.files": ["read_adapter"],
        "qflux.adapters.attach": ["attach_all", "Weighted"],
        "qflux.adapters.export": ["save_verified", "merge"],
    }
    for module, names in public.items():
        for name in names:
            assert getattr(import_module(module), name) is not None


def test_what_only_reads_does_not_wait_for_torch():
    programs = {
        "help": "import sys\nfrom qflux.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "reading": "import qflux, qflux.runs.folder, qflux.report.page, qflux.config.schema, qflux.start.request",
    }
    for name, program in programs.items():
        check = f"{program}\nimport sys\nassert 'torch' not in sys.modules and 'diffusers' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stderr[-800:]}"
