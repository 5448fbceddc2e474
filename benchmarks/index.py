"""Indexing 20,000 JPEGs of one megapixel, against decoding them, in the same number of threads.

python benchmarks/index.py [FOLDER]     # makes the images in FOLDER (about 8 GB) unless they are there
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from qflux.data.images.decode import ImageFile, load_rgb
from qflux.data.images.index import WORKERS, FileIndex

COUNT, SIDE = 20_000, 1000


def make(folder: Path) -> None:
    """Smooth colours with fine grain, as many bytes as a photo of that size has."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    base = Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).resize((SIDE, SIDE), 3)
    grain = np.asarray(base).astype(np.int16) + random.normal(0, 8, (SIDE, SIDE, 1)).astype(np.int16)
    buffer = io.BytesIO()
    Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    data = buffer.getvalue()
    for number in range(COUNT):
        path = folder / f"{number:05}.jpg"
        if not path.is_file():
            # A comment makes every file different without encoding it anew.
            path.write_bytes(data[:2] + b"\xff\xfe\x00\x0a" + f"{number:08}".encode() + data[2:])


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "images"
        make(folder)
        images = [ImageFile(path) for path in sorted(folder.glob("*.jpg"))[:COUNT]]
        for image in images:  # both then read from memory, so that the disk's mood does not decide
            image.path.read_bytes()
        rows = []
        for name in ("first run", "second run", "after 100 changes"):
            if name.startswith("after"):
                for image in images[::200]:
                    image.path.touch()
            index = FileIndex(Path(temporary) / "index.jsonl")
            start = time.perf_counter()
            index.facts(images)
            rows.append((f"index, {name}", time.perf_counter() - start, index.read))
        start = time.perf_counter()
        with ThreadPoolExecutor(WORKERS) as pool:
            for _ in pool.map(lambda image: load_rgb(image).size, images):
                pass
        decoding = time.perf_counter() - start
        rows.append(("decode", decoding, len(images)))
    size = sum(image.path.stat().st_size for image in images if image.path.exists())
    print(f"{len(images):,} JPEGs of {SIDE}x{SIDE}, {WORKERS} threads{f', {size / 1e9:.1f} GB' if size else ''}\n")
    print("| | seconds | of decoding | files read |\n|---|---|---|---|")
    for name, seconds, read in rows:
        print(f"| {name} | {seconds:.1f} | {seconds / decoding:.1%} | {read:,} |")


if __name__ == "__main__":
    main()
