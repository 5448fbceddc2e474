"""Synthetic scenes: coloured shapes on a textured background, by day and by night, in any size.

A scene is a description; `render` paints many of one size at once, on any device. Edges are signed distances in pixels,
so that shapes have soft edges by day and a halo by night.

Shapes: B scenes of one size, K shapes of a scene, H x W pixels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Colour = tuple[float, float, float]

COLOURS: dict[str, Colour] = {
    "red": (0.84, 0.16, 0.14),
    "orange": (0.95, 0.52, 0.10),
    "yellow": (0.95, 0.83, 0.15),
    "green": (0.16, 0.60, 0.25),
    "blue": (0.14, 0.35, 0.82),
    "purple": (0.52, 0.22, 0.68),
    "black": (0.12, 0.12, 0.14),
}
"""Of shapes, and of plain swatches."""
GROUNDS: dict[str, Colour] = {
    "grey": (0.76, 0.76, 0.78),
    "sand": (0.90, 0.83, 0.68),
    "mint": (0.70, 0.89, 0.78),
    "sky": (0.69, 0.84, 0.96),
    "rose": (0.96, 0.76, 0.78),
    "lilac": (0.84, 0.77, 0.94),
}
"""Of backgrounds."""
CORNERS = {"circle": 0, "square": 4, "triangle": 3, "star": 5}
TEXTURES = ("stripes", "checks", "dots", "fade")

MOONLIGHT: Colour = (0.10, 0.16, 0.36)
"""What is left of a background at night."""


@dataclass(frozen=True)
class Shape:
    """Centre in parts of width and height, radius in parts of the shorter side, turned by an angle."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    turn: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Ground:
    """A background: a texture in two tones of one colour."""

    texture: str
    colour: str
    angle: float = 0.0
    period: float = 24.0
    """In pixels."""


@dataclass(frozen=True)
class Scene:
    width: int
    height: int
    ground: Ground
    shapes: tuple[Shape, ...] = ()

    def has_room_for(self, shape: Shape, instead_of: Shape | None = None) -> bool:
        """Whether a shape fits into the picture and touches no other one."""
        side = min(self.width, self.height)
        x, y, reach = shape.x * self.width, shape.y * self.height, shape.radius * side
        if not (reach <= x <= self.width - reach and reach <= y <= self.height - reach):
            return False
        return all(
            math.hypot(x - other.x * self.width, y - other.y * self.height) > reach + 1.1 * other.radius * side
            for other in self.shapes
            if other is not instead_of
        )

    def with_shape(self, old: Shape, new: Shape | None) -> Scene:
        """The scene with a shape replaced, or taken away."""
        changed = (new if shape is old else shape for shape in self.shapes)
        return replace(self, shapes=tuple(shape for shape in changed if shape is not None))


def draw_ground(rng: random.Random) -> Ground:
    return Ground(rng.choice(TEXTURES), rng.choice(list(GROUNDS)), rng.uniform(0, math.pi), rng.uniform(14, 40))


def draw_scene(rng: random.Random, width: int, height: int, most: int = 3) -> Scene:
    """A scene of one to `most` shapes, no two of the same name."""
    scene = Scene(width, height, draw_ground(rng))
    wanted = rng.randint(1, most)
    for _ in range(60):
        if len(scene.shapes) == wanted:
            break
        turn = rng.uniform(-0.5, 0.5)
        shape = Shape(
            rng.choice(list(CORNERS)),
            rng.choice(list(COLOURS)),
            rng.random(),
            rng.random(),
            rng.uniform(0.15, 0.3),
            turn,
        )
        if scene.has_room_for(shape) and shape.name not in {other.name for other in scene.shapes}:
            scene = replace(scene, shapes=(*scene.shapes, shape))
    return scene


def swatch(rng: random.Random, width: int, height: int, colour: str) -> Scene:
    """A plain picture of one colour of `COLOURS`."""
    return Scene(width, height, Ground("fade", colour, rng.uniform(0, math.pi)))


def dimmed(colour: Colour) -> Colour:
    """The light that a colour gives at night."""
    red, green, blue = colour
    return 0.4 * red, 0.4 * green, 0.4 * blue


def render(scenes: Sequence[Scene], device: torch.device | str = "cpu") -> Tensor:
    """`(B, 3, H, W)` in 0 to 1: the scenes, all of one size, by day."""
    canvas = _Canvas(scenes, device)
    picture = canvas.ground
    for distance, colour, _ in canvas.shapes:
        picture = torch.lerp(picture, colour, (0.5 - distance).clamp(0, 1))
    return picture


def render_night(
    scenes: Sequence[Scene], lights: Sequence[Colour] | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """The same scenes by night: the background sinks into the light of the moon (or `lights`), and shapes glow."""
    canvas = _Canvas(scenes, device)
    light = torch.tensor(list(lights or [MOONLIGHT] * len(scenes)), device=device)[:, :, None, None]
    picture = canvas.ground * light
    for distance, colour, radius in canvas.shapes:
        picture = picture + 0.7 * colour * torch.exp(-distance.clamp(min=0) / (0.4 * radius).clamp(min=1e-3))
    for distance, colour, _ in canvas.shapes:
        picture = torch.lerp(picture, 0.7 * colour + 0.3, (0.5 - distance).clamp(0, 1))
    return picture.clamp(0, 1)


class _Canvas:
    """What pictures of a batch of scenes have in common: the ground, and every pixel's distance to every shape."""

    def __init__(self, scenes: Sequence[Scene], device: torch.device | str) -> None:
        self._height, self._width = scenes[0].height, scenes[0].width
        self._device = device
        if any((scene.width, scene.height) != (self._width, self._height) for scene in scenes):
            raise ValueError("scenes of different sizes are not painted together")
        self._y = (torch.arange(self._height, device=device) + 0.5)[:, None]
        self._x = (torch.arange(self._width, device=device) + 0.5)[None, :]
        self.ground = self._grounds([scene.ground for scene in scenes])
        """`(B, 3, H, W)`"""
        most = max(len(scene.shapes) for scene in scenes)
        nothing = Shape("circle", "black", 0.0, 0.0, 0.0)
        self.shapes = [
            self._shapes([scene.shapes[k] if k < len(scene.shapes) else nothing for scene in scenes])
            for k in range(most)
        ]
        """For each k of K: distance `(B, 1, H, W)` in pixels (negative inside), colour `(B, 3, 1, 1)`, radius."""

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(list(values), device=self._device)[:, None, None]

    def _grounds(self, grounds: Sequence[Ground]) -> Tensor:
        angle, period = self._numbers([g.angle for g in grounds]), self._numbers([g.period for g in grounds])
        along = (self._x * angle.cos() + self._y * angle.sin()) / period
        across = (self._y * angle.cos() - self._x * angle.sin()) / period
        first, second = (0.5 + 0.5 * torch.sin(2 * math.pi * way) for way in (along, across))
        soft = {
            "stripes": torch.sigmoid(8 * (first - 0.5)),
            "checks": torch.sigmoid(24 * (first - 0.5) * (second - 0.5)),
            "dots": torch.sigmoid(14 * (first * second - 0.55)),
            "fade": 0.5 + 0.5 * torch.sin(along * period / (0.7 * max(self._width, self._height))),
        }
        tones = torch.stack([soft[ground.texture][row] for row, ground in enumerate(grounds)])[:, None]
        colours = {**COLOURS, **GROUNDS}
        colour = torch.tensor([colours[ground.colour] for ground in grounds], device=self._device)[:, :, None, None]
        return colour * (1.04 - 0.18 * tones)

    def _shapes(self, shapes: Sequence[Shape]) -> tuple[Tensor, Tensor, Tensor]:
        side = min(self._width, self._height)
        radius = self._numbers([shape.radius * side for shape in shapes])
        x = self._x - self._numbers([shape.x * self._width for shape in shapes])
        y = self._y - self._numbers([shape.y * self._height for shape in shapes])
        far = torch.hypot(x, y)
        distance = far - radius
        corners = self._numbers([CORNERS[shape.kind] for shape in shapes])
        if bool(corners.any()):
            # Folded into half a corner, the outline is one edge, from a tip to the middle between two tips.
            half = math.pi / corners.clamp(min=3)
            angle = torch.atan2(x, -y) - self._numbers([shape.turn for shape in shapes])
            folded = (torch.remainder(angle + half, 2 * half) - half).abs()
            inner = torch.where(corners == 5, 0.5, half.cos())
            edge_x, edge_y = inner * half.cos() - 1, inner * half.sin()
            length = torch.hypot(edge_x, edge_y)
            cornered = ((far * folded.cos() - radius) * edge_y - far * folded.sin() * edge_x) / length
            distance = torch.where(corners > 0, cornered, distance)
        absent = radius == 0
        distance = torch.where(absent, 1e6, distance)
        colour = torch.tensor([COLOURS[shape.colour] for shape in shapes], device=self._device)
        return distance[:, None], colour[:, :, None, None], radius[:, None]
