"""A built image is held to what its variant and its torch source promise."""

import json

import pytest

from buildtool import catalog, proof
from buildtool.errors import Exit, ProofFailed
from buildtool.model import PinnedBase, Resolved, TorchBuild

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


def test_rocminfo_is_told_with_its_exit_code() -> None:
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
    assert "\x1b" not in proof.told(facts)
    assert "\x1b" not in proof.last_words("\x1b[2J\n" * 3)
    for answer in ("\x1b[2J", json.dumps({"x": "\x1b[2J"})):
        with pytest.raises(ProofFailed) as caught:
            judge(f"SMOKE {answer}")
        assert "\x1b" not in str(caught.value)
    with pytest.raises(ProofFailed) as caught:
        judge("\x1b[2J", code=1)
    assert "\x1b" not in str(caught.value)
