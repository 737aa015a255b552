"""The service's settings become one checked value, or a message with the file and the key."""

import asyncio
import sys
from pathlib import Path

import pytest
from service import server
from service import settings as subject
from service.cli import main, read_profile
from service.errors import ModelUnreadable, ServiceError, SettingsError
from service.listen import parse_listen
from service.models import names_in
from service.settings import Hub, Limits, Placement, build_settings, profile_path, quota_cpus

SOURCE = Path("profiles/application-x.yaml")
SHIPPED = Path(subject.__file__).parents[1] / "profiles"


def test_defaults_are_the_cpu_profile_on_port_8000() -> None:
    path = profile_path({})
    settings = build_settings({}, read_profile(path), path)
    assert (settings.profile, settings.device) == ("experiment1", "cpu")
    assert (settings.host, settings.port, settings.weights) == ("0.0.0.0", 8000, "auto")
    assert settings.limits == Limits()
    assert settings.threads is None


@pytest.mark.parametrize(("name", "device"), [("experiment1", "cpu"), ("experiment2", "rocm")])
def test_the_shipped_profiles_select_their_device(name: str, device: str) -> None:
    path = profile_path({"APP_PROFILE": name})
    assert path.parent == SHIPPED
    assert build_settings({}, read_profile(path), path).device == device


def test_the_environment_wins_over_the_profile() -> None:
    env = {
        "WEIR_DEVICE": "cuda",
        "WEIR_MODEL_DIR": "/m",
        "WEIR_LISTEN": "127.0.0.1:9",
        "WEIR_WEIGHTS": "mounted",
    }
    settings = build_settings(env, {"device": "cpu"}, SOURCE)
    assert (settings.device, settings.model_dir, settings.port) == ("cuda", Path("/m"), 9)
    assert settings.weights == "mounted"


def test_empty_variables_are_as_good_as_none() -> None:
    env = dict.fromkeys(
        ("APP_PROFILE", "WEIR_DEVICE", "WEIR_LISTEN", "WEIR_WEIGHTS", "WEIR_PROFILES_DIR"), ""
    )
    assert profile_path(env).name == "application-experiment1.yaml"
    assert build_settings(env, {"device": "cpu"}, SOURCE).device == "cpu"


def test_a_profiles_numbers_replace_the_limits() -> None:
    settings = build_settings({}, {"device": "cpu", "max_texts": 4, "threads": 2}, SOURCE)
    assert (settings.limits.max_texts, settings.threads) == (4, 2)


PLACED = {"device": "rocm", "placement": "auto", "machine": "wx4100"}


def test_a_profile_places_the_weights_within_a_budget() -> None:
    assert build_settings({}, {"device": "cpu"}, SOURCE).placement is None
    assert build_settings({}, PLACED, SOURCE).placement == Placement("wx4100")
    sized = build_settings({}, PLACED | {"vram_budget": "1.5 GiB"}, SOURCE).placement
    assert sized == Placement("wx4100", 3 << 29)


def test_grpc_listens_where_the_environment_says_so() -> None:
    assert build_settings({"WEIR_GRPC_LISTEN": ""}, {"device": "cpu"}, SOURCE).grpc is None
    env = {"WEIR_GRPC_LISTEN": "0.0.0.0:8001"}
    assert build_settings(env, {"device": "cpu"}, SOURCE).grpc == ("0.0.0.0", 8001)
    with pytest.raises(SettingsError, match="WEIR_GRPC_LISTEN '8001' is not host:port"):
        build_settings({"WEIR_GRPC_LISTEN": "8001"}, {"device": "cpu"}, SOURCE)


def test_an_image_without_grpc_says_which_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "service.api.grpc_endpoint", raising=False)
    wanted = build_settings({"WEIR_GRPC_LISTEN": "127.0.0.1:1"}, {"device": "cpu"}, SOURCE)
    with pytest.raises(ServiceError, match="WEIR_GRPC_LISTEN is set, but grpc isn't installed") as caught:
        asyncio.run(server._start_grpc(server.make_service(wanted), wanted))
    assert "cpu-extras" in caught.value.hint


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_profile_names_a_model_of_a_hub_at_one_commit() -> None:
    profile: dict[str, object] = {"device": "cpu", "model": {"hub": "ProsusAI/finbert", "revision": COMMIT}}
    assert build_settings({}, profile, SOURCE).hub == Hub("ProsusAI/finbert", COMMIT)
    profile["model"] = {"hub": "a/b", "revision": COMMIT, "max_size": "8 GB"}
    assert build_settings({}, profile, SOURCE).hub == Hub("a/b", COMMIT, 8 * 10**9)
    assert build_settings({}, {"device": "cpu"}, SOURCE).hub is None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"hub": "a/b", "revision": "main"}, "revision 'main' is no commit: a branch or a tag can be moved"),
        ({"hub": "a/b", "revision": "v1.0"}, "is no commit"),
        ({"hub": "a/b", "revision": COMMIT.upper()}, "is no commit"),
        ({"hub": "a/b", "revision": COMMIT + "\n"}, "is no commit"),
        ({"hub": "a/b", "revision": 1234567890123456789012345678901234567890}, "a number to YAML"),
        ({"hub": "a/b"}, "model is"),
        ({"hub": "a/b", "max_size": "8 GB"}, "model is"),
        ({"hub": "a/b", "revision": COMMIT, "max_size": 8}, "max_size is 8"),
        ({"hub": "a/b", "revision": COMMIT, "max_size": "-1 GB"}, "max_size is '-1 GB'"),
        ({"hub": "a/b", "revision": COMMIT, "max_size": "nan GB"}, "max_size is 'nan GB'"),
        ({"hub": "../b", "revision": COMMIT}, "hub is"),
        ({"hub": "https://h/a/b", "revision": COMMIT}, "hub is"),
        ({"hub": "b", "revision": COMMIT}, "hub is"),
        ("a/b", "model is 'a/b'"),
    ],
)
def test_a_model_of_a_hub_that_is_not_pinned_is_refused(model: object, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        build_settings({}, {"device": "cpu", "model": model}, SOURCE)
    assert caught.value.hint


def test_a_model_of_a_hub_and_a_mounted_one_are_one_too_many(tmp_path: Path) -> None:
    profile = {"device": "cpu", "model": {"hub": "a/b", "revision": COMMIT}}
    with pytest.raises(SettingsError, match="says mounted"):
        build_settings({"WEIR_WEIGHTS": "mounted"}, profile, SOURCE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert names_in(tmp_path, hub=True) == ("finbert", "other")
    assert names_in(tmp_path / "absent", hub=True) == ("finbert",)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelUnreadable, match="the profile names one of a hub"):
        names_in(tmp_path, hub=True)


def test_a_profile_chooses_precision_and_control() -> None:
    profile = {"device": "cpu", "dtype": "bfloat16", "compile": True, "model_control": True}
    settings = build_settings({}, profile, SOURCE)
    assert (settings.dtype, settings.compile, settings.model_control) == ("bfloat16", True, True)


def test_a_profile_decides_about_captured_passes_and_their_memory() -> None:
    settings = build_settings({}, {"device": "cpu"}, SOURCE)
    assert (settings.capture, settings.capture_bytes) == (None, 512_000_000)
    profile = {"device": "cuda", "capture": False, "capture_vram": "2 GB"}
    settings = build_settings({}, profile, SOURCE)
    assert (settings.capture, settings.capture_bytes) == (False, 2_000_000_000)
    with pytest.raises(SettingsError, match="capture_vram is 5"):
        build_settings({}, {"device": "cuda", "capture_vram": 5}, SOURCE)


@pytest.mark.parametrize(
    ("env", "profile", "said"),
    [
        ({}, {"devise": "cpu"}, r"application-x\.yaml: unknown key 'devise'"),
        ({}, {}, "device is None"),
        ({}, {"device": False}, "device is False"),  # YAML's `device: no`
        ({}, {"device": "cpu", "max_texts": "4"}, "max_texts is '4'"),
        ({}, {"device": "cpu", "max_texts": True}, "max_texts is True"),
        ({}, {"device": "cpu", "max_texts": 0}, "max_texts is 0"),
        ({}, {"device": "cpu", "max_tokens": 513}, "max_tokens is 513"),
        ({}, {"device": "cpu", "placement": "some"}, "placement is 'some'"),
        ({}, {"device": "cpu", "placement": "auto"}, "machine is None"),
        ({}, {"device": "cpu", "vram_budget": "2 GB"}, "need a placement"),
        ({}, {"device": "cpu", "placement": "auto", "machine": "x", "compile": True}, "can't be compiled"),
        ({}, PLACED | {"vram_budget": "2 TB"}, "vram_budget is '2 TB'"),
        ({}, PLACED | {"vram_budget": 2}, "vram_budget is 2"),
        ({}, PLACED | {"vram_budget": "-1 GB"}, "vram_budget is '-1 GB'"),
        ({}, PLACED | {"vram_budget": "nan GB"}, "vram_budget is 'nan GB'"),
        ({}, {"device": "cpu", "dtype": "float64"}, "dtype is 'float64'"),
        ({}, {"device": "cpu", "dtype": True}, "dtype is True"),
        ({}, {"device": "cpu", "compile": "yes"}, "compile is 'yes'"),
        ({}, {"device": "cpu", "model_control": 1}, "model_control is 1"),
        ({"WEIR_WEIGHTS": "some"}, {"device": "cpu"}, "WEIR_WEIGHTS 'some'"),
        ({"WEIR_LISTEN": "8000"}, {"device": "cpu"}, "WEIR_LISTEN '8000'"),
    ],
)
def test_a_wrong_value_names_its_place(env: dict[str, str], profile: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        build_settings(env, profile, SOURCE)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["../experiment1", "a/b", "a b", "é/", "."])
def test_a_profiles_name_can_not_leave_the_directory(name: str) -> None:
    with pytest.raises(SettingsError, match="APP_PROFILE"):
        profile_path({"APP_PROFILE": name})


@pytest.mark.parametrize("text", ["", ":80", "h:", "h:0", "h:65536", "h:x", "h:-1", "h:²", "h:" + 5000 * "9"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_listen(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device: cpu\ndevice: rocm\n", r"duplicate key 'device'.* line 2"),
        ("device: [cpu\n", "no valid YAML"),
        ("device:\tcpu\n\t- x", "no valid YAML"),
        ("? [a, b]\n: 1\n", "no valid YAML|unknown key"),
        ("", "must hold keys"),
        ("- cpu\n", "must hold keys"),
        ("[" * 600, "no valid YAML"),  # too deep for Python
        ("device: !!python/object:os.system cpu\n", "no valid YAML"),
        ("device: 2020-13-45\n", "no valid YAML"),
        ("threads: 0x_\n", "no valid YAML"),
        ("device: !!timestamp x\n", "no valid YAML"),
    ],
)
def test_a_profile_that_is_no_flat_yaml_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "application-x.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        read_profile(path)


def test_a_missing_profile_lists_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"no profile application-experiment9\.yaml") as caught:
        read_profile(SHIPPED / "application-experiment9.yaml")
    assert "experiment1, experiment2" in caught.value.hint


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--port=1", 2), ("serve", 2)])
def test_help_or_a_wrong_argument_starts_no_service(
    capsys: pytest.CaptureFixture[str], argument: str, code: int
) -> None:
    with pytest.raises(SystemExit) as caught:
        main({}, [argument])
    assert caught.value.code == code
    said = capsys.readouterr()
    assert "usage: python3 -m service" in said.out + said.err


def test_a_wrong_setting_ends_the_program_with_2_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main({"APP_PROFILE": "experiment9"}) == 2
    assert capsys.readouterr().err.startswith("error: no profile application-experiment9.yaml")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("", None),
        ("1 0", None),
    ],
)
def test_a_cgroups_quota_becomes_whole_cpus(text: str, cpus: int | None) -> None:
    assert quota_cpus(text) == cpus
