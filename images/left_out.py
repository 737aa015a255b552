"""Goes into slim images as `sitecustomize`: says what was left out of them, where a program asks for that.

A slim image (`weir build --keep`) holds the files that observed runs opened. Where a program imports a module
or opens a file that was left out, this prints its name and the command that brings it back, once, on standard
error; the program gets the error that it would get for what isn't there. Standard library alone.
"""

import builtins
import contextlib
import errno
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from types import CodeType, ModuleType, TracebackType
from typing import Any

MANIFEST = "/opt/weir/left-out.txt"
_LIBRARY = re.compile(r"([^\s:]+): cannot open shared object file")


class LeftOut(ModuleNotFoundError):
    """A module that was left out of this image."""


class Manifest:
    """The files that were left out, and what brings them back."""

    def __init__(self, text: str) -> None:
        self.command, self.whole = "weir build --keep FILE --restore NAME", "weir build --undo"
        self.paths: set[str] = set()
        for line in text.split("\n"):
            kind, _, rest = line.partition(" ")
            if kind == "file":
                self.paths.add(rest.partition(" ")[2])
            elif kind == "restore":
                self.command = rest
            elif kind == "whole":
                self.whole = rest
        self.names = {path.rpartition("/")[2]: path for path in self.paths}
        self.told: set[str] = set()
        self.refused: list[str] = []  # modules that were asked for, though a program may have gone on

    def path_of(self, name: str, places: Iterable[str]) -> str | None:
        """The file of a module that was left out, and that no place before has; None for another."""
        tail, before = name.rpartition(".")[2], list[str]()
        for place in places:
            whole = _path(place)
            if whole is None:  # importlib passes over it as well
                continue
            base = f"{whole}/{tail}"
            endings = (".py", "/__init__.py", *importlib.machinery.EXTENSION_SUFFIXES)
            for path in (base + ending for ending in endings):
                if path in self.paths and not os.path.exists(path):
                    there = importlib.machinery.PathFinder.find_spec(name, before)
                    return path if there is None or there.loader is None else None
            before.append(place)
        return None

    def text(self, path: str, name: str = "") -> str:
        """What was left out, and the commands that bring it back."""
        what = f"the module {name} ({path})" if name else f"the file {path}"
        return (
            f"weir: {what} was left out of this image, since no observed run used it\n"
            f"  bring it back: {self.command} {name or path}\n"
            f"  or all of it:  {self.whole}"
        )

    def tell(self, path: str, name: str = "") -> None:
        """Print that, once for each file."""
        if path not in self.told:
            self.told.add(path)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # None, closed, or read no more
                sys.stderr.write(f"{self.text(path, name)}\n")
                sys.stderr.flush()

    def tell_of_another(self, error: ModuleNotFoundError) -> None:
        """Print a missing module that may be missing because of one that was left out.

        A finder of a program may look for a module by importing another, as setuptools does for distutils.
        """
        trace, place = error.__traceback__, ""
        while trace is not None:
            code = trace.tb_frame.f_code
            if not code.co_filename.startswith("<frozen importlib"):
                place = f" ({code.co_filename}, line {trace.tb_lineno})"
            trace = trace.tb_next
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(
                f"{type(error).__name__}: {error}{place}\n"
                f"weir: the image may lack it without {', '.join(self.refused)}: see above\n"
            )
            sys.stderr.flush()

    def explains(self, error: BaseException | None) -> bool:
        """Whether an error comes from what was left out; says so."""
        if isinstance(error, LeftOut):
            return True
        if isinstance(error, ModuleNotFoundError) and self.refused:
            self.tell_of_another(error)
            return True
        path: str | None = None
        if isinstance(error, OSError) and error.errno == errno.ENOENT and error.filename is not None:
            path = _path(error.filename)
        elif isinstance(error, (OSError, ImportError)) and (match := _LIBRARY.search(str(error))):
            path = self.names.get(match[1].rpartition("/")[2])
        if path is None or path not in self.paths:
            return False
        self.tell(path)
        return True


class Loader(importlib.abc.Loader):
    """Of a module that was left out: it is known, and can't be loaded."""

    def __init__(self, manifest: Manifest, path: str) -> None:
        self.manifest, self.path = manifest, path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Raises LeftOut."""
        raise self.refuse(spec.name)

    def get_code(self, name: str) -> CodeType:
        """Raises LeftOut: for `python3 -m`."""
        raise self.refuse(name)

    def exec_module(self, module: ModuleType) -> None:
        """Isn't reached."""

    def refuse(self, name: str) -> LeftOut:
        """The error, which was told."""
        self.manifest.tell(self.path, name)
        if name not in self.manifest.refused:
            self.manifest.refused.append(name)
        return LeftOut(self.manifest.text(self.path, name), name=name, path=self.path)


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules that were left out, before a directory without its `__init__` passes for a package."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002 - importlib's own
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module that was left out; None for all others."""
        found = self.manifest.path_of(fullname, sys.path if path is None else path)
        if found is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, Loader(self.manifest, found), origin=found)
        spec.submodule_search_locations = [os.path.dirname(found)] if found.endswith("/__init__.py") else None
        return spec


def _path(name: object) -> str | None:
    try:
        return os.path.abspath(os.fsdecode(name))  # type: ignore[arg-type]
    except (TypeError, ValueError, OSError):  # a descriptor; relative, and the current directory is gone
        return None


class Open:
    """`open`, as an object: a function would become a method of a class that has it as an attribute."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.real = manifest, io.open

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as `open`
        """Open a file; says what was left out. Raises what `open` raises."""
        try:
            return self.real(*args, **options)
        except FileNotFoundError as error:
            self.manifest.explains(error)
            raise


def install(manifest: Manifest) -> None:
    """Look at imports, at files that are opened, and at errors that nobody catches."""
    of_paths: object = importlib.machinery.PathFinder  # what is built in or frozen comes before
    at = sys.meta_path.index(of_paths) if of_paths in sys.meta_path else 0
    sys.meta_path.insert(at, Finder(manifest))
    real_hook, real_thread_hook = sys.excepthook, threading.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not manifest.explains(error):
            real_hook(kind, error, trace)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if not manifest.explains(args.exc_value):
            real_thread_hook(args)

    builtins.open = io.open = Open(manifest)
    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread


def run_hidden() -> None:
    """Run the `sitecustomize` of the distribution, in whose place Python found this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [place for place in sys.path if os.path.abspath(place) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    try:
        with open(MANIFEST, encoding="utf-8") as file:
            install(Manifest(file.read()))
    except (OSError, ValueError):  # not in a slim image, or it is damaged
        pass
    run_hidden()
