"""What pyproject.toml can't say: which packages there are, the commit in a wheel, and where it is built.

`images/` is installed as one of the packages. A wheel and an sdist note the commit that they were made from.
What a build makes on its way is in a temporary directory: a checkout that was installed from stays as it was.
"""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT))

from probes.core.commit import NOTE, commit_of  # noqa: E402 - found there

WORK = tempfile.mkdtemp(prefix="weir-setup-")
atexit.register(shutil.rmtree, WORK, ignore_errors=True)


def note_commit(folder: Path) -> None:
    """Write the commit into a tree of what is installed; nothing where it isn't known."""
    path = folder / NOTE
    path.unlink(missing_ok=True)  # in an sdist's tree it may be a link to the checkout's own
    path.write_text(commit_of(ROOT) or "", encoding="utf-8")


class BuildWithCommit(build_py):
    """Copies the packages, and notes the commit; an editable install reads it from the checkout."""

    def run(self) -> None:
        """Copy and note."""
        super().run()
        if not self.editable_mode:
            note_commit(Path(self.build_lib))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """The files that are installed."""
        outputs: list[str] = super().get_outputs(include_bytecode)
        note = str(Path(self.build_lib) / NOTE)
        return outputs if self.editable_mode or note in outputs else [*outputs, note]


class SourcesWithCommit(sdist):
    """Packs the sources with the commit. It lists them in an egg-info beside them, which it then removes."""

    def run(self) -> None:
        """List, pack, remove the list."""
        info = self.reinitialize_command("egg_info")
        info.egg_base = "."
        place = ROOT / "gpu_weir.egg-info"
        kept = place.exists()
        try:
            super().run()
        finally:
            if not kept:
                shutil.rmtree(place, ignore_errors=True)

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """The tree that is packed."""
        super().make_release_tree(base_dir, files)
        note_commit(Path(base_dir))


setup(
    packages=[*find_packages(include=["buildtool", "buildtool.*", "probes", "probes.*"]), "buildtool.images"],
    cmdclass={"build_py": BuildWithCommit, "sdist": SourcesWithCommit},
    options={"build": {"build_base": WORK}, "egg_info": {"egg_base": WORK}},
)
