"""What pyproject.toml can't say: the packages are found, and `images/` is installed as one of them."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["buildtool", "buildtool.*", "probes", "probes.*"]), "buildtool.images"]
)
