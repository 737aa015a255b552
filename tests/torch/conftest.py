"""Tests that need torch, on the CPU. Triton's kernels run in its interpreter."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: before anything imports one
# threads of torch wait for each other by spinning: beside other groups that is most of a processor's time
os.environ.setdefault("OMP_NUM_THREADS", "1")

# as for tests/unit: the same examples in each run, and none fails because a busy machine is slow
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed tensors are kept apart from those of this account and of other runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIR_STATE", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="module")
def nothing_old_to_collect() -> None:
    """Placement collects garbage when memory runs out, which looks through whatever other tests have left
    and what torch has imported meanwhile.
    """
    gc.collect()
    gc.freeze()
