"""Instructions on scenes and what they ask for: what the demo's base model knows, and the one edit it does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from qflux.demo.scenes import COLOURS, CORNERS, GROUNDS, Scene, Shape, draw_ground, draw_scene, swatch

SIZES = (
    (96, 96),
    (128, 96),
    (96, 128),
    (128, 128),
    (160, 112),
    (112, 160),
    (192, 96),
    (160, 160),
    (128, 192),
    (208, 144),
    (144, 208),
    (192, 192),
)
"""(width, height) of pictures."""
SMALL_SIZES = ((64, 64), (96, 64), (64, 96))
"""Of second images."""
TO_NIGHT = "turn the day into night"
TO_LIT_NIGHT = "turn the day into night in the light of the second image"
SIDES = {"left": (0, None), "right": (1, None), "top": (None, 0), "bottom": (None, 1)}
PLACES = {
    "top left": (0, 0),
    "top right": (1, 0),
    "bottom left": (0, 1),
    "bottom right": (1, 1),
}
OTHER_WORDS = """
make the move to larger smaller remove add a an in corner background give colour of second image
it and as all draw drawing outline outlines paper paint picture style scene shape shapes like from with on at is
winter summer snow rain old new dark bright pencil
"""
MARGIN = 0.06
ADDED = 0.17
"""Radius of an added shape."""


@dataclass(frozen=True)
class Instruction:
    """One example: what is said, the scene it is said about, the scene that is wanted, perhaps a second picture."""

    kind: str
    prompt: str
    before: Scene
    after: Scene
    second: Scene | None = None


def draw_instruction(rng: random.Random, size: tuple[int, int], kind: str | None = None) -> Instruction:
    """An instruction of a kind (or any) that a random scene of this size allows."""
    while True:
        scene = draw_scene(rng, *size)
        shape = rng.choice(scene.shapes) if scene.shapes else None
        found = KINDS[kind or rng.choice(list(KINDS))](rng, scene, shape) if shape else None
        if found:
            return found


def _recolour(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    colour = rng.choice([name for name in COLOURS if name != shape.colour])
    after = scene.with_shape(shape, replace(shape, colour=colour))
    return Instruction("colour", f"make the {shape.name} {colour}", scene, after)


def _move(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    side = rng.choice(list(SIDES))
    x, y = _against(scene, shape.radius, *SIDES[side])
    moved = replace(shape, x=shape.x if x is None else x, y=shape.y if y is None else y)
    far = abs(moved.x - shape.x) + abs(moved.y - shape.y)
    if far < 0.12 or not scene.has_room_for(moved, instead_of=shape):
        return None
    return Instruction("position", f"move the {shape.name} to the {side}", scene, scene.with_shape(shape, moved))


def _resize(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    word, factor = rng.choice([("larger", 1.5), ("smaller", 0.6)])
    resized = replace(shape, radius=shape.radius * factor)
    if not scene.has_room_for(resized, instead_of=shape):
        return None
    return Instruction("size", f"make the {shape.name} {word}", scene, scene.with_shape(shape, resized))


def _remove(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    return Instruction("count", f"remove the {shape.name}", scene, scene.with_shape(shape, None))


def _add(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    place = rng.choice(list(PLACES))
    x, y = _against(scene, ADDED, *PLACES[place])
    new = Shape(rng.choice(list(CORNERS)), rng.choice(list(COLOURS)), x or 0.0, y or 0.0, ADDED)
    if not scene.has_room_for(new) or any(new.name == other.name for other in scene.shapes):
        return None
    after = replace(scene, shapes=(*scene.shapes, new))
    article = "an" if new.colour[0] in "aeiou" else "a"
    return Instruction("count", f"add {article} {new.name} in the {place} corner", scene, after)


def _reground(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    colour = rng.choice([name for name in GROUNDS if name != scene.ground.colour])
    after = replace(scene, ground=replace(scene.ground, colour=colour))
    return Instruction("background", f"make the background {colour}", scene, after)


def _reground_like(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    other = Scene(*rng.choice(SMALL_SIZES), draw_ground(rng))
    after = replace(scene, ground=replace(scene.ground, colour=other.ground.colour))
    prompt = "give the background the colour of the second image"
    return Instruction("second image", prompt, scene, after, other)


def _recolour_like(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    colour = rng.choice([name for name in COLOURS if name != shape.colour])
    after = scene.with_shape(shape, replace(shape, colour=colour))
    prompt = f"give the {shape.name} the colour of the second image"
    return Instruction("second image", prompt, scene, after, swatch(rng, *rng.choice(SMALL_SIZES), colour))


def _keep(rng: random.Random, scene: Scene, shape: Shape) -> Instruction | None:
    return Instruction("nothing", "", scene, scene)


Kind = Callable[[random.Random, Scene, Shape], Instruction | None]
KINDS: dict[str, Kind] = {
    "recolour": _recolour,
    "move": _move,
    "resize": _resize,
    "remove": _remove,
    "add": _add,
    "reground": _reground,
    "reground like": _reground_like,
    "recolour like": _recolour_like,
    "keep": _keep,
}


def _against(scene: Scene, radius: float, x: int | None, y: int | None) -> tuple[float | None, float | None]:
    """The centre of a shape that lies against these sides (0 left or top, 1 right or bottom)."""
    side = min(scene.width, scene.height)

    def centre(end: int | None, length: int) -> float | None:
        near = (radius + MARGIN) * side / length
        return None if end is None else near if end == 0 else 1 - near

    return centre(x, scene.width), centre(y, scene.height)


def words() -> list[str]:
    """Every word of every instruction, and some that a user of the demo may want to teach it."""
    known = {*COLOURS, *GROUNDS, *CORNERS, *SIDES, *" ".join([*PLACES, TO_LIT_NIGHT, OTHER_WORDS]).split()}
    return sorted(known)
