"""Ranks that agree on the step at which all stop, in every order in which they can get there."""

import os
import pwd
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from probes.training.guard import Guard, StopAgreement
from probes.training.worker import main


class Shared:
    """torch's store, within one process. What is there stays."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values.setdefault(key, value.encode())

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str, /) -> bytes:
        return self.values[key]


def rank(number: int, world: int, store: Shared) -> tuple[Guard, StopAgreement]:
    guard = Guard(number, world, 60.0, lambda *_: None)
    return guard, StopAgreement(guard, store)


@pytest.mark.parametrize("seed", range(40))
def test_all_ranks_stop_after_the_same_step_whoever_was_asked_and_when(seed: int) -> None:
    drawn, store = random.Random(seed), Shared()
    world = drawn.choice((2, 3, 5))
    ranks = [rank(at, world, store) for at in range(world)]
    store.values["every"] = str(drawn.choice((1, 2, 7, 64))).encode()  # steps between two looks
    asked = {drawn.randrange(world): drawn.randrange(1, 40) for _ in range(drawn.choice((1, world)))}
    stopped: dict[int, int] = {}
    for step in range(1, 200):
        # an exchange in each step: no rank begins the next one before all have ended this one
        for at in drawn.sample(range(world), world):
            guard, agreement = ranks[at]
            guard.asked |= step >= asked.get(at, 1000)
            if agreement.here(step):
                stopped[at] = step
        if stopped:
            break
    assert len(stopped) == world
    assert len(set(stopped.values())) == 1


def test_a_rank_alone_stops_at_once() -> None:
    guard, agreement = rank(0, 1, Shared())
    assert not agreement.here(1)
    guard.asked = True
    assert agreement.here(2)


def test_a_rank_that_gives_up_says_where_the_others_are() -> None:
    store = Shared()
    guard, _ = rank(0, 3, store)
    guard.store, guard.phase = store, "the exchange of gradients"
    store.set("stuck/1", "compute of step 4")
    store.set("stuck/2", "the exchange of gradients of step 4")
    assert guard._others() == "; rank 1 is in compute of step 4"


def test_a_rank_says_where_it_is_when_another_gives_up_though_its_own_time_is_not_over() -> None:
    store = Shared()
    guard, _ = rank(1, 2, store)
    guard.store, guard.phase, guard.step = store, "compute", 7
    store.set("stuck", "0")
    guard._answer()
    assert store.values["stuck/1"] == b"compute of step 7"


def test_a_folder_that_cannot_be_written_into_is_refused_before_anything_is_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["m:f", "--data", "m:d", "--out", "/dev/null/x"]) == 5
    told = "error: rank 0: /dev/null/x can't be written into; choose another folder: --out DIR\n"
    assert capsys.readouterr().err == told


def test_a_lock_of_another_user_is_named_with_its_owner_and_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with TemporaryDirectory() as folder:  # not pytest's, which is closed to others
        lock = Path(folder, ".rank-0.lock")
        lock.touch()
        Path(folder).chmod(0o777)
        owner, name = os.geteuid(), pwd.getpwuid(os.geteuid()).pw_name
        if owner:  # nobody else to be: a file that even its owner can't write, seen by another
            lock.chmod(0o444)
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        else:
            os.seteuid(65534)
        try:
            assert main(["bert-base", "--out", folder]) == 5
        finally:
            if not owner:
                os.seteuid(owner)
        assert [path.name for path in Path(folder).iterdir()] == [lock.name]
    assert capsys.readouterr().err == (
        f"error: rank 0: can't lock {lock}: Permission denied; it belongs to user {name}, whose run in this "
        f"folder may not be over\n  choose another folder: --out DIR; or, once that run is over: rm {lock}\n"
    )


def test_a_lock_of_a_user_without_a_name_is_named_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("probes.core.files.lock_of_process", refused)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    (tmp_path / ".rank-0.lock").touch()
    assert main(["bert-base", "--out", str(tmp_path)]) == 5
    assert f"it belongs to user {os.getuid()}, whose run" in capsys.readouterr().err
