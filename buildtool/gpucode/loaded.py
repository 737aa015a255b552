"""Which GPU code a process loads: runs inside it, as its `sitecustomize`, with the standard library alone.

NVIDIA: CUPTI tells of each module (cupti_callbacks.h of CUDA 13: CUPTI_CBID_RESOURCE_MODULE_LOADED), with its
machine code. Modules are loaded lazily as ever. AMD, which was never tried: the list that ROCr keeps for
debuggers (`_amdgpu_r_debug`, of the form of <link.h>'s r_debug), read when the process ends. A line of JSON
for each is added to the file that WEIR_GPU_CODE names.
"""

import atexit
import ctypes
import glob
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import struct
import sys

FILE = "WEIR_GPU_CODE"  # the variable that names the file for the lines
_MOST_CODE = 1 << 32  # bytes of one module
_RESOURCE, _MODULE_LOADED = 3, 6  # CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_MODULE_LOADED
_TEXT = b".text."  # sections of a cubin's functions: one each, with its name
_URI = re.compile(r"(file|memory)://([^#]*)#offset=(0x[0-9a-f]+|\d+)&size=(0x[0-9a-f]+|\d+)")
_MOST_OBJECTS = 1 << 16


def key_of(code: bytes) -> str:
    """What GPU code is recognised by: the SHA-256 of its functions' names and lengths, else of all its bytes.

    A driver may hand out a cubin with other addresses than a library has; the functions are the same.
    """
    functions = functions_of(code)
    text = b"".join(b"%s %d\n" % function for function in sorted(functions))
    return hashlib.sha256(text or code).hexdigest()


def functions_of(code: bytes) -> "list[tuple[bytes, int]]":
    """A cubin's functions, by its sections: names and bytes of machine code; none for anything else."""
    try:
        start, entry, count, names_at = struct.unpack_from("<Q10xHHH", code, 40)
        rows = [
            struct.unpack_from("<II16xQQ", code, start + entry * index)
            for index in range(min(count, (len(code) - start) // max(entry, 1)))
        ]
        _, _, names_start, names_bytes = rows[names_at]
    except (struct.error, IndexError):
        return []
    names = code[names_start : names_start + names_bytes]
    functions, room = [], len(names)
    for name, kind, _, n_bytes in rows:
        if kind == 1 and names.startswith(_TEXT, name):
            function = names[name + len(_TEXT) : names.find(b"\0", name)]
            room -= len(function)
            if room < 0:  # functions' names differ; 65,000 sections that share one of 16 MiB are planted
                return []
            functions.append((function, n_bytes))
    return functions


class _Resource(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("descriptor", ctypes.c_void_p))


class _Module(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("n_bytes", ctypes.c_size_t), ("code", ctypes.c_void_p))


class _Object(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
    )


class _Objects(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("first", ctypes.c_void_p))


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class Watch:
    """Writes what is loaded to a file, each once for each process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: set[str] = set()
        self._without_code = False  # whether a module came without, and that was said
        self._callback = _Callback(self._told)  # CUPTI holds its address alone: see `cupti`

    def say(self, **row: object) -> None:
        """Add a line."""
        line = json.dumps({"pid": os.getpid(), **row}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line.encode())  # as one: other processes write there, too
        finally:
            os.close(descriptor)

    def loaded(self, code: bytes) -> None:
        """Code that was loaded."""
        digest = hashlib.sha256(code).hexdigest()
        if digest not in self._seen:
            self._seen.add(digest)
            names = sorted(name.decode("utf-8", "replace")[:200] for name, _ in functions_of(code))
            self.say(
                key=key_of(code), digest=digest, bytes=len(code), functions=len(names), such_as=names[:3]
            )

    def cupti(self) -> None:
        """Have CUPTI tell of modules until this process ends. Raises OSError where it doesn't."""
        library = ctypes.CDLL(cupti_path())
        subscriber = ctypes.c_void_p()
        code = library.cuptiSubscribe(ctypes.byref(subscriber), self._callback, None)
        code = code or library.cuptiEnableCallback(
            ctypes.c_uint32(1), subscriber, ctypes.c_int(_RESOURCE), ctypes.c_uint32(_MODULE_LOADED)
        )
        if code:
            raise OSError(f"CUPTI says {code} (CUptiResult)")
        # what is to be called until then holds this object, and so the callback, which CUPTI doesn't
        atexit.register(lambda _watch: library.cuptiUnsubscribe(subscriber), self)
        self.say(by="cupti")

    def _told(self, _data: object, domain: int, event: int, about: int) -> None:
        if domain == _RESOURCE and event == _MODULE_LOADED:
            place = _Resource.from_address(about).descriptor
            module = _Module.from_address(place) if place else None
            if module and module.code and 0 < module.n_bytes < _MOST_CODE:
                self.loaded(ctypes.string_at(module.code, module.n_bytes))
            elif not self._without_code:
                self._without_code = True
                self.say(error="CUPTI told of a module without its code")

    def rocr(self) -> None:
        """Look at ROCr's list when this process ends, if it has loaded that by then."""
        self.say(by="rocr")
        atexit.register(self._rocr_at_end)

    def _rocr_at_end(self) -> None:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            places = {line.split(None, 5)[5].rstrip("\n") for line in maps if "libhsa-runtime64" in line}
        for place in places:
            self.objects(_Objects.in_dll(ctypes.CDLL(place), "_amdgpu_r_debug"))

    def objects(self, listed: _Objects) -> None:
        """The code objects of a list of ROCr's."""
        place, left = listed.first, _MOST_OBJECTS
        while place and left:
            each, left = _Object.from_address(place), left - 1
            if match := _URI.fullmatch((each.name or b"").decode("utf-8", "replace")):
                kind, path, start, n_bytes = match[1], match[2], int(match[3], 0), int(match[4], 0)
                self.loaded(
                    ctypes.string_at(start, n_bytes) if kind == "memory" else _part(path, start, n_bytes)
                )
            place = each.next


def _part(path: str, start: int, n_bytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(n_bytes)


def cupti_path() -> str:
    """The CUPTI that a torch of this process would load: of its packages, else where the loader looks."""
    for place in sys.path:
        for pattern in ("cu1*/lib/libcupti.so.1*", "cuda_cupti/lib/libcupti.so.1*"):
            paths = sorted(glob.glob(os.path.join(glob.escape(place), "nvidia", pattern)))
            if paths:
                return paths[-1]
    return "libcupti.so"


def start() -> None:
    """Watch this process, if the variable names a file; say so, or why not."""
    path = os.environ.get(FILE)
    if not path:
        return
    watch = Watch(path)
    try:
        if os.path.exists("/dev/kfd"):
            watch.rocr()
        else:
            watch.cupti()
    except (OSError, AttributeError) as error:  # no such library, or not such a one
        watch.say(error=str(error)[:300])


def run_hidden() -> None:
    """Run the `sitecustomize` in whose place Python found this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [place for place in sys.path if os.path.abspath(place) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    start()
    run_hidden()
