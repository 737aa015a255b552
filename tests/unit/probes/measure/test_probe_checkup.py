"""The doctor inside a container: checks that hold, that fail, and that end their process."""

import pytest

from probes.core.errors import Exit
from probes.measure.probe_worker import CHECK, Job
from probes.measure.supervisor import JobResult
from probes.measure.this_machine import checks
from probes.records.facts import Check
from probes.records.schema import Done, Failed

GOOD = Check("a copy", holds=True, said="1 MiB")


def test_a_check_that_ends_its_process_is_a_failed_check() -> None:
    def run(job: Job) -> JobResult:
        assert job.probe == CHECK
        return JobResult(Failed("killed by SIGABRT", "", int(Exit.BROKEN), wedged=False), (GOOD,), 1.0)

    found = checks(run)
    assert found[0] == GOOD
    assert (found[1].holds, found[1].said) == (False, "it ended after `a copy`: killed by SIGABRT")


def test_checks_that_were_made_are_kept() -> None:
    assert checks(lambda _: JobResult(Done(), (GOOD, GOOD), 1.0)) == (GOOD, GOOD)


@pytest.mark.parametrize("records", [()])
def test_a_process_that_never_began_is_named(records: tuple[Check, ...]) -> None:
    ended = JobResult(Failed("no torch", "", int(Exit.DEVICE), wedged=False), records, 1.0)
    assert "after its start: no torch" in checks(lambda _: ended)[0].said
