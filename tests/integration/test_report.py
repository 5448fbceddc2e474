"""The report of a run, as a browser shows it: whatever state the run is in, and whatever its data hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from qflux.cli import main
from qflux.commands import Trainer
from qflux.errors import DataError
from qflux.files.locks import exclusive
from qflux.pictures.axis import Axis, ticks
from qflux.report.page import write_report
from qflux.runs.folder import RunFolder
from qflux.runs.metrics import StepReport

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
HOSTILE = '<script>document.title="broken"</script><img src="http://example.org/x.png" onerror="alert(1)"> "&\''


@pytest.fixture(scope="module")
def runs(tmp_path_factory, checkpoint, data_set):
    """Two finished runs, and one that was killed in the middle; their prompts try to break out of the page."""
    from conftest import make_config

    folder = tmp_path_factory.mktemp("report")
    data = folder / "data"
    shutil.copytree(data_set, data)
    for text in (data / "training_images").glob("*.txt"):
        text.write_text(HOSTILE)
    made = {}
    for name, rate in (("first", 0.003), ("second", 0.01), ("killed", 0.003)):
        config = make_config(
            checkpoint,
            data,
            folder / "cache",
            folder,
            f"run_name={name}",
            f"optimizer.init_args={{lr: {rate}}}",
            "train.max_train_steps=9",
            "train.checkpoint_every=3",
            "data.held_out={count: 3}",
            "validation.images=3",
            "validation.num_inference_steps=2",
            "model.max_sequence_length=128",
        )
        trainer = Trainer(config)
        trainer.cache()

        def stop(report: StepReport, name=name) -> None:
            if name == "killed" and report.step == 7:
                raise MemoryError("as if killed")

        try:
            trainer.fit(stop)
        except MemoryError:
            with (config.run_dir / "metrics.jsonl").open("a") as file:
                file.write('{"step": 8, "loss": 0.')  # torn
            (config.run_dir / "report.html").unlink()
        made[name] = config.run_dir
    return made


@pytest.fixture(scope="module")
def browser():
    if not BROWSER or not DRIVER:
        pytest.skip("needs chromium and chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-quic",
        "--window-size=1200,1400",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def opened(browser, file: Path) -> None:
    """Open a page; nothing may be said on the console, and nothing requested but the file itself."""
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(file.resolve().as_uri())
    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith("data:")] == [file.resolve().as_uri()]


def sections(browser) -> list[str]:
    return [heading.text for heading in browser.find_elements("css selector", "section h2")]


@pytest.mark.slow
def test_a_finished_run_has_a_report_that_renders_and_whose_sliders_move(runs, browser):
    opened(browser, runs["first"] / "report.html")
    assert sections(browser)[:3] == ["Edits", "Summary", "Loss"], "edits come first, then curves"
    assert {"Speed and memory", "Data", "Configuration", "Environment"} <= set(sections(browser))
    summary = browser.find_element("id", "summary").text
    for expected in (
        "finished",
        "last step 20",
        "pytorch_lora_weights.safetensors",
        "rank 4 (lora)",
        "learning rate 0.00",
    ):
        assert expected in summary
    assert len(browser.find_elements("css selector", "polyline")) >= 6
    compares = browser.find_elements("css selector", ".compare")
    assert len(compares) == 3
    frames = browser.find_elements("css selector", ".frame")
    cuts = "return [...document.querySelectorAll('.frame')].map((f) => getComputedStyle(f).getPropertyValue('--cut'))"
    assert browser.execute_script(cuts) == ["0%"] * 3, "at first all of the output is seen"
    drag = """
        const box = arguments[0].getBoundingClientRect();
        const at = (share, kind, buttons) => arguments[0].dispatchEvent(new PointerEvent(kind, {
            clientX: box.left + share * box.width, clientY: box.top + 5, buttons, pointerId: 1, bubbles: true }));
        arguments[0].setPointerCapture = () => {};
        at(0.2, "pointerdown", 1); at(0.75, "pointermove", 1); at(0.1, "pointermove", 0);
    """
    browser.execute_script(drag, frames[1])
    moved = browser.execute_script(cuts)
    assert len(set(moved)) == 1, "one moves all"
    assert 74 < float(moved[0].removesuffix("%")) < 76
    frames[0].send_keys("\ue011")  # Home
    assert browser.execute_script(cuts) == ["0%"] * 3
    time = browser.find_element("css selector", ".time")
    assert time.get_attribute("max") == "3"
    browser.execute_script("arguments[0].value = 0; arguments[0].dispatchEvent(new Event('input'))", time)
    assert browser.find_element("css selector", ".timeline .step").text == "after step 0"
    shown = [layer for layer in browser.find_elements("css selector", ".after") if layer.is_displayed()]
    assert [layer.get_attribute("data-step") for layer in shown] == ["0"] * 3
    assert all(
        browser.execute_script("return arguments[0].naturalWidth", image) > 0
        for image in browser.find_elements("css selector", "img")
    )


@pytest.mark.slow
def test_the_value_under_the_mouse_is_shown(runs, browser):
    opened(browser, runs["first"] / "report.html")
    hover = """
        const svg = document.querySelector("svg[data-values]"), box = svg.getBoundingClientRect();
        svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 0.98 * box.width }));
        return svg.parentElement.querySelector(".tip").textContent;
    """
    said = browser.execute_script(hover)
    steps = [json.loads(line) for line in (runs["first"] / "metrics.jsonl").read_text().splitlines()]
    assert said.startswith(f"step {steps[-1]['step']}training loss: ")
    assert float(said.rpartition(" ")[2]) == pytest.approx(steps[-1]["loss"], rel=1e-3)


@pytest.mark.slow
def test_further_controls_and_masks_are_shown(tmp_path, browser):
    import yaml
    from PIL import Image

    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"family": "flux-kontext"}))
    folder = tmp_path / "samples" / "step-00000000"
    kinds = ("control", "control 2", "mask", "output", "wanted")
    for kind in kinds:
        (tmp_path / "samples" / kind).mkdir(parents=True)
        Image.new("RGB", (32, 32), "teal").save(tmp_path / "samples" / kind / "a.png")
    folder.mkdir()
    described = {"name": "a", "prompt": "p"} | {kind: f"../{kind}/a.png" for kind in kinds}
    (folder / "edits.json").write_text(json.dumps({"edits": [described]}))
    opened(browser, write_report([tmp_path], tmp_path / "report.html"))
    captions = [found.text for found in browser.find_elements("css selector", "#edits figcaption")]
    assert captions == ["output after step 0", "control", "control 2", "mask", "wanted"]


def test_runs_are_compared_on_one_kind_of_axis(tmp_path):
    import re

    for name, losses in (("far", [3.0, 0.01]), ("near", [0.03, 0.02])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("family: flux-kontext\n")
        lines = [{"step": n, "loss": x, "loss_by_level": [x] * 4} for n, x in enumerate(losses, start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report([tmp_path / "far", tmp_path / "near"], tmp_path / "c.html").read_text()
    charts = re.findall(r'<svg[^>]*aria-label="(Loss by noise level[^"]*)"[^>]*>(.*?)</svg>', page)
    assert len(charts) == 2
    marks = [re.findall(r'<text[^>]*text-anchor="end">([^<]*)<', body) for _, body in charts]
    assert marks[0] == marks[1]


@pytest.mark.slow
def test_prompts_with_markup_and_scripts_appear_as_text(runs, browser):
    opened(browser, runs["first"] / "report.html")
    assert browser.title == "first – qflux"
    assert HOSTILE in browser.find_element("css selector", ".edits article p").text
    assert len(browser.find_elements("css selector", "script")) == 1
    assert not browser.find_elements("css selector", "img[onerror]")


@pytest.mark.slow
def test_a_killed_run_has_a_report_too(runs, browser):
    output = write_report([runs["killed"]], runs["killed"] / "report.html")
    opened(browser, output)
    text = browser.find_element("id", "summary").text
    assert "interrupted" in text
    assert "of 9" in text
    assert browser.find_elements("css selector", ".compare")


@pytest.mark.slow
def test_two_runs_are_compared_side_by_side(runs, browser, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs["first"]), str(runs["second"]), "--output", str(tmp_path / "both.html")])
    assert not ended.value.code
    opened(browser, tmp_path / "both.html")
    assert browser.title == "first and second – qflux"
    assert sections(browser)[0] == "What differs"
    differences = browser.find_element("css selector", "#what-differs table").text
    assert "optimizer.init_args.lr 0.003 0.01" in differences
    assert len(browser.find_elements("css selector", "#edits .beside h3")) == 2


@pytest.mark.slow
def test_a_running_run_is_said_to_run(runs, tmp_path, browser):
    copy = tmp_path / "running"
    shutil.copytree(runs["killed"], copy)
    with exclusive(copy):
        assert RunFolder(copy).status == "running"
        opened(browser, write_report([copy], tmp_path / "r.html"))
    assert RunFolder(copy).status == "interrupted", "the lock's file stays, with the number of a process that lives"


@pytest.mark.slow
def test_a_folder_with_next_to_nothing_still_has_a_report(tmp_path, browser):
    (tmp_path / "config.yaml").write_text("family: flux-kontext\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": "nan"}\nnonsense\n[1]\n')
    (tmp_path / "samples" / "step-00000000").mkdir(parents=True)
    (tmp_path / "samples" / "step-00000000" / "edits.json").write_text(
        json.dumps({"edits": [{"name": "x", "prompt": "y", "output": "../../../../etc/passwd"}]})
    )
    Image.new("RGB", (8, 8)).save(tmp_path.parent / "outside.png")
    opened(browser, write_report([tmp_path], tmp_path / "report.html"))
    assert RunFolder(tmp_path).edits == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.jsonl", '{"step": 1, "total_steps": 2, "loss": "nan", "tokens": "inf", "padding_avoided": null}'),
        ("metrics.jsonl", '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n{"step": 3, "loss": 5e-324}'),
        ("metrics.jsonl", '{"step": 1, "loss": ' + "9" * 400 + "}"),
        ("ledger.jsonl", '{"kind": "sample", "images": [5]}\n{"kind": "skipped"}\n' + "[" * 20_000),
        ("ledger.jsonl", '{"kind": "step", "step": 1, "epoch": 0, "samples": [{}]}'),
        ("warnings.jsonl", '{"text": "file \\udcff.png <b>"}'),
        ("samples/step-00000001/edits.json", '{"edits": [5, {"name": "a\\ud800"}]}'),
        ("config.yaml", "["),
        (".lock", "9" * 30),
        ("validation.jsonl", '{"step": 0, "held_out_loss": 1.5}\n{"step": 5, "held_out_loss": "nan"}'),
    ],
    ids=lambda value: value[:30],
)
def test_damage_costs_no_report(tmp_path, file, text):
    (tmp_path / "config.yaml").write_text("family: flux-kontext\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "Summary" in page
    if file == "validation.jsonl":
        assert "1.5000 → NaN" in page
    if file == "warnings.jsonl":
        assert "&lt;b&gt;" in page


def test_runs_of_the_same_name_are_told_apart_and_spikes_are_drawn(tmp_path):
    for parent in ("a", "b"):
        folder = tmp_path / parent / "run"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("family: flux-kontext\n")
        lines = [{"step": n, "loss": 100.0 if n == 500 else 1.0} for n in range(1, 1001)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report([tmp_path / "a/run", tmp_path / "b/run"], tmp_path / "r.html").read_text()
    assert str(tmp_path / "a/run") in page
    assert ">100</text>" in page


def test_what_is_no_run_is_said_to_be_none(tmp_path, capsys):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="no run"):
            RunFolder(path)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 2
    assert "config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "logarithmic"),
    [([6.0, 0.3, 0.1], True), ([1e-7, 3.0], True), ([0.5, 0.3], False), ([6.0, 0.0], False), ([0.2], False)],
)
def test_a_loss_that_falls_far_is_drawn_on_a_logarithmic_axis(values, logarithmic):
    axis = Axis.for_loss(values)
    assert axis.logarithmic == logarithmic
    places = [axis.share(value) for value in sorted(values)]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= 1
    assert 2 <= len(axis.marks) <= 12
    assert all(0 <= axis.share(mark) <= 1 for mark in axis.marks)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (3, 3), (-2, 5), (0, 1e-9), (0, 87_654_321), (0.1, 0.1)])
def test_ticks_are_few_round_and_cover_the_range(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert found[0] <= low
    assert found[-1] >= high
    assert found == sorted(set(found))
