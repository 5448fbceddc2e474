"""A data folder with every fault people have, each planted on purpose."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZES = [(320, 256), (256, 256), (240, 320), (384, 256)]


def scene(number: int, size: tuple[int, int], brighter: bool = False) -> Image.Image:
    """A random arrangement of shapes; the edit of this data set makes everything brighter."""
    random = np.random.default_rng(number)
    image = Image.new("RGB", size, tuple(int(v) for v in random.integers(20, 120, 3)))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = random.random(2) * (size[0] * 0.7, size[1] * 0.7)
        w, h = (0.1 + 0.25 * random.random(2)) * size
        pen.rectangle((x, y, x + w, y + h), fill=tuple(int(v) for v in random.integers(0, 150, 3)))
    return image.point(lambda v: min(255, v + 70)) if brighter else image


def write_pair(folder: Path, name: str, number: int, size: tuple[int, int] = (320, 256)) -> None:
    for part in ("training_images", "control_images"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    scene(number, size).save(folder / f"control_images/{name}.png")
    scene(number, size, brighter=True).save(folder / f"training_images/{name}.png")
    (folder / f"training_images/{name}.txt").write_text(f"make scene {number} brighter")


def deep_png(width: int, height: int) -> bytes:
    """A 16-bit RGB PNG; Pillow can't write one."""
    random = np.random.default_rng(5)
    rows = b"".join(b"\0" + random.integers(0, 65535, width * 3).astype(">u2").tobytes() for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def bomb_png(width: int = 60_000, height: int = 60_000) -> bytes:
    """A small file that says it holds 3.6 gigapixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def plant(folder: Path) -> None:
    """Sixteen good pairs, and the faults named in `FAULTS`."""
    for number in range(16):
        write_pair(folder, f"good_{number:02}", number, SIZES[number % 4])
    targets, controls = folder / "training_images", folder / "control_images"

    write_pair(folder, "no_prompt", 100)
    (targets / "no_prompt.txt").unlink()
    (targets / "lonely_prompt.txt").write_text("where is my image?")
    write_pair(folder, "empty_prompt", 101)
    (targets / "empty_prompt.txt").write_text(" \n")
    write_pair(folder, "long_prompt", 102)
    (targets / "long_prompt.txt").write_text("very " * 400 + "long")
    for name in ("same_a", "same_b"):
        write_pair(folder, name, 103 + ord(name[-1]))
        (targets / f"{name}.txt").write_text("the same words twice")

    write_pair(folder, "unreadable", 110)
    (targets / "unreadable.png").write_bytes(b"this is no image")
    write_pair(folder, "truncated", 111)
    scene(111, (640, 512)).save(controls / "truncated.jpg", quality=95)
    (controls / "truncated.png").unlink()
    data = (controls / "truncated.jpg").read_bytes()
    (controls / "truncated.jpg").write_bytes(data[: len(data) // 2])
    write_pair(folder, "wrong_mask", 112)
    Image.new("L", (50, 50), 255).save(controls / "wrong_mask_mask.png")
    for name, value in (("empty_mask", 0), ("full_mask", 255)):
        write_pair(folder, name, 113 + value)
        Image.new("L", (320, 256), value).save(controls / f"{name}_mask.png")
    write_pair(folder, "gap", 116)
    scene(116, (64, 64)).save(controls / "gap_control_2.png")
    scene(117, (64, 64)).save(controls / "stray.png")

    write_pair(folder, "crossed_a", 120)
    write_pair(folder, "crossed_b", 121)
    (controls / "crossed_a.png").rename(controls / "x.png")
    (controls / "crossed_b.png").rename(controls / "crossed_a.png")
    (controls / "x.png").rename(controls / "crossed_b.png")
    write_pair(folder, "reversed", 122)
    (controls / "reversed.png").rename(controls / "x.png")
    (targets / "reversed.png").rename(controls / "reversed.png")
    (controls / "x.png").rename(targets / "reversed.png")
    write_pair(folder, "unaligned", 123)
    moved = Image.new("RGB", (320, 256))
    moved.paste(scene(123, (320, 256)), (48, 0))
    moved.save(controls / "unaligned.png")
    write_pair(folder, "no_edit", 124)
    (controls / "no_edit.png").write_bytes((targets / "no_edit.png").read_bytes())

    write_pair(folder, "twin_a", 130)
    write_pair(folder, "twin_b", 130)
    (targets / "twin_b.txt").write_text("another prompt for the same target")
    write_pair(folder, "near_a", 131)
    write_pair(folder, "near_b", 131)
    (targets / "near_b.png").unlink()
    scene(131, (320, 256), brighter=True).resize((480, 384)).save(targets / "near_b.jpg", quality=85)

    write_pair(folder, "upside_down", 140)
    exif = Image.Exif()
    exif[0x0112] = 3
    scene(140, (320, 256), brighter=True).rotate(180).save(targets / "upside_down.jpg", exif=exif)
    (targets / "upside_down.png").unlink()
    write_pair(folder, "panorama", 141, (1000, 100))
    write_pair(folder, "deep", 142)
    (targets / "deep.png").write_bytes(deep_png(320, 256))
    write_pair(folder, "cmyk", 143)
    scene(143, (320, 256), brighter=True).convert("CMYK").save(targets / "cmyk.jpg")
    (targets / "cmyk.png").unlink()
    write_pair(folder, "bomb", 144)
    (targets / "bomb.png").write_bytes(bomb_png())
    write_pair(folder, "loop", 145)
    (controls / "loop.png").unlink()
    (controls / "loop.png").symlink_to(controls / "loop.png")
    (targets / "deeper").symlink_to(folder)
    write_pair(folder, "new\nline 😀", 146)
    (targets / "new\nline 😀.txt").unlink()
    write_pair(folder, "tab\tand 🎨 is fine", 147)
    write_pair(folder, "small", 148, (40, 32))


FAULTS = [
    # level, kind, part of where, part of what
    ("error", "unusable", "no_prompt.png", "no prompt"),
    ("error", "unusable", "lonely_prompt.txt", "without an image"),
    ("error", "unusable", "empty_prompt.txt", "the prompt is empty"),
    ("error", "over-long prompt", "long_prompt", "tokens; the limit is"),
    ("note", "same prompt", "same_a", "same_b"),
    ("error", "unusable", "unreadable", "unreadable.png can't be read as an image"),
    ("error", "unusable", "truncated", "truncated.jpg can't be read as an image"),
    ("error", "unusable", "wrong_mask", "the mask and its target differ in size"),
    ("warning", "mask", "empty_mask_mask.png", "empty"),
    ("warning", "mask", "full_mask_mask.png", "full"),
    ("error", "unusable", "gap_control_2.png", "control 1 is missing"),
    ("error", "unusable", "stray.png", "no target of that name"),
    ("warning", "swapped", "crossed_a", "crossed_b"),
    ("warning", "swapped", "crossed_b", "crossed_a"),
    ("warning", "swapped", "reversed", "the other way"),
    ("warning", "unaligned", "unaligned", "16% of the width"),
    ("warning", "no edit", "no_edit", "the same image"),
    ("warning", "duplicate", "twin_a.png", "twin_b.png"),
    ("warning", "near-duplicate", "near_a.png", "near_b.jpg"),
    ("note", "orientation", "upside_down.jpg", "upside down"),
    ("error", "unusable", "panorama", "aspect ratio 10.00"),
    ("note", "pixel format", "deep.png", "8 bits"),
    ("note", "pixel format", "cmyk.jpg", "CMYK"),
    ("error", "unusable", "bomb", "exceeds limit"),
    ("error", "unusable", "loop", "loop.png can't be read as an image: Too many levels of symbolic links"),
    ("error", "unusable", "new\\nline 😀.png", "no prompt"),
    ("warning", "enlarged", "small.png", "enlarged"),
]
