"""`qflux studio`, driven in a real browser: from a wall of pairs to a LoRA that is taken away."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from qflux.data.sources.corrections import Corrections
from qflux.demo.night import write_night_set
from qflux.runs.folder import RunFolder
from studios import browsing, requests_of, studio, wait_for

PICTURES = os.environ.get("QFLUX_STUDIO_PICTURES")
"""Where screenshots go that the documentation shows."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Twenty-four pairs of the demo, one of which is off, and one whose prompt tries to break out of the page."""
    root = tmp_path_factory.mktemp("studio") / "demo"
    write_night_set(root / "data", 24, seed=3)
    targets = root / "data/training_images"
    (targets / "scene_020.txt").write_text("<img src=x onerror=\"document.title='broken'\"> turn the day into night")
    shutil.copy(root / "data/control_images/scene_006.png", targets / "scene_006.png")
    return root


class Page:
    """What a person does with the page."""

    def __init__(self, driver, server) -> None:
        self.driver, self.server = driver, server
        driver.get(server.address)
        self.until("body[data-ready]")

    def go(self, place: str) -> None:
        self.driver.get(f"{self.server.root}/#{place}")

    def all(self, selector: str):
        return self.driver.find_elements("css selector", selector)

    def until(self, selector: str, text: str | None = None):
        """An element as soon as it is there, and says something."""

        def there():
            try:
                found = self.all(selector)
                return next((item for item in found if text is None or text in item.text), None)
            except Exception:  # it was drawn anew meanwhile
                return None

        return wait_for(there, f"{selector} {text or ''}")

    def click(self, selector: str) -> None:
        def clicked() -> bool:
            try:
                self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.until(selector))
                self.until(selector).click()
                return True
            except Exception:
                return False

        wait_for(clicked, f"click {selector}")

    def write(self, selector: str, text: str) -> None:
        field = self.until(selector)
        field.send_keys("\ue009a", "\ue017")  # everything, away with it
        field.send_keys(text)

    def value(self, selector: str) -> str:
        return self.driver.execute_script("return document.querySelector(arguments[0])?.value ?? ''", selector)

    def says(self, selector: str) -> str:
        """The text of an element now, which may be drawn anew at any moment."""
        return self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def shot(self, name: str) -> None:
        if PICTURES:
            drawn = (
                "scrollTo(0, 0); const seen = (i) => i.getBoundingClientRect().top < innerHeight;"
                "return [...document.images].filter(seen).every((i) => i.complete && i.naturalWidth)"
            )
            wait_for(lambda: self.driver.execute_script(drawn), "pictures")
            self.driver.save_screenshot(str(Path(PICTURES) / f"studio-{name}.png"))

    def is_clean(self) -> None:
        """Nothing in the console, nothing asked of another machine, nothing of the data taken for markup."""
        assert [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"] == []
        asked = {urlsplit(url).netloc for url in requests_of(self.driver) if url.startswith("http")}
        assert asked <= {f"127.0.0.1:{self.server.port}"}
        assert "broken" not in self.driver.title


@pytest.mark.slow
def test_from_pairs_to_a_lora_that_is_taken_away(pairs, tmp_path):
    with studio(pairs) as server, browsing() as driver:
        page = Page(driver, server)
        originals = {path: path.read_bytes() for path in (pairs / "data").rglob("*") if path.is_file()}

        # Look at the data: all there, what is wrong is marked.
        page.until("#count", "24 of 24")
        page.click("#inspect")
        page.until("[data-only='no edit']", "1")
        page.click("[data-only='no edit']")
        page.until("#count", "1 of 24")
        page.until(".card[data-name='scene_006'] .badge.warning")
        page.click("[data-only='no edit']")
        page.until("#count", "24 of 24")
        page.until(".card[data-name='scene_000']")
        page.shot("data")

        # Change a prompt in place, take it back, do it again.
        page.click(".card[data-name='scene_000'] .prompt")
        page.write(".card[data-name='scene_000'] textarea", "let the night fall")
        page.until(".card[data-name='scene_000'] textarea").send_keys("\ue007")
        page.until(".card[data-name='scene_000'] .prompt", "let the night fall")
        page.click("#undo")
        page.until(".card[data-name='scene_000'] .prompt", "turn the day into night")
        page.click("#redo")
        page.until(".card[data-name='scene_000'] .prompt", "let the night fall")

        # Leave a sample out and paint a mask, closely.
        page.click(".card[data-name='scene_006'] .open")
        page.click("#exclude")
        page.until(".card.excluded[data-name='scene_006']")
        page.click("dialog .close")
        page.click(".card[data-name='scene_001'] .open")
        page.click("#paint")
        canvas = page.until("canvas.paint")
        from selenium.webdriver import ActionChains

        ActionChains(driver).move_to_element(canvas).click_and_hold().move_by_offset(60, 20).move_by_offset(
            -30, 40
        ).release().perform()
        page.shot("mask")
        page.click("#save-mask")
        page.until("dialog #paint", "Change the mask")
        page.click("dialog .close")
        said = Corrections.read(pairs / "data.corrections").of()
        assert said["scene_000"] == {"prompt": "let the night fall"}
        assert said["scene_006"] == {"excluded": True}
        mask = np.asarray(Image.open(pairs / "data.corrections" / said["scene_001"]["mask"]))
        with Image.open(pairs / "data/training_images/scene_001.png") as target:
            assert mask.shape == target.size[::-1]
        assert 0.01 < (mask > 127).mean() < 0.6
        assert originals == {path: path.read_bytes() for path in originals}, "originals are nobody's to change"

        # Words in all prompts.
        page.click("#replace")
        page.write("#find", "night")
        page.write("#put", "dark night")
        page.until("dialog", "24 prompts would change")
        page.click("dialog .main")
        page.until(".card[data-name='scene_002'] .prompt", "dark night")
        page.click("#undo")
        page.until(".card[data-name='scene_002'] .prompt", "turn the day into night")

        # A run: the form and the text follow each other, an error stands at its field.
        page.go("new")
        wait_for(lambda: "corrections: data.corrections" in page.value("#yaml"))
        page.write("[id='field-run_name']", "first")
        wait_for(lambda: 'run_name: "first"' in page.value("#yaml"))
        page.write("[id='field-train.max_train_steps']", "0")
        page.until("label.wrong .problem", "greater than or equal to 1")
        assert not page.until("#start").is_enabled()
        page.write("[id='field-train.max_train_steps']", "4000")
        page.write("[id='field-train.checkpoint_every']", "4")
        wait_for(lambda: "checkpoint_every: 4" in page.value("#yaml") and page.until("#start").is_enabled())
        area = page.until("#yaml")
        driver.execute_script(
            "arguments[0].value = arguments[0].value.replace('rank: 16', 'rank: 4');"
            "arguments[0].dispatchEvent(new Event('input'))",
            area,
        )
        wait_for(lambda: page.value("[id='field-lora.rank']") == "4")
        page.write("[id='field-memory']", "24GB")
        wait_for(lambda: 'memory: "24GB"' in page.value("#yaml"))
        page.click("#check")
        page.until("#plan table", "4,000 steps")
        page.until("#memory .legend", "spare 22")
        page.shot("new")
        page.click("#start")

        # Watch it learn; stop it, which saves; go on.
        page.until("#charts svg")
        page.until("#number-step", "/ 4000")
        wait_for(lambda: int(page.says("#number-step").split(" /")[0] or 0) >= 9)
        page.until(".edits .frame img")
        page.shot("run")
        page.click("#stop")
        page.until(".badge.interrupted")
        stopped = RunFolder(pairs / "runs/first")
        assert stopped.status == "interrupted"
        last = stopped.steps[-1]["step"]
        config = (pairs / "first.yaml").read_text()
        (pairs / "first.yaml").write_text(config.replace("max_train_steps: 4000", f"max_train_steps: {last + 6}"))
        page.click("#resume")
        page.until(".badge.finished")
        done = RunFolder(pairs / "runs/first")
        assert [line["step"] for line in done.steps] == list(range(1, last + 7)), "no step is lost, none done twice"
        names = {sample["name"] for sample in done.samples}
        assert "scene_006" not in names
        assert "scene_000" in names

        # Try it on a picture of one's own; take it away.
        page.go("try")
        picture = tmp_path / "mine.png"
        Image.new("RGB", (160, 112), "skyblue").save(picture)
        page.until("#file").send_keys(str(picture))
        page.until("#drop img")
        page.write("#prompt", "turn the day into night")
        page.write("#steps", "2")
        page.click("#go")
        page.until("#results article[data-state='done'] .frame")
        page.shot("try")
        page.go("runs/runs%2Ffirst")
        page.click("#export-comfyui")
        page.until("#files", "comfyui")
        page.go("compare")
        page.until("#compared svg")
        page.until("#same .frame")
        page.shot("compare")
        page.is_clean()


@pytest.mark.slow
def test_runs_outlive_the_studio_and_are_seen_again(pairs, tmp_path):
    """Killed, the studio takes nothing with it; a run that was killed is shown as interrupted, and goes on."""
    root = tmp_path / "again"
    shutil.copytree(pairs / "data", root / "data")
    with studio(root) as server:
        cookie = server.cookie()
        draft = server.ask("POST", "/api/draft", {"set": "data", "model": "qflux-small", "name": "long"}, cookie=cookie)
        values = {"train.max_train_steps": 5000, "train.checkpoint_every": 3, "validation.images": 0}
        text = server.ask("POST", "/api/draft/check", {"text": draft.json["text"], "set": values}, cookie=cookie).json
        assert text["problems"] == []
        started = server.ask("POST", "/api/run/start", {"text": text["text"]}, cookie=cookie)
        assert started.status == 200, started.body
        run = RunFolder
        wait_for(lambda: (root / "runs/long/config.yaml").exists() and len(run(root / "runs/long").steps) > 4)
        server.kill()
    before = len(RunFolder(root / "runs/long").steps)
    wait_for(lambda: len(RunFolder(root / "runs/long").steps) > before + 3, "steps without a studio")
    with studio(root) as server:
        cookie = server.cookie()
        (line,) = server.ask("GET", "/api/runs", cookie=cookie).json
        assert (line["status"], line["name"]) == ("running", "long")
        os.kill(int((root / "runs/long/.lock").read_text()), signal.SIGKILL)
        wait_for(lambda: server.ask("GET", "/api/runs", cookie=cookie).json[0]["status"] != "running")
        (line,) = server.ask("GET", "/api/runs", cookie=cookie).json
        assert line["status"] == "interrupted"
        killed_at = RunFolder(root / "runs/long").steps[-1]["step"]
        assert server.ask("POST", "/api/run/resume", {"run": "runs/long"}, cookie=cookie).status == 200
        assert server.ask("POST", "/api/run/resume", {"run": "runs/long"}, cookie=cookie).status == 400, "once"
        wait_for(lambda: RunFolder(root / "runs/long").steps[-1]["step"] > killed_at)
        assert server.ask("POST", "/api/run/delete", {"run": "runs/long"}, cookie=cookie).status == 400, "it runs"
        assert server.ask("POST", "/api/run/stop", {"run": "runs/long"}, cookie=cookie).status == 200
        wait_for(lambda: server.ask("GET", "/api/runs", cookie=cookie).json[0]["status"] == "interrupted")
        steps = [line["step"] for line in RunFolder(root / "runs/long").steps]
        assert steps == list(range(1, len(steps) + 1))
        assert server.ask("POST", "/api/run/delete", {"run": "runs/long"}, cookie=cookie).status == 200
        assert not (root / "runs/long").exists()
        assert server.ask("GET", "/api/runs", cookie=cookie).json == []


def test_ten_thousand_pairs_are_a_wall_that_scrolls(tmp_path):
    """What can be seen is all that exists; it is there at once."""
    root = tmp_path / "many/data"
    for folder in ("training_images", "control_images"):
        (root / folder).mkdir(parents=True)
    for kind, colour in (("training_images", "navy"), ("control_images", "skyblue")):
        Image.new("RGB", (64, 48), colour).save(tmp_path / f"{kind}.png")
        for number in range(10_000):
            os.link(tmp_path / f"{kind}.png", root / kind / f"pair_{number:05d}.png")
    for number in range(10_000):
        (root / f"training_images/pair_{number:05d}.txt").write_text(f"make number {number} dark")
    with studio(root.parent) as server, browsing() as driver:
        page = Page(driver, server)
        page.until("#count", "10000 of 10000")
        for share in (0.1, 0.5, 0.93, 1.0):
            driver.execute_script("window.scrollTo(0, arguments[0] * document.body.scrollHeight)", share)
            number = int(share * 9_990)
            wait_for(lambda number=number: near(page, number), f"cards about {number}")
            assert driver.execute_script("return document.querySelectorAll('*').length") < 500
        page.write("#search", "number 4321 ")
        page.until("#count", "1 of 10000")
        page.until(".card[data-name='pair_04321']")
        page.is_clean()


def near(page: Page, number: int) -> bool:
    names = page.driver.execute_script("return [...document.querySelectorAll('.card')].map((c) => c.dataset.name)")
    return any(abs(int(name.removeprefix("pair_")) - number) < 150 for name in names)


@pytest.mark.parametrize("width", [1280, 820, 390])
def test_every_screen_fits_its_width_in_both_languages_and_themes(pairs, width, tmp_path):
    with studio(pairs) as server, browsing(width, 900) as driver:
        if width < 500:  # a window can't be that narrow, but a phone is
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True},
            )
        page = Page(driver, server)
        said = []
        for other in ("zh", "en"):
            for place in ("data", "new", "runs", "compare", "try"):
                page.go(place)
                page.until(f"nav a[href='#{place}'][aria-current]")
                page.until(".card" if place == "data" else "main > *")
                wide = driver.execute_script("return document.documentElement.scrollWidth")
                assert wide <= driver.execute_script("return document.documentElement.clientWidth"), place
                assert wide <= width + 1, f"{place} is {wide} pixels wide"
                said.append(page.until("nav").text)
            page.click("#theme")
            page.click("#language")
            wait_for(lambda other=other: driver.execute_script("return document.documentElement.lang") == other)
        assert any("数据" in text for text in said)
        assert any("Data" in text for text in said)
        assert driver.execute_script("return document.documentElement.dataset.theme") in ("dark", "light")
        page.is_clean()


def test_both_dictionaries_have_every_word():
    static = Path(__file__).parents[2] / "src/qflux/studio/static"
    english, chinese = (json.loads((static / f"{name}.json").read_text()) for name in ("en", "zh"))
    assert english.keys() == chinese.keys()
    import re

    used = set()
    for script in static.glob("*.js"):
        used |= set(re.findall(r"""\bt\("([\w.]+)"[,)]""", script.read_text()))
    assert used <= english.keys(), used - english.keys()
    for key, text in english.items():
        assert set(re.findall(r"\{(\w+)\}", text)) == set(re.findall(r"\{(\w+)\}", chinese[key])), key
