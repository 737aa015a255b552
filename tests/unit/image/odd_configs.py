"""Configs that a strict reader refuses and engines load: the text of each, and what our note says of it."""

from collections.abc import Callable

from image_maker import Image, Members, docker_legacy, file, tar

Change = Callable[[bytes], bytes]
LAYER = tar(file("etc/one", b"1" * 900))


def with_history(row: bytes) -> Change:
    return lambda config: config.replace(b'"history": [', b'"history": [' + row, 1)


def with_key(text: bytes) -> Change:
    return lambda config: b"{" + text + b", " + config[1:]


ODD: dict[str, tuple[Change, str]] = {
    "a key given twice": (with_key(b'"author": "a", "author": "b"'), "has the key 'author' twice"),
    "70 levels": (with_key(b'"x": ' + b"[" * 70 + b"]" * 70), "nested more than 64 levels"),
    "Latin-1": (with_key(b'"author": "Andr\xe9"'), "isn't UTF-8"),
    "an integer of 5,000 digits": (with_key(b'"x": ' + b"9" * 5000), ""),
    "a history row that is null": (with_history(b"null, "), "a row of its history is null"),
    "fields in another letter case": (
        lambda config: config.replace(b'"rootfs"', b'"RootFS"').replace(b'"diff_ids"', b'"Diff_IDs"'),
        "it spells `rootfs` as 'RootFS'",
    ),
    "leading white space": (lambda config: b" \n\t" * 300 + config, ""),
}


def odd_archive(change: Change, *, config_name: str = "") -> Members:
    """What `docker save` wrote before Docker 25, with a changed config, named by its digest or otherwise."""
    image = _Odd(layers=[LAYER], change=change)
    members = docker_legacy(image)
    if not config_name:
        return members
    old = next(
        path for path in members if path.endswith(".json") and "/" not in path and path != "manifest.json"
    )
    listed = members["manifest.json"].replace(old.encode(), config_name.encode())
    content = members.pop(old)
    return members | {"manifest.json": listed, config_name: content}


class _Odd(Image):
    def __init__(self, layers: list[bytes], change: Change) -> None:
        super().__init__(layers, ref="t-docs/odd:1")
        self._change = change

    def config(self) -> bytes:
        return self._change(super().config())
