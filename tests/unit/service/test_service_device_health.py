"""What a fault, a canary and a standstill mean for a device, with a clock of ours."""

from math import inf

from service.batching.health import DeviceHealth


def test_an_idle_device_is_checked_now_and_then() -> None:
    assert DeviceHealth(canary_s=30).canary_at(100) == 130


def test_after_a_fault_it_is_suspect_and_checked_at_once() -> None:
    health = DeviceHealth()
    health.fault("HIP error", 5)
    assert (health.state, health.canary_at(5)) == ("suspect", 5)
    health.canary(None, 6)
    assert (health.state, health.reason) == ("well", "")


def test_it_is_lost_after_three_canaries_that_failed_and_stays_so() -> None:
    health = DeviceHealth()
    health.fault("HIP error", 5)
    times = []
    for now_s in (5, 5.6, 8):
        times.append(health.canary_at(0))
        health.canary("still broken", now_s)
    assert times == [5, 5.5, 7.6]
    assert (health.state, health.reason, health.canary_at(0)) == ("lost", "still broken", inf)
    health.canary(None, 9)
    health.fault("another", 9)
    assert (health.state, health.reason) == ("lost", "still broken")


def test_a_canary_that_fails_on_an_idle_device_is_a_fault() -> None:
    health = DeviceHealth()
    health.canary("wrong result", 5)
    assert (health.state, health.canary_at(0)) == ("suspect", 5.5)


def test_a_computation_that_does_not_end_is_a_fault_and_then_a_loss() -> None:
    health = DeviceHealth(stall_s=10)
    health.watch(0)
    health.watch(10)
    assert health.state == "well"
    health.watch(11)
    assert health.state == "suspect"
    assert health.canary_at(0) < 0  # as soon as it ends
    health.watch(21)
    assert health.state == "lost"
