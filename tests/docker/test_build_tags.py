"""Two images of one build on a real engine: where one of them fails, both tags stay where they were."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from standins import ROOT, STANDIN_TORCH, Index, Shop, make_torch, make_wheel, package_index

from buildtool.core.errors import Exit
from buildtool.engine.client import Engine

ONE, TWO = (f"tags-{os.getpid()}-{name}" for name in ("one", "two"))
REFS = {name: f"weir/{name}:latest" for name in (ONE, TWO)}
GOOD, CUDA, SLEEPY = "9.1.0+cpu", "9.2.0+cpu", "9.3.0+cpu"
FAILING = "FROM scratch AS rootfs\nADD rootfs.tar /\nFROM rootfs\nRUN --network=none false\n"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    with package_index(tmp_path_factory.mktemp("index")) as found:
        make_torch(found.files, GOOD)
        make_torch(found.files, CUDA, cuda="13.0")
        sleepy = "import time\ntime.sleep(600)\n" + STANDIN_TORCH.format(version=SLEEPY, hip=None, cuda=None)
        make_wheel(found.files, "torch", SLEEPY, {"torch/__init__.py": sleepy})
        found.refresh()
        yield found


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop with the cached root file system of `cpu`."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "failing").mkdir(parents=True)
    (folder / "failing/Dockerfile").write_text(FAILING)
    made = Shop(folder)
    made.state.mkdir()
    (made.state / "rootfs").symlink_to(ROOT / ".weir/rootfs")
    yield made
    engine = Engine()
    for name in [*REFS.values(), *given()]:
        engine.remove_tag(name)


def variant(
    name: str, index: Index, summary: str, torch: str = GOOD, folder: str = "", more: str = ""
) -> str:
    text = (ROOT / "images/variants.yaml").read_text()
    bootstrap = text[text.index("      - bootstrap:") : text.index("    torch:")]
    source = f'{{name: standin-index, build: cpu, require: ["torch=={torch}"], index: "{index.url}"}}'
    dockerfile = f"    dockerfile: {folder}\n" if folder else ""
    return (
        f"  {name}:\n    summary: {summary}\n{dockerfile}"
        f'    python: "3.11"\n    base:\n{bootstrap}    torch:\n      - {source}\n{more}'
    )


def ids() -> dict[str, str]:
    engine = Engine()
    return {name: str((engine.inspect(ref) or {}).get("Id")) for name, ref in REFS.items()}


def temporary() -> list[str]:
    return [name for name in Engine().tags("weir-building") if name.endswith((ONE, TWO))]


def given() -> list[str]:
    """The names of --tag that images have."""
    return [name for name in Engine().tags("team/*") if str(os.getpid()) in name]


@pytest.fixture
def old(shop: Shop, index: Index) -> dict[str, str]:
    """The images of an earlier build, by variant; names of --tag are those of the test alone."""
    for name in given():
        Engine().remove_tag(name)
    shop.write(variant(ONE, index, "old") + variant(TWO, index, "old, too"))
    done = shop.build("--no-audit")
    assert done.returncode == Exit.OK, done.stderr
    found = ids()
    assert len(set(found.values())) == 2
    return found


STEP = ({"folder": "failing"}, "the build failed")
PROMISE = ({"torch": CUDA}, "stays as it was: the new image holds torch 9.2.0+cpu, a cuda build")
LEFT = pytest.mark.sampled(0)  # for `make thorough`


@pytest.mark.parametrize(
    ("bad", "trouble", "says"),
    [
        pytest.param(ONE, *PROMISE, id="first, a promise is broken"),
        pytest.param(TWO, *STEP, id="second, a step fails"),
        pytest.param(ONE, *STEP, id="first, a step fails", marks=LEFT),
        pytest.param(TWO, *PROMISE, id="second, a promise is broken", marks=LEFT),
    ],
)
def test_one_image_that_fails_leaves_both_tags_where_they_were(
    bad: str, trouble: dict[str, str], says: str, shop: Shop, index: Index, old: dict[str, str]
) -> None:
    shop.write("".join(variant(name, index, "new", **(trouble if name == bad else {})) for name in REFS))
    done = shop.build("--no-audit", "--tag", "team/{variant}:1")
    assert done.returncode == Exit.BUILD, done.stderr
    assert says in done.stderr
    assert ids() == old
    assert [*temporary(), *given()] == []


def proving(shop: Shop, index: Index) -> "subprocess.Popen[str]":
    """A build whose second proof has begun and doesn't end."""
    shop.write(variant(ONE, index, "new") + variant(TWO, index, "new, too", SLEEPY))
    process = subprocess.Popen(
        shop.command("--no-audit"),
        cwd=ROOT,
        env=shop.environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr
    for line in process.stderr:
        if f"{TWO}: proving" in line:
            return process
    raise AssertionError("the build ended before its proof")


def test_a_build_that_is_stopped_while_it_proves_leaves_the_tags_where_they_were(
    shop: Shop, index: Index, old: dict[str, str]
) -> None:
    process = proving(shop, index)
    process.terminate()
    process.communicate()
    assert process.returncode == Exit.INTERRUPTED
    assert ids() == old
    assert temporary() == []


def test_a_build_that_is_killed_while_it_proves_leaves_the_tags_and_the_next_one_cleans_up(
    shop: Shop, index: Index, old: dict[str, str]
) -> None:
    process = proving(shop, index)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert ids() == old
    assert len(temporary()) == 2
    shop.write(variant(ONE, index, "old") + variant(TWO, index, "old, too"))
    assert shop.build("--no-audit").returncode == Exit.OK
    assert ids() == old
    assert temporary() == []


def test_what_is_over_its_budget_has_its_own_name_alone(
    shop: Shop, index: Index, old: dict[str, str]
) -> None:
    heavy = variant(TWO, index, "new, too", more="    budget: {unpacked: 1 MB}\n")
    shop.write(variant(ONE, index, "new") + heavy)
    done = shop.build("--tag", "team/{variant}:1")
    assert done.returncode == Exit.FINDINGS, done.stderr
    assert f"no name of --tag was given to what is over its budget: {REFS[TWO]}" in done.stdout
    assert given() == [f"team/{ONE}:1"]
    assert not set(ids().values()) & set(old.values())
