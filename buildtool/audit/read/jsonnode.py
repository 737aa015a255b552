"""A JSON object read with the types that documents of images have; what doesn't fit is named by its key."""

from collections.abc import Mapping, Sequence
from functools import cached_property, reduce

from buildtool.audit.tar.faults import MalformedDocument
from buildtool.jsontext import Json, folded, merged, spellings


class Node:
    """Reads a JSON object with the types we need; raises a MalformedDocument that names the key.

    Engines don't look at the letter case of a field's name. A name in another case is refused, unless there
    is `spelled`, which then gets it by the right name.
    """

    def __init__(self, value: Json, place: str, spelled: dict[str, str] | None = None) -> None:
        if not isinstance(value, Mapping):
            raise MalformedDocument("a JSON object is missing", place=place)
        self._value = value
        self._spelled = spelled
        self.place = place

    @cached_property
    def _spellings(self) -> Mapping[str, list[str]]:
        return spellings(self._value)

    def _get(self, key: str) -> Json:
        names = self._spellings.get(folded(key), [])
        for name in names:
            if name != key and self._spelled is None:
                raise MalformedDocument(
                    f"`{key}` is spelled {name[:40]!r}, which engines take for it", place=self.place
                )
            if name != key and self._spelled is not None:
                self._spelled.setdefault(key, name)
        return reduce(merged, (self._value[name] for name in names)) if names else None

    def refuse_two_spellings(self) -> None:
        """Raises MalformedDocument where a field is there twice, in different cases: readers differ then."""
        for names in self._spellings.values():
            if len(names) > 1:
                raise MalformedDocument(f"{names[0][:40]!r} is spelled in two ways", place=self.place)

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._get(key) is not None

    def child(self, key: str) -> "Node":
        """The object at a key, an empty one where there is none."""
        return Node(self._get(key) or {}, f"{self.place}, `{key}`", self._spelled)

    def names(self, key: str) -> bool:
        """Whether the key is there, be it with null."""
        self._get(key)
        return key in self._value

    def items_or_null(self, key: str) -> "tuple[Node | None, ...]":
        """The objects of a list, None for each null in it."""
        rows = enumerate(self._list(key))
        return tuple(None if row is None else self._item(row, key, at) for at, row in rows)

    def items(self, key: str) -> tuple["Node", ...]:
        """The objects of a list."""
        return tuple(self._item(row, key, at) for at, row in enumerate(self._list(key)))

    def _item(self, row: Json, key: str, at: int) -> "Node":
        return Node(row, f"{self.place}, `{key}[{at}]`", self._spelled)

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of a list."""
        return tuple(row if isinstance(row, str) else self._wrong(key) for row in self._list(key))

    def text(self, key: str, default: str | None = None) -> str:
        """The text at a key; `default`, if there is one, where the key has no value."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        return value if isinstance(value, str) else self._wrong(key)

    def flag(self, key: str) -> bool:
        """Whether the value is true."""
        return self._get(key) is True

    def count(self, key: str) -> int:
        """A number of bytes."""
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
            raise MalformedDocument(f"`{key}` is not a size", place=self.place)
        return value

    def string_map(self) -> Mapping[str, str]:
        """The members whose values are texts."""
        return {key: value for key, value in self._value.items() if isinstance(value, str)}

    def _list(self, key: str) -> Sequence[Json]:
        value = self._get(key)
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise MalformedDocument(f"`{key}` is not a list", place=self.place)
        return value

    def _wrong(self, key: str) -> str:
        raise MalformedDocument(f"`{key}` is missing or not text", place=self.place)
