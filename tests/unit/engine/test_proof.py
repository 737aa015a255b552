"""A built image is held to what its variant and its torch source promise."""

import json

import pytest

from buildtool.build import catalog
from buildtool.core.errors import Exit, ProofFailed
from buildtool.core.model import PinnedBase, Resolved, TorchBuild
from buildtool.engine import proof

CPU = catalog.load().select(("cpu",))[0]


def resolved(build: TorchBuild) -> Resolved:
    return Resolved("cpu", "", "host-pip", build, "3.11", PinnedBase("bootstrap", "bookworm", ""))


def smoke(version: str, hip: str | None = None, cuda: str | None = None, **changes: object) -> str:
    facts = {
        "python": "3.11.2",
        "uid": 10001,
        "torch": {"version": version, "hip": hip, "cuda": cuda, "product_ok": True},
        "service": True,
        "probes": True,
        "rocminfo": {"present": False},
    }
    return "a warning\nSMOKE " + json.dumps(facts | changes) + "\n"


def judge(stdout: str, *, build: TorchBuild = TorchBuild.CPU, code: int = 0) -> proof.Proof:
    return proof.judge(CPU, resolved(build), exit_code=code, stdout=stdout, stderr="")


def test_the_promised_build_is_accepted() -> None:
    found = judge(smoke("2.13.0+cpu"))
    assert (found.torch_build, found.rocminfo) == (TorchBuild.CPU, "not installed")


@pytest.mark.parametrize(
    ("version", "hip", "cuda", "promised"),
    [
        ("2.15.0", None, "13.0", TorchBuild.CPU),
        ("2.15.0", None, "13.0", TorchBuild.ROCM),
        ("2.13.0+cpu", None, None, TorchBuild.ROCM),
        ("2.9.1+rocm6.4", "6.4", None, TorchBuild.CPU),
    ],
)
def test_a_silently_replaced_torch_breaks_the_build(
    version: str, hip: str | None, cuda: str | None, promised: TorchBuild
) -> None:
    with pytest.raises(ProofFailed, match="promises a") as caught:
        judge(smoke(version, hip, cuda), build=promised)
    assert caught.value.exit_code == Exit.BUILD


def test_a_torch_that_computes_wrong_is_refused() -> None:
    facts = {"version": "2.13.0+cpu", "hip": None, "cuda": None, "product_ok": False}
    with pytest.raises(ProofFailed, match="wrong matrix product"):
        judge(smoke("2.13.0+cpu", torch=facts))


def test_a_crash_is_shown_with_its_last_words() -> None:
    with pytest.raises(ProofFailed, match="libstdc"):
        judge("ImportError: libstdc++.so.6: cannot open", code=1)


def test_a_missing_payload_is_refused() -> None:
    with pytest.raises(ProofFailed, match="lacks its payload: service"):
        judge(smoke("2.13.0+cpu", service=False))


def test_another_python_than_the_wheels_are_for_is_refused() -> None:
    with pytest.raises(ProofFailed, match=r"runs Python 3\.13"):
        judge(smoke("2.13.0+cpu", python="3.13.5"))


def test_rocminfo_is_reported_with_its_exit_code() -> None:
    said = {"present": True, "exit_code": 1, "said": "ROCk module is NOT loaded\nmore"}
    assert judge(smoke("2.13.0+cpu", rocminfo=said)).rocminfo == "runs (exit 1: ROCk module is NOT loaded)"


def test_a_seal_gives_the_same_proof_back() -> None:
    found = judge(smoke("2.13.0+cpu"))
    assert proof.from_seal(proof.to_seal(found)) == found


GOOD = json.loads(smoke("2.13.0+cpu").splitlines()[1].removeprefix("SMOKE "))
ODD = ["{}", "[1]", "x", "", "null", "[" * 50_000, "1" * 5000, '{"torch": 1, "rocminfo": {}}', "{" * 70_000]


@pytest.mark.parametrize("answer", ODD)
def test_a_malformed_answer_is_a_failed_proof_and_no_traceback(answer: str) -> None:
    with pytest.raises(ProofFailed, match="smoke test"):
        judge(f"SMOKE {answer}\n")


@pytest.mark.parametrize("key", sorted(GOOD))
@pytest.mark.parametrize("value", [None, 1.5, [], {}, {"present": 1}, "x" * 2000])
def test_an_answer_with_one_odd_value_is_a_failed_proof(key: str, value: object) -> None:
    with pytest.raises(ProofFailed):
        judge("SMOKE " + json.dumps({**GOOD, key: value}))
    with pytest.raises(ProofFailed):
        judge("SMOKE " + json.dumps({name: GOOD[name] for name in GOOD if name != key}))


def test_what_an_image_says_of_itself_brings_no_escape_sequence_to_the_terminal() -> None:
    facts = proof.facts_of(smoke("\x1b[2J", rocminfo={"present": True, "exit_code": 1, "said": "\x1b[2J"}))
    assert facts
    assert "\x1b" not in proof.facts_text(facts)
    assert "\x1b" not in proof.output_tail("\x1b[2J\n" * 3)
    for answer in ("\x1b[2J", json.dumps({"x": "\x1b[2J"})):
        with pytest.raises(ProofFailed) as caught:
            judge(f"SMOKE {answer}")
        assert "\x1b" not in str(caught.value)
    with pytest.raises(ProofFailed) as caught:
        judge("\x1b[2J", code=1)
    assert "\x1b" not in str(caught.value)


def test_a_proof_says_exactly_what_the_container_said() -> None:
    said = {"present": True, "exit_code": 0, "said": ""}
    answer = smoke("2.9.1+rocm6.4", hip="6.4", rocminfo=said)
    assert judge(answer, build=TorchBuild.ROCM) == proof.Proof(
        python="3.11.2",
        torch_version="2.9.1+rocm6.4",
        torch_build=TorchBuild.ROCM,
        rocminfo="runs (exit 0: silent)",
    )
    assert proof.facts_of(answer) == proof.Facts(
        python="3.11.2",
        uid=10001,
        torch_version="2.9.1+rocm6.4",
        hip="6.4",
        cuda=None,
        product_ok=True,
        service=True,
        probes=True,
        rocminfo="runs (exit 0: silent)",
    )
    other = proof.facts_of(smoke("2", cuda="13.0", service=False, probes=False, uid=0))
    assert other
    assert (other.hip, other.cuda, other.service, other.probes, other.uid) == (None, "13.0", False, False, 0)


def test_what_a_container_said_is_shown_in_one_line() -> None:
    facts = proof.facts_of(smoke("2.13.0+cpu"))
    assert facts
    assert "2.13.0+cpu" in proof.facts_text(facts)
    assert "not installed" in proof.facts_text(facts)


@pytest.mark.parametrize(
    ("hip", "cuda", "build"),
    [
        (None, None, "cpu"),
        ("", "", "cpu"),
        ("6.4", None, "rocm"),
        (None, "13.0", "cuda"),
        ("6.4", "1", "rocm"),
    ],
)
def test_a_torch_is_of_the_build_that_it_was_compiled_for(
    hip: str | None, cuda: str | None, build: str
) -> None:
    assert proof.build_of(hip, cuda) is TorchBuild(build)


@pytest.mark.parametrize(("stdout", "code"), [(smoke("2.13.0+cpu"), 1), ("nothing to say", 0), ("", 139)])
def test_an_image_that_ends_badly_or_says_nothing_has_proved_nothing(stdout: str, code: int) -> None:
    with pytest.raises(ProofFailed, match=f"exited with {code}") as caught:
        judge(stdout, code=code)
    assert "/layout:cpu.unproved docker-daemon:look:latest && docker run --rm -it" in caught.value.hint
    assert "`python3 -B /opt/weir/app/smoke.py`" in caught.value.message


def test_last_words_are_of_both_streams_and_few() -> None:
    lines = [f"line {number} " + "x" * 600 for number in range(9)]
    with pytest.raises(ProofFailed) as caught:
        proof.judge(CPU, resolved(TorchBuild.CPU), exit_code=1, stdout="lost\n", stderr="\n".join(lines))
    shown = caught.value.message.splitlines()[1:]
    assert shown == [line[:500] for line in lines[1:]]
    with pytest.raises(ProofFailed, match="out\nerr"):
        proof.judge(CPU, resolved(TorchBuild.CPU), exit_code=1, stdout="out\n", stderr="err\n")


def test_an_answer_is_read_up_to_a_limit_and_not_beyond() -> None:
    answer = f"SMOKE {json.dumps(GOOD)}"
    assert proof.facts_of(answer.ljust(65536)) == proof.facts_of(answer)
    with pytest.raises(proof.MalformedFacts, match="65,537"):
        proof.facts_of(answer.ljust(65537))


@pytest.mark.parametrize(("length", "taken"), [(999, True), (1000, True), (1001, False)])
def test_a_fact_is_taken_up_to_a_thousand_characters(length: int, taken: bool) -> None:
    answer = "SMOKE " + json.dumps({**GOOD, "python": "3.11." + "1" * (length - 5)})
    if taken:
        facts = proof.facts_of(answer)
        assert facts
        assert len(facts.python) == length
    else:
        with pytest.raises(proof.MalformedFacts):
            proof.facts_of(answer)


def test_a_malformed_answer_is_shown_by_its_beginning() -> None:
    with pytest.raises(ProofFailed) as caught:
        judge("SMOKE " + "x" * 1000)
    assert caught.value.message.endswith(": SMOKE " + "x" * 494)
    assert "cpu.unproved" in caught.value.hint


@pytest.mark.parametrize("missing", [("service",), ("probes",), ("service", "probes")])
def test_each_part_of_the_payload_that_is_missing_is_named(missing: tuple[str, ...]) -> None:
    with pytest.raises(ProofFailed, match=f"payload: {', '.join(missing)} can't"):
        judge(smoke("2.13.0+cpu", **dict.fromkeys(missing, False)))


@pytest.mark.parametrize("version", ["3.1.1", "3.110.0", "3.11", "13.11.2"])
def test_a_version_that_begins_alike_is_not_the_wheels_python(version: str) -> None:
    with pytest.raises(ProofFailed, match=f"runs Python {version}"):
        judge(smoke("2.13.0+cpu", python=version))


def test_a_truth_value_is_no_number_and_a_number_no_truth_value() -> None:
    for key, value in (("uid", True), ("service", 1), ("python", 3.11)):
        with pytest.raises(proof.MalformedFacts):
            proof.facts_of("SMOKE " + json.dumps({**GOOD, key: value}))
