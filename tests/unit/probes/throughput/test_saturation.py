"""Whether a server is saturated, by tables of levels whose answer is known; and whether two scans agree."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_served_statistics import BY, SETTINGS, level

from probes.core.unknown import Unknown
from probes.reports.saturation import agreement, between, condition_findings, knee_finding
from probes.throughput.served.plan import announcement, planned
from probes.throughput.served.results import (
    ClientSide,
    Conditions,
    Count,
    Level,
    ProgramUse,
    ServedScan,
    Window,
)
from probes.throughput.served.saturation import growth, judge, scatter

CLEAR = ((1, 100), (2, 190), (4, 240), (8, 242), (16, 239))
QUIET = Conditions(2, 1.8, 0.3, 1.5, "its processes here", 0.0, 0.0, ())


def measured(callers: int, per_s: float, apart: float = 0.01) -> Level:
    """A level whose three windows are `apart` from each other, relative to their mean."""
    rates = [round(1000 * per_s * (1 + apart * turn)) for turn in (-1, 0, 1)]
    made = level(callers, per_s)
    windows = tuple(Window(1000.0, rate, rate, 0.01) for rate in rates)
    return replace(made, windows=windows, seconds=3000.0, answered=sum(rates), conditions=QUIET)


def scan(levels: Sequence[Level], *, same_machine: bool = True) -> ServedScan:
    by = replace(BY, same_machine=same_machine)
    return ServedScan(by, SETTINGS, tuple(levels), "more callers than 4 don't raise throughput")


def table(rates: Sequence[tuple[int, float]], apart: float = 0.01) -> list[Level]:
    return [measured(callers, per_s, apart) for callers, per_s in rates]


def changed(levels: list[Level], at: int, **fields: object) -> list[Level]:
    return [
        replace(one, **fields) if place == at else one  # type: ignore[arg-type]
        for place, one in enumerate(levels)
    ]


def busy(cpus: float, stolen: float = 0.0) -> Conditions:
    return replace(QUIET, other_cpus=cpus, stolen_cpus=stolen, others=(ProgramUse("make", cpus),))


def test_a_throughput_that_no_longer_grows_is_saturated_from_where_it_stops() -> None:
    found = judge(scan(table(CLEAR)))
    assert (found.answer, found.callers) == ("yes", 4)
    assert found.sentence.startswith("Saturated: yes, from 4 callers on: 240.0 ± ")
    assert "up to 16 callers get at most 3% more (95 % interval)." in found.sentence


def test_one_caller_may_saturate_a_server_and_more_may_slow_it_down() -> None:
    found = judge(scan(table(((1, 100), (2, 99), (4, 80)))))
    assert (found.answer, found.callers) == ("yes", 1)


def test_a_throughput_that_still_rises_is_not_saturated() -> None:
    found = judge(replace(scan(table(CLEAR[:3])), settings=replace(SETTINGS, most_callers=4)))
    assert (found.answer, found.callers) == ("no", 4)
    assert found.sentence.startswith(
        "Saturated: no: throughput still rises at 4 callers, by 26% over 2 (95 %"
    )
    assert "the most that --most-callers allows" in found.sentence


def test_figures_that_scatter_decide_nothing_though_their_means_look_flat() -> None:
    found = judge(scan(table(CLEAR, apart=0.2)))
    assert found.answer == "can't tell"
    assert "the figures scatter: from 8 to 16 callers throughput changed by -" in found.sentence


def test_figures_that_scatter_decide_nothing_though_their_means_rise() -> None:
    assert judge(scan(table(((1, 100), (2, 110), (4, 125)), apart=0.2))).answer == "can't tell"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_levels_decide_nothing(count: int) -> None:
    found = judge(scan(table(CLEAR[:count])))
    assert found.answer == "can't tell"
    assert ("3 levels are needed" in found.sentence) == bool(count)


def test_a_plateau_of_one_more_level_is_too_short() -> None:
    found = judge(scan(table(CLEAR[:4])))
    assert found.answer == "can't tell"
    assert "throughput stopped rising at 4 callers, and only 8 were tried beyond" in found.sentence


def test_a_client_that_is_busy_all_the_time_is_not_the_server() -> None:
    bound = ClientSide(1.0, 0.0, 0.0, 0, "the client was busy 100% of the time")
    found = judge(scan(changed(table(CLEAR), 3, client=bound)))
    assert found.answer == "can't tell"
    assert "the client may have been the limit: at 8 callers the client was busy 100%" in found.sentence
    before = judge(scan(changed(table(CLEAR), 0, client=bound)))
    assert before.answer == "yes"  # a level that the answer doesn't rest on


def test_errors_at_the_highest_levels_are_no_saturation() -> None:
    failing = (Count("status 500", 100),)
    found = judge(scan(changed(table(CLEAR), 4, failed=failing)))
    assert found.answer == "can't tell"
    assert "at 16 callers 12% of requests failed: status 500 100" in found.sentence
    rising = judge(scan(changed(table(CLEAR[:3]), 2, failed=failing)))
    assert rising.answer == "can't tell"
    one = judge(scan(changed(table(CLEAR), 4, failed=(Count("status 500", 1),))))
    assert one.answer == "yes"


def test_refusals_are_how_a_saturated_server_answers() -> None:
    found = judge(scan(changed(table(CLEAR), 4, refused=1000)))
    assert found.answer == "yes"
    assert "it refused" in found.sentence


def test_a_level_without_a_good_answer_decides_nothing() -> None:
    dead = replace(level(32, 0), failed=(Count("connection refused", 9),))
    found = judge(scan([*table(CLEAR), dead]))
    assert found.sentence == (
        "Saturated: can't tell: with 32 callers at once no answer was good: connection refused 9."
    )


def test_other_programs_on_the_servers_machine_spoil_a_yes() -> None:
    levels = changed(table(CLEAR), 4, conditions=busy(1.3))
    found = judge(scan(levels))
    assert found.answer == "can't tell"
    assert found.sentence == (
        "Saturated: can't tell: throughput stops rising at 4 callers, but other programs used up to 1.3 of 2 "
        "CPUs: end them and repeat."
    )
    assert judge(scan(levels, same_machine=False)).answer == "yes"
    assert judge(scan(changed(table(CLEAR), 4, conditions=busy(0.1)))).answer == "yes"
    stolen = judge(scan(changed(table(CLEAR), 4, conditions=busy(0.0, stolen=0.5))))
    assert "the hypervisor withheld up to 0.5 of 2 CPUs" in stolen.sentence


def test_a_rise_while_other_programs_end_is_no_rise() -> None:
    rising = table(CLEAR[:3])
    found = judge(scan(changed(rising, 1, conditions=busy(1.5))))
    assert found.answer == "can't tell"
    assert "other programs used 1.5 CPUs while 2 callers asked, and 0.0 while 4 callers did" in found.sentence
    always = judge(scan([replace(one, conditions=busy(1.5)) for one in rising]))
    assert always.answer == "no"
    assert always.sentence.endswith("were tried; meanwhile other programs used up to 1.5 of 2 CPUs.")


@pytest.mark.thorough
def test_no_table_of_levels_ends_in_a_traceback() -> None:
    """A report may come from anywhere: figures of 0, of any size, and lists of no length."""
    rng = random.Random(1)
    odd = (0, 1, 3, 10**29)
    for _ in range(300):
        levels = [
            replace(
                measured(callers, 1.0),
                answered=rng.choice(odd),
                seconds=rng.choice((1e-12, 1.0, 1e29)),
                windows=tuple(
                    Window(rng.choice((1e-12, 1.0)), 1, rng.choice(odd), None)
                    for _ in range(rng.randint(0, 5))
                ),
                failed=(Count("x", rng.choice(odd)),),
                conditions=rng.choice((Unknown("none"), replace(busy(1e29), cpus=0), busy(-1.0))),
            )
            for callers in (1, 2, 4, 10**9)[: rng.randint(0, 4)]
        ]
        made = scan(levels)
        told = [judge(made).sentence, *condition_findings(made), knee_finding(made, judge(made))]
        assert all(told + agreement(made, scan(levels[:3])))


def test_a_sentence_of_the_answer_is_of_the_levels_and_not_of_the_file() -> None:
    kept = replace(scan(table(CLEAR)), saturated=judge(scan(table(CLEAR[:3]))))
    assert judge(kept).answer == "yes"


def test_an_interval_of_a_growth_covers_the_true_one_about_as_often_as_it_says() -> None:
    rng, hits = random.Random(7), 0
    for _ in range(400):
        levels = [_noisy(rng, callers, 100.0) for callers in (1, 2, 4)]
        apart = scatter(levels)
        assert not isinstance(apart, Unknown)
        found = growth(levels[0], levels[2], apart)
        hits += found.low <= 1.0 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def _noisy(rng: random.Random, callers: int, per_s: float, deviation: float = 0.05) -> Level:
    rates = [round(1000 * rng.gauss(per_s, deviation * per_s)) for _ in range(3)]
    windows = tuple(Window(1000.0, rate, rate, 0.01) for rate in rates)
    made = replace(level(callers, 1), windows=windows, seconds=3000.0, answered=sum(rates))
    return replace(made, conditions=QUIET)


@pytest.mark.thorough
@pytest.mark.parametrize("deviation", [0.02, 0.05, 0.1])
@pytest.mark.parametrize(
    ("rates", "wrong"),
    [
        (((1, 100), (2, 190), (4, 240), (8, 240), (16, 240)), "no"),
        (((1, 100), (2, 160), (4, 240)), "yes"),
        (((1, 100), (2, 112), (4, 125), (8, 140)), "yes"),  # 12 % for twice as many callers: slow, but growth
    ],
)
def test_windows_that_scatter_seldom_make_a_wrong_answer(
    rates: tuple[tuple[int, float], ...], wrong: str, deviation: float
) -> None:
    """A side of a 95 % interval misses in 2.5 % of all scans; what is wrong in half of them is no answer."""
    rng, times = random.Random(11), 0
    for _ in range(200):
        levels = [_noisy(rng, callers, per_s, deviation) for callers, per_s in rates]
        times += judge(scan(levels)).answer == wrong
    assert times <= 0.05 * 200


@pytest.mark.parametrize(
    ("value", "said"), [(6.65, "between 4 and 8"), (4.0, "at 4"), (0.7, "at 1"), (40.0, "at 8")]
)
def test_a_knee_is_named_by_what_was_measured_around_it(value: float, said: str) -> None:
    assert between([1, 2, 4, 8], value) == said


def test_the_knee_says_no_more_than_the_answer() -> None:
    flat, short = scan(table(CLEAR)), scan(table(CLEAR[:4]))
    assert knee_finding(flat, judge(flat)).startswith("Requests begin to wait for each other between 2 and 4")
    assert knee_finding(short, judge(short)).startswith("By the most answers that were seen, requests begin")


def test_conditions_name_who_used_the_processors() -> None:
    levels = [replace(one, conditions=busy(1.25)) for one in table(CLEAR)]
    sharing, others, server = condition_findings(scan(levels))
    assert sharing == ("Client and server share this machine's 2 CPUs, of which the client used up to 0.3.")
    assert others == 'Other programs used 1.2 of the client\'s 2 CPUs (most: "make" 1.2).'
    assert server == "The server used up to 1.5 CPUs, by its processes here."


def test_what_is_unknown_of_the_conditions_says_why() -> None:
    hidden = replace(
        QUIET, server_cpus=Unknown("its /metrics: status 404"), server_by="", other_cpus=Unknown("no way")
    )
    levels = [replace(one, conditions=hidden) for one in table(CLEAR)]
    others, server = condition_findings(scan(levels, same_machine=False))
    assert others == (
        "What other programs used is unknown: no way. With the server they used 1.5 of the client's 2 CPUs."
    )
    assert server == "The server's own processor time is unknown: its /metrics: status 404."


def test_two_scans_agree_within_a_factor_and_their_intervals() -> None:
    said = "\n".join(agreement(scan(table(CLEAR)), scan(table(CLEAR))))
    assert "The answers agree: yes, within a factor of 2 in callers. B gives 1.00 times A's answers" in said
    assert "Conditions that differ (A / B): none of those recorded." in said


def test_two_scans_that_both_say_yes_at_other_throughputs_do_not_agree() -> None:
    """Two runs said 18.7/s and 110/s, and neither said that other programs ran."""
    slow = [replace(one, conditions=busy(1.8)) for one in table([(n, x / 5.9) for n, x in CLEAR])]
    quiet, loaded = scan(table(CLEAR), same_machine=False), scan(slow, same_machine=False)
    said = "\n".join(agreement(loaded, quiet))
    assert "Both say yes, but their throughput differs by more than 10%. B gives 5.90 times A's" in said
    assert "CPUs that other programs used: 1.8 / 0.0" in said


def test_two_scans_that_answer_differently_name_the_settings_that_differ() -> None:
    short = replace(scan(table(CLEAR[:3])), settings=replace(SETTINGS, most_callers=4, window_s=3.0))
    said = "\n".join(agreement(scan(table(CLEAR)), short))
    assert "The answers differ: yes and no." in said
    assert "callers tried: 1 2 4 8 16 / 1 2 4" in said
    assert "window: 1 s / 3 s" in said
    neither = "\n".join(agreement(scan(table(CLEAR[:2])), scan(table(CLEAR[:2]))))
    assert "Neither scan can tell" in neither


def test_a_plan_counts_its_levels_and_seconds() -> None:
    plan = planned(SETTINGS)  # up to 64 callers, eight shares, windows of a second, 3 to 10 of them
    assert plan.callers == (1, 2, 4, 8, 16, 32, 64)
    assert (plan.levels, plan.level_s, plan.slowest_per_s) == ((4, 15), (3.5, 10.5), 20.0)
    assert plan.seconds == (14.0, 157.5)
    one = planned(replace(SETTINGS, most_callers=1, rates_per_s=(5.0,)))
    assert (one.callers, one.levels) == ((1,), (2, 2))
    few = announcement("http://h", replace(SETTINGS, most_callers=1, rates_per_s=(5.0,)), None)
    assert "with 1 caller at once" in few
    assert "at one rate: 2 levels of 3.5 to 10 s, 7 to 21 s in all" in few


def test_the_announcement_says_what_is_done_how_long_and_what_shortens_it() -> None:
    said = announcement("http://h", SETTINGS, ("--quick-load", replace(SETTINGS, most_windows=4)))
    assert said == (
        "Asks http://h with 1, 2, 4 to 64 callers at once, until more bring no more answers, then at up to "
        "8 rates: 4 to 15 levels of 3.5 to 10 s, 14 s to 2.6 min in all, longer if fewer than 20 answers a "
        "second come. Shorter: --quick-load (14 to 68 s), --most-callers N or one --rate N."
    )
