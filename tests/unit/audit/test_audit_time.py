"""Nothing that an image says makes its reading slow or large: time and memory grow no faster than the text.

Linearity is judged by a generous ratio of processor time, taken only where a text isn't quick anyway.
"""

import re
import tracemalloc
import zlib
from time import perf_counter, thread_time

import pytest
from long_texts import READERS, Reader, pairs, runs, screening

from buildtool.audit.packages import LINE_BYTES, DebPackage, conda_package, deb_packages, lines
from buildtool.image.layer import LayerIndex

pytestmark = pytest.mark.thorough

SHORT, LONG = 1 << 10, 8 << 10
QUICK_S = 0.05  # linear readers take a tenth of it for LONG, quadratic ones several times as much


def seconds(reader: Reader, text: bytes) -> float:
    begun = thread_time()
    reader.reads(text)
    return thread_time() - begun


@pytest.mark.parametrize("name", READERS)
def test_no_run_of_characters_or_words_takes_more_than_linear_time(name: str) -> None:
    reader = READERS[name]
    short = runs(reader.words, SHORT)
    for text, part in zip(runs(reader.words, LONG), short, strict=True):
        begun = perf_counter()  # the cheaper clock, and what is quick by it is quick by the other
        reader.reads(text)
        if perf_counter() - begun > QUICK_S:
            took = min(seconds(reader, text) for _ in range(3))
            basis = max(seconds(reader, part) for _ in range(3))
            assert took < max(QUICK_S, 3 * LONG / SHORT * basis), (text[:60], took, basis)


SLOW = {  # readers as they were once written, and words of their grammar
    "dpkg status": (re.compile(rb"(?m)^Package: *(.*?) *$"), b"Package: a"),
    "secrets": (re.compile(rb"token=(?P<q>['\"]?)(?P<s>[^\s'\"]{4,})(?P=q)(?=\n|$)"), b"token="),
    "Markdown": (re.compile(rb"#(?=#* *$)"), b"# "),
}


@pytest.mark.parametrize("name", SLOW)
def test_the_texts_find_readers_that_take_quadratic_time(name: str) -> None:
    pattern, word = SLOW[name]
    reader = Reader(pattern.findall, (word,))
    assert any(
        seconds(reader, long)
        > 64 * least(reader, short)  # 16 times as long: quadratic readers take 256 times
        for long, short in zip(screening(reader, 16 << 10), screening(reader, 1 << 10), strict=True)
    )


def least(reader: Reader, text: bytes) -> float:
    """What a reader takes when nothing else delays it."""
    return min(seconds(reader, text) for _ in range(5))


def test_one_line_of_15_mib_takes_little_memory() -> None:
    index = LayerIndex()
    index.captured[0] = zlib.compress(b"Package: " + b"a" * (15 << 20) + b"\nVersion: 1\n")
    tracemalloc.start()
    found = list(deb_packages(lines(index.pieces(0))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found[0].name) < LINE_BYTES
    assert peak < 2 << 20


def test_lines_are_the_same_however_their_text_is_cut() -> None:
    text = b"one\r\n\ntwo" + b"x" * 40_000 + b"\nthree"
    whole = [b"one", b"", (b"two" + b"x" * 40_000)[:LINE_BYTES], b"three"]
    for size in (1, 7, 4096, 1 << 20):
        assert list(lines(text[at : at + size] for at in range(0, len(text), size))) == whole


def test_a_package_that_a_status_file_repeats_counts_once() -> None:
    status = b"Package: a\nArchitecture: amd64\n\n" * 3 + b"Package: a\nArchitecture: i386\n"
    assert list(deb_packages(lines([status]))) == [DebPackage("a", "", "amd64"), DebPackage("a", "", "i386")]


def test_conda_records_are_read_without_parsing_what_is_not_needed() -> None:
    deep = '{"x": ' + "[" * 5000 + "]" * 5000 + ', "name": "n", "version": "1", "files": ["a", "b\\u00e9"]}'
    found = conda_package(deep)
    assert found
    assert (found.name, found.version, list(found.files)) == ("n", "1", ["a", "bé"])
    for text in ("[]", "{", '{"name": 1}', '{"name": "n", "version": "1", "files": [1]}', '{"name"', ""):
        assert conda_package(text) is None


def test_pairs_join_every_word_with_every_character() -> None:
    texts = list(pairs((b"a=", b"b:"), 64))
    assert any(text.startswith(b"a= ") for text in texts)
    assert any(text.startswith(b"a=b:a=b:") for text in texts)


def test_a_conda_file_of_very_many_members_is_not_read_to_its_end() -> None:
    """Each member takes microseconds, and a compressed layer has room for millions."""
    end = '"name": "a", "version": "1", "files": []}'
    assert conda_package("{" + '"x": 1, ' * 100 + end) is not None
    assert conda_package("{" + '"x": 1, ' * 2000 + end) is None
    assert conda_package("{" + end[:-1] + ', "x": 1' * 2000 + " and no JSON") is not None
