"""What a fault, a canary and a standstill mean for a device, with a clock of ours."""

from math import inf

from service.batching.health import DeviceHealth


def test_an_idle_device_is_checked_now_and_then() -> None:
    assert DeviceHealth(idle_s=30).canary_at(100) == 130


def test_after_a_fault_it_is_suspect_and_checked_at_once() -> None:
    pulse = DeviceHealth()
    pulse.fault("HIP error", 5)
    assert (pulse.state, pulse.canary_at(5)) == ("suspect", 5)
    pulse.canary(None, 6)
    assert (pulse.state, pulse.reason) == ("well", "")


def test_it_is_lost_after_three_canaries_that_failed_and_stays_so() -> None:
    pulse = DeviceHealth()
    pulse.fault("HIP error", 5)
    times = []
    for now_s in (5, 5.6, 8):
        times.append(pulse.canary_at(0))
        pulse.canary("still broken", now_s)
    assert times == [5, 5.5, 7.6]
    assert (pulse.state, pulse.reason, pulse.canary_at(0)) == ("lost", "still broken", inf)
    pulse.canary(None, 9)
    pulse.fault("another", 9)
    assert (pulse.state, pulse.reason) == ("lost", "still broken")


def test_a_canary_that_fails_on_an_idle_device_is_a_fault() -> None:
    pulse = DeviceHealth()
    pulse.canary("wrong result", 5)
    assert (pulse.state, pulse.canary_at(0)) == ("suspect", 5.5)


def test_a_computation_that_does_not_end_is_a_fault_and_then_a_loss() -> None:
    pulse = DeviceHealth(stall_s=10)
    pulse.watch(0)
    pulse.watch(10)
    assert pulse.state == "well"
    pulse.watch(11)
    assert pulse.state == "suspect"
    assert pulse.canary_at(0) < 0  # as soon as it ends
    pulse.watch(21)
    assert pulse.state == "lost"
