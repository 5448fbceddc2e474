from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest
import yaml

from qflux.config import load_config
from qflux.errors import ConfigError

MINIMAL = {"model": {"pretrained": "somewhere"}, "data": {"path": "data"}}


def problems_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(MINIMAL, overrides)
    return str(error.value)


def test_all_problems_are_reported_together_with_path_value_and_remedy():
    message = problems_of(
        "train.max_train_step=3",
        "lora.rank=-1",
        "seed=many",
        "data.processor.target_size=[500, 512]",
        "data.processor.multi_resolutions=['512by512']",
    )
    assert "5 problems" in message
    assert "train.max_train_step: unknown key; did you mean train.max_train_steps?" in message
    assert "lora.rank: -1" in message
    assert "seed: 'many'" in message
    assert "data.processor.target_size.0: 500" in message
    assert "496 and 512" in message
    assert '"512*768"' in message


def test_a_key_unlike_any_other_lists_the_known_ones():
    assert "known here: " in problems_of("lora.zzz=1")


def test_missing_values_are_named():
    with pytest.raises(ConfigError, match=r"model: missing(.|\n)*data: missing"):
        load_config({})


def test_the_documents_fragments_load_with_their_class_path_nesting():
    config = load_config(
        yaml.safe_load(
            """
            model: {pretrained: somewhere}
            data:
              init_args:
                path: data
                processor:
                  class_path: src.data.preprocess.ImageProcessor
                  init_args:
                    process_type: fixed_pixels
                    multi_resolutions: ["512*512", "640*640", 393216, "832*576"]
                    max_aspect_ratio: 3.0
                batch_size: 4
            loss:
              use_mask_loss: true
              mask_loss_fn: {foreground_weight: 2.0, background_weight: 1.0}
              normalize_by_valid_tokens: true
            """
        )
    )
    assert config.data.processor.multi_resolutions.target == [262144, 409600, 393216, 479232]
    assert config.data.batch_size == 4
    assert config.loss.use_mask_loss


@pytest.mark.parametrize("written", [{"kind": "mask"}, {"kind": "mse"}, {"kind": "mask", "use_mask_loss": True}, {}])
def test_a_mask_loss_is_switched_by_either_spelling_whatever_the_file_says(written):
    source = {**MINIMAL, "loss": written}
    assert load_config(source, ["loss.use_mask_loss=true"]).loss.kind == "mask"
    assert load_config(source, ["loss.use_mask_loss=false"]).loss.kind == "mse"
    assert not load_config(source, ["loss.kind=mse"]).loss.use_mask_loss
    assert load_config(source, ["loss.kind=mask"]).loss.use_mask_loss


def test_a_class_that_qflux_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="MyProcessor"):
        load_config({**MINIMAL, "data": {"path": "d", "processor": {"class_path": "x.MyProcessor"}}})


def test_a_key_both_inside_and_outside_init_args_is_refused():
    with pytest.raises(ConfigError, match=r"data\.path: set both"):
        load_config({**MINIMAL, "data": {"path": "d", "init_args": {"path": "e"}}})


def test_the_higher_of_two_size_settings_wins_and_says_so(caplog):
    load_config(MINIMAL, ["data.processor.target_size=[512, 512]", "data.processor.target_pixels=262144"])
    assert "target_size is set, so target_pixels is not used" in caplog.text


def test_an_empty_list_of_candidates_switches_multi_resolution_off():
    assert load_config(MINIMAL, ["data.processor.multi_resolutions=[]"]).data.processor.multi_resolutions is None


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001"])
def test_a_learning_rate_is_a_number_however_it_is_written(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {{pretrained: x}}\ndata: {{path: d}}\noptimizer: {{init_args: {{lr: {text}}}}}\n")
    assert load_config(file).optimizer.init_args["lr"] == 1e-4
    assert load_config(MINIMAL, [f"optimizer.init_args.lr={text}"]).optimizer.init_args["lr"] == 1e-4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonsense", "path.to.key=value"),
        ("=3", "path.to.key=value"),
        ("seed.deeper=1", "seed is a value"),
        ("seed=[", "YAML"),
    ],
)
def test_malformed_overrides_are_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config({**MINIMAL, "seed": 1}, [override])


@pytest.mark.parametrize("content", ["- a\n- b\n", "just text", "a: [1\n", ""])
def test_a_file_that_is_no_config_is_named(tmp_path, content):
    file = tmp_path / "broken.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_config(file)
    with pytest.raises(ConfigError, match="no config file"):
        load_config(tmp_path / "absent.yaml")


def test_the_effective_config_can_be_loaded_again():
    config = load_config(MINIMAL, ["data.processor.multi_resolutions={target: ['512*512'], controls: [[65536]]}"])
    assert load_config(config.dump()) == config


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model: {pretrained: x}\ndata:\n  path: d\n  path: e\n")
    with pytest.raises(ConfigError, match="'path' stands twice"):
        load_config(file)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lr_warmup_steps=4", "constant_with_warmup"),
        ("run_name=..", "run_name"),
        ("run_name=cache", "choose another name"),
        ("loss.timesteps.mean=.inf", "loss.timesteps.mean: inf"),
        ("train.guidance=.nan", "train.guidance: nan"),
        ("seed=99999999999999999999999", "seed: 99999999999999999999999"),
        ("data.processor.multi_resolutions={target: [65536], controls: [[]]}", "controls.0"),
        ("train.interval=3", "train.interval: unknown key"),
    ],
)
def test_values_that_would_mislead_later_are_refused_now(override, message):
    assert message in problems_of(override)


def test_an_empty_section_is_its_defaults():
    assert load_config({**MINIMAL, "train": None}) == load_config(MINIMAL)


def test_a_home_folder_is_expanded():
    assert "~" not in str(load_config(MINIMAL, ["output_dir=~/runs"]).output_dir)


def test_init_args_that_are_no_mapping_are_reported_with_everything_else():
    with pytest.raises(ConfigError, match=r"2 problems(.|\n)*init_args(.|\n)*data: give either path"):
        load_config({"model": {"pretrained": "x"}, "data": {"init_args": [1]}})


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join(['*' + before] * 20)}]}}\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
HOSTILE = {
    "references within references": (BOMB, "more than 100,000 values"),
    "references within lists of a mapping": (
        f"data: {{path: x}}\nmodel: {{pretrained: x}}\n{BOMB}",
        "more than 100,000",
    ),
    "itself": ("a: &a [*a]", "more than 100,000 values"),
    "merges within merges": (MERGES, "not valid YAML"),
    "no boolean": ("seed: !!bool maybe", "not valid YAML"),
    "no time": ("seed: !!timestamp x", "not valid YAML"),
    "no number": ("seed: !!int x", "not valid YAML"),
    "a megabyte": ("a: " + "x" * 5_000_000, "a config has a few thousand"),
    "python": ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_a_short_error_and_costs_neither_time_nor_memory(name, tmp_path):
    text, message = HOSTILE[name]
    (tmp_path / "x.yaml").write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=message) as error:
            load_config(tmp_path / "x.yaml")
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 2000


def test_twenty_thousand_brackets_are_an_error_and_no_crash(tmp_path):
    (tmp_path / "x.yaml").write_text("[" * 20_000)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "x.yaml")


@pytest.mark.slow
def test_forty_thousand_keys_are_counted_and_a_few_are_shown(tmp_path, monkeypatch):
    looked = []
    import difflib

    matches = difflib.get_close_matches
    monkeypatch.setattr(
        "qflux.config.reader.difflib.get_close_matches", lambda *a, **k: looked.append(1) or matches(*a, **k)
    )
    (tmp_path / "x.yaml").write_text("".join(f"key{number}: 1\n" for number in range(40_000)))
    with pytest.raises(ConfigError, match=r"\(400\d\d problems\)") as error:
        load_config(tmp_path / "x.yaml")
    assert len(str(error.value)) < 5000
    assert len(looked) <= 100, "each unknown key is compared with the known ones"


@pytest.mark.parametrize(
    "value", ["'" + "x" * 100_000 + "'", "[" + "1," * 30_000 + "1]", "{a: {b: {c: {d: [" + "1," * 999 + "1]}}}}"]
)
@pytest.mark.parametrize("key", ["seed", "model.dtype", "data.processor.target_size", "data.sources", "optimizer"])
def test_a_value_of_any_length_is_shown_in_a_few_words(key, value):
    with pytest.raises(ConfigError) as error:
        load_config(MINIMAL, [f"{key}={value}"])
    assert all(len(line) < 500 for line in str(error.value).splitlines())


def test_check_reads_the_config_before_anything_heavy_is_imported(tmp_path):
    (tmp_path / "x.yaml").write_text("nothing: right\n")
    program = (
        "import sys\nfrom qflux.cli import main\n"
        f"try:\n    main(['check', {str(tmp_path / 'x.yaml')!r}])\nexcept SystemExit as ended:\n"
        "    sys.exit(99 if 'torch' in sys.modules or 'diffusers' in sys.modules else ended.code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "nothing: unknown key" in done.stderr


def test_an_empty_list_of_candidates_is_told(caplog):
    load_config(MINIMAL, ["data.processor.multi_resolutions=[]"])
    assert "multi_resolutions is an empty list" in caplog.text


def test_no_limit_on_aspect_ratios_is_none():
    assert load_config(MINIMAL, ["data.processor.max_aspect_ratio=null"]).data.processor.max_aspect_ratio is None


def test_fp8_weights_and_compilation_are_refused_together():
    assert "model.quantization: fp8 and train.compile" in problems_of("model.quantization=fp8", "train.compile=true")


def test_an_unknown_key_without_a_value_is_unknown_all_the_same():
    with pytest.raises(ConfigError, match="trainy"):
        load_config({"model": {"pretrained": "x"}, "data": {"path": "x"}, "trainy": None})
    assert load_config({"model": {"pretrained": "x"}, "data": {"path": "x"}, "train": None}).train.num_epochs == 1
