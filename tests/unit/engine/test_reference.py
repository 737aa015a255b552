"""Names of images are taken apart as engines do it: no result gets a name that nobody asked for."""

import pytest

from buildtool.core.errors import ConfigError
from buildtool.engine.reference import Reference, parse_new_name, parse_reference


@pytest.mark.parametrize(
    ("text", "repository", "tag", "digest"),
    [
        ("name", "name", None, None),
        ("name:1", "name", "1", None),
        ("localhost:5000/x", "localhost:5000/x", None, None),
        ("localhost:5000/x:y", "localhost:5000/x", "y", None),
        ("[::1]:5000/x", "[::1]:5000/x", None, None),
        ("ghcr.io/a/b__c/d-e:V1.2-x_", "ghcr.io/a/b__c/d-e", "V1.2-x_", None),
        (f"a/b:t@sha256:{'0' * 64}", "a/b", "t", f"sha256:{'0' * 64}"),
        ("HOST/x", "HOST/x", None, None),
    ],
)
def test_a_port_is_no_tag_and_a_name_without_tag_is_a_repository(
    text: str, repository: str, tag: str | None, digest: str | None
) -> None:
    assert parse_reference(text) == Reference(repository, tag, digest)
    assert str(parse_reference(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", ":", ":tag", "a:", "a:b:c", "A", "a/B", "a//b", "/a", "a/", "-a", "a:-b", "a b", "a\n", "a:b\n",
        "a@", "a@sha256:00", "a@b", "a:" + "t" * 129, "n" * 256, "0" * 64, "sha256:" + "0" * 64, "$(x)",
        "a:b/c:d:e", "ä", "a" * 100_000 + "-", "-" * 100_000,
    ],
)  # fmt: skip
def test_what_no_image_can_be_called_is_refused_before_any_work(text: str) -> None:
    with pytest.raises(ConfigError, match="no image can be called"):
        parse_reference(text)


def test_a_refused_name_shows_no_escape_sequence() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_reference("\x1b[2Ja")
    assert "\x1b" not in str(caught.value)


def test_a_new_name_gets_the_default_tag_and_can_have_no_digest() -> None:
    assert str(parse_new_name("name")) == "name:latest"
    assert str(parse_new_name("localhost:5000/x")) == "localhost:5000/x:latest"
    with pytest.raises(ConfigError, match="digest"):
        parse_new_name(f"name@sha256:{'0' * 64}")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("x", "docker.io/library/x:latest"),
        ("a/x:1", "docker.io/a/x:1"),
        ("localhost/x", "localhost/x:latest"),
        ("q.io/x", "q.io/x:latest"),
        ("docker.io/x", "docker.io/library/x:latest"),
    ],
)
def test_all_ways_to_write_a_name_are_one_name(text: str, same: str) -> None:
    assert parse_reference(text).canonical == parse_reference(same).canonical == same
