from __future__ import annotations

from PIL import Image

from qflux.demo.run import DemoProgress, demo_config, run_demo


def test_the_demo_runs_the_whole_path_and_can_be_run_again(tmp_path):
    seen: set[str] = set()
    progress = DemoProgress(lambda stage, done, total, note: seen.add(stage))
    summary = run_demo(demo_config(tmp_path / "demo", ["train.max_train_steps=6"]), progress)
    assert seen == {"cache", "fit", "predict"}
    assert summary.samples == 24
    assert len(summary.sizes) >= 5
    assert 0.05 < summary.padding_avoided < 0.6
    assert summary.tokens > 0
    for file in summary.files:
        assert file.is_file()
        if file.suffix == ".png":
            assert min(Image.open(file).size) > 200
    again = run_demo(demo_config(tmp_path / "demo", ["train.max_train_steps=6"]), progress)
    assert again.last_loss == summary.last_loss


def test_the_default_demo_learns(tmp_path):
    summary = run_demo(demo_config(tmp_path / "demo"), DemoProgress(lambda *_: None))
    assert summary.last_loss < 0.9 * summary.first_loss
