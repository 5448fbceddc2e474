"""ADD AN ATTACK HERE: a function of a case that raises `Wrong`, and its line in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torture.attacks import configs, jobs, kills, pictures, places, shapes, stored, studio
from torture.cases import Case


@dataclass(frozen=True)
class Attack:
    """What is done in a case, and how often beside the others."""

    do: Callable[[Case], None]
    share: int
    """Cases of this kind in a round of all."""
    quick: int = 1
    """Cases in the short, fixed part."""


ATTACKS: dict[str, Attack] = {
    "configs.recipe": Attack(configs.recipe, 300, 40),
    "configs.text": Attack(configs.text, 150, 20),
    "configs.checked": Attack(configs.checked, 2, 2),
    "pictures.folder": Attack(pictures.folder, 8, 3),
    "pictures.table": Attack(pictures.table, 8, 3),
    "jobs.list": Attack(jobs.listed, 4, 2),
    "stored.entry": Attack(stored.entry, 4, 2),
    "stored.checkpoint": Attack(stored.checkpoint, 2, 2),
    "stored.run_file": Attack(stored.run_file, 2, 2),
    "stored.lora": Attack(stored.lora, 12, 10),
    "shapes.batch": Attack(shapes.batch, 12, 6),
    "kills.cache": Attack(kills.cache, 3, 1),
    "kills.fit": Attack(kills.fit, 4, 1),
    "kills.fit_of_two": Attack(kills.fit_of_two, 1, 1),
    "kills.jobs": Attack(kills.jobs, 2, 1),
    "kills.export": Attack(kills.export, 4, 1),
    "kills.replaced": Attack(kills.replaced, 50, 5),
    "kills.corrections": Attack(studio.corrections_killed, 6, 1),
    "kills.queue": Attack(studio.queue_killed, 2, 1),
    "places.full": Attack(places.full, 4, 1),
    "places.forbidden": Attack(places.forbidden, 2, 1),
    "places.two_at_once": Attack(places.two_at_once, 3, 1),
    "places.clock": Attack(places.clock, 1, 1),
}
