"""GPU code that a process loaded: it is recognised in a library, and the rest can be cut."""

import ctypes
import gc
import hashlib
import json
import random
import tracemalloc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from buildtool.gpucode import loaded
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.loaded import Watch, functions_of, key_of
from buildtool.gpucode.lz4 import unpack_block
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets
from buildtool.gpucode.used import Used, machine_code
from buildtool.gpucode.verify import verify_prune
from buildtool.keep.keep_list import KeepList, is_line
from buildtool.observe.runs import loaded_code
from gpucode.cutting import CUBIN, PTX, carried_out, cubin, cuda, fatbin, lz4_block

NOISE = random.Random(1).randbytes(9000)
ONE, TWO = cubin("_Z3onev", stuff=b"1"), cubin("_Z3twov", n_bytes=9000, stuff=NOISE)
JIT = b".version 8.0 .entry _Z5threev".ljust(9000, b" ")


def cut(data: bytes, used: Used) -> bytes:
    source, targets = Source.of_bytes(data), parse_targets("sm_90")
    plan = plan_prune(source, targets, strict=False, used=used)
    out = carried_out(plan, data)
    if plan.changed:
        verify_prune(source, Source.of_bytes(out), targets, used)
        again = plan_prune(Source.of_bytes(out), targets, strict=False, used=used)
        assert not again.changed
    return out


def keys(data: bytes) -> set[str]:
    return {key_of(code) for code in machine_code(Source.of_bytes(data))}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_runs_loaded_stays_and_the_rest_goes(elsewhere: bool) -> None:
    code = [fatbin((CUBIN, 90, ONE)), fatbin((CUBIN, 90, TWO), (PTX, 75, JIT)), fatbin((PTX, 75, JIT))]
    data = cuda([fatbin((CUBIN, 90, ONE))], data=b"".join(code)) if elsewhere else cuda(code)
    assert keys(data) == {key_of(ONE), key_of(TWO)}
    patched = ONE[:24] + b"driver" + ONE[30:]  # the bytes that a driver hands out may be others
    used = Used.of({key_of(patched)}, keys(data))
    out = cut(data, used)
    assert keys(out) == {key_of(ONE)}
    assert JIT not in out
    assert len(out) == len(data) if elsewhere else len(out) < len(data)


def test_code_that_cannot_be_read_stays_where_something_loaded_was_not_found() -> None:
    data = cuda([fatbin((CUBIN, 90, TWO)), fatbin((PTX, 75, JIT))])
    out = cut(data, Used.of({key_of(ONE)}, keys(data)))
    assert keys(out) == set()
    assert JIT in out


def test_sections_that_share_a_long_name_take_no_more_memory_than_their_file() -> None:
    long = cubin("a" * (1 << 16))
    table = int.from_bytes(long[40:48], "little")
    rows = long[table : table + 128] + long[table + 128 :] * 1000
    shared = long[:60] + (1002).to_bytes(2, "little") + long[62:table] + rows
    assert [len(name) for name, _ in functions_of(long)] == [1 << 16]
    tracemalloc.start()
    try:
        assert key_of(shared) == hashlib.sha256(shared).hexdigest()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_code_that_unpacks_without_bound_is_not_read() -> None:
    data = cuda([fatbin((CUBIN, 90, ONE)), fatbin((CUBIN, 90, TWO + bytes(1 << 24)))])
    assert keys(data) == {key_of(ONE)}


@pytest.mark.parametrize("lz4", [False, True])
def test_machine_code_of_very_many_bytes_is_not_read(monkeypatch: pytest.MonkeyPatch, lz4: bool) -> None:
    monkeypatch.setattr("buildtool.gpucode.used._MOST_BYTES", len(TWO) - 1)
    data = cuda([fatbin((CUBIN, 90, ONE)), fatbin((CUBIN, 90, TWO), lz4=lz4)])
    assert keys(data) == {key_of(ONE)}


def test_machine_code_in_lz4_blocks_is_recognised_and_cut() -> None:
    data = cuda([fatbin((CUBIN, 90, ONE), lz4=True), fatbin((CUBIN, 90, TWO), lz4=True)])
    assert keys(data) == {key_of(ONE), key_of(TWO)}
    assert keys(cut(data, Used.of({key_of(ONE)}, keys(data)))) == {key_of(ONE)}


def test_damaged_lz4_blocks_never_unpack_to_another_length() -> None:
    block = lz4_block(ONE)
    for place in range(0, len(block), 7):
        for value in range(0, 256, 5):
            damaged = block[:place] + bytes([value]) + block[place + 1 :]
            with suppress(ValueError):  # damage to literals can't be noticed
                assert len(unpack_block(damaged, len(ONE))) == len(ONE)
    for end in range(len(block)):
        with pytest.raises(ValueError, match=r"cut off|past the end|bytes, not"):
            unpack_block(block[:end], len(ONE))
    for n_bytes in (0, len(ONE) - 1, len(ONE) + 1):
        with pytest.raises(ValueError, match=r"impossible|past the end|bytes, not"):
            unpack_block(block, n_bytes)


TEMPLATE = b"text\0nvjet_sm%d_%s_%dx%d_%c\0"
MADE = "nvjet_sm90_tst_8x64_64x16_4x1_v_bz_bias_TNN"


@pytest.mark.parametrize(
    ("n_functions", "names", "made"),
    [
        (1, [MADE], True),
        (2, [MADE, MADE], False),
        (4, [MADE], False),
        (1, ["nvjet_sm"], False),
        (1, [f"_Z{MADE}v"], False),
        (1, [f"{MADE}<int>"], False),
        (0, [], False),
    ],
)
def test_code_that_a_library_made_as_it_ran_is_known_by_its_name(
    tmp_path: Path, n_functions: int, names: list[str], made: bool
) -> None:
    lines = tmp_path / "lines"
    row = {"key": "0" * 64, "functions": n_functions, "such_as": names}
    lines.write_text(json.dumps({"by": "cupti"}) + "\n" + json.dumps(row) + "\n")
    (line,) = loaded_code(lines, print)
    assert line == f"{'generated-' if made else ''}gpu-code:{'0' * 64}"
    assert is_line(line)


@pytest.mark.parametrize("makes_code", [False, True])
def test_made_code_needs_no_file_and_what_may_be_its_source_stays_where_it_was_made(makes_code: bool) -> None:
    made = cubin(MADE)
    code = [fatbin((CUBIN, 90, ONE)), fatbin((CUBIN, 90, TWO)), fatbin((PTX, 75, JIT))]
    data = cuda(code, rodata=b"constants " * 99 + TEMPLATE * makes_code)
    lines = {f"gpu-code:{key_of(ONE)}", f"generated-gpu-code:{key_of(made)}"}
    keep = KeepList(frozenset(lines))
    used = Used.of(keep.gpu_code, keys(data), keep.generated_code)
    assert (used.is_all, keep.modules) == (True, ())
    out = cut(data, used)
    assert keys(out) == {key_of(ONE)}
    assert (JIT in out) is makes_code
    assert not Used.of(keep.gpu_code | keep.generated_code, keys(data)).is_all


def test_code_with_such_a_name_that_a_library_holds_stays_there() -> None:
    made = cubin(MADE, n_bytes=9000, stuff=NOISE)
    data = cuda([fatbin((CUBIN, 90, made)), fatbin((CUBIN, 90, TWO))])
    assert keys(cut(data, Used.of((), keys(data), {key_of(made)}))) == {key_of(made)}


@pytest.mark.parametrize(
    "code", [b"", b"\x7fELF\x02\x01\x01", ONE[:100], ONE[:60] + b"\xff\xff\xff\xff" + ONE[64:], TWO[:-1]]
)
def test_damaged_cubins_have_keys_of_their_own(code: bytes) -> None:
    assert key_of(code) not in {key_of(ONE), key_of(TWO)} or functions_of(code)


def test_what_cupti_tells_is_written_once_for_each_module(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.touch()
    watch = Watch(str(lines))
    for code in (ONE, TWO, ONE):
        place = ctypes.create_string_buffer(code, len(code))
        module = loaded._Module(7, len(code), ctypes.addressof(place))
        about = loaded._Resource(1, 0, ctypes.addressof(module))
        for event in (5, 6):  # the driver is ready, a module was loaded
            watch._callback(None, 3, event, ctypes.addressof(about))
    module = loaded._Module(8, 0, None)
    about = loaded._Resource(1, 0, ctypes.addressof(module))
    for _ in range(2):
        watch._callback(None, 3, 6, ctypes.addressof(about))
    *rows, fault = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["key"] for row in rows] == [key_of(ONE), key_of(TWO)]
    assert [row["bytes"] for row in rows] == [len(ONE), len(TWO)]
    assert "without its code" in fault["error"]


@pytest.mark.thorough
def test_what_cupti_calls_stays_when_garbage_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callback had no owner, and was freed while torch was imported: no module was told of."""
    callbacks, at_end = [], []

    class Cupti:
        """As libcupti does, it keeps an address alone."""

        def __init__(self, _path: str) -> None:
            self.cuptiEnableCallback = lambda *_: 0
            self.cuptiUnsubscribe = lambda _subscriber: at_end.append("unsubscribed")

        def cuptiSubscribe(self, _subscriber: object, callback: object, _data: object) -> int:
            callbacks.append(weakref.ref(callback))
            return 0

    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(loaded.atexit, "register", lambda *words: registered.append(words))
    monkeypatch.setattr(loaded.ctypes, "CDLL", Cupti)
    monkeypatch.setenv(loaded.FILE, str(tmp_path / "lines"))
    monkeypatch.setattr(loaded.os.path, "exists", lambda _path: False)  # /dev/kfd
    (tmp_path / "lines").touch()
    loaded.start()
    gc.collect()
    assert [callback() is not None for callback in callbacks] == [True]
    for function, *given in registered:
        function(*given)
    assert at_end == ["unsubscribed"]


@pytest.mark.thorough
def test_code_objects_in_rocrs_list_are_read_from_files_and_from_memory(tmp_path: Path) -> None:
    library, lines = tmp_path / "librocblas.so", tmp_path / "lines"
    library.write_bytes(b"host " + ONE + b" host")
    lines.touch()
    place = ctypes.create_string_buffer(TWO, len(TWO))
    names = [
        f"file://{library}#offset=5&size={len(ONE)}",
        f"memory://77#offset={ctypes.addressof(place):#x}&size={len(TWO)}",
        "of another kind",
    ]
    objects = [loaded._Object(0, name.encode()) for name in names]
    for each, following in zip(objects, [*objects[1:], objects[0]], strict=True):  # a list without an end
        each.next = ctypes.addressof(following)
    Watch(str(lines)).objects(loaded._Objects(9, ctypes.addressof(objects[0])))
    rows = [json.loads(line)["key"] for line in lines.read_text().splitlines()]
    assert rows == [key_of(ONE), key_of(TWO)]
