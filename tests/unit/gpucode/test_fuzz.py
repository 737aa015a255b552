"""Damaged files end in a typed refusal or a result that passes every check; never in anything else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import GpuCodeError, Source
from buildtool.gpucode.target import parse_targets
from gpucode.mangle import mangled, seeds, structured, survives

pytestmark = pytest.mark.thorough

SEEDS = seeds()


def test_sound_seeds_are_pruned_and_verified() -> None:
    assert all(survives(seed) for seed in SEEDS)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, len(SEEDS) - 1), st.integers(0, 1 << 32), st.booleans())
def test_mangled_file_is_refused_or_verified(seed: int, number: int, strict: bool) -> None:
    survives(mangled(SEEDS[seed], random.Random(number)), parse_targets("gfx906"), strict=strict)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from([seed[:64] for seed in SEEDS]), st.binary(max_size=600))
def test_any_bytes_behind_a_believable_start_are_scanned_or_refused(start: bytes, rest: bytes) -> None:
    data = start + rest
    try:
        found = scan_file(Source.of_bytes(data))
    except GpuCodeError:
        return
    assert found.total() <= len(data)


def test_every_header_word_can_be_odd() -> None:
    cases = [case for seed in SEEDS[:3] for case in structured(seed)]
    assert len(cases) >= 60
    assert not all(survives(case) for case in cases)
