"""Which files of an image are searched for credentials, by their directories and names."""

import re
from enum import Enum


class Care(Enum):
    """Which files of a directory are searched for credentials."""

    NAMED_FILES = "files named after credentials"
    NO_CODE = "all text but code"
    ALL_TEXT = "all text"


# Files in which a value without a name, or with a common one, is a credential.
SPECIAL = {
    b".netrc": rb"\bpassword\s+(?P<s>\S{3,})",
    b"_netrc": rb"\bpassword\s+(?P<s>\S{3,})",
    b".pgpass": rb"(?m)^[^#:\s]+:[^:\s]*:[^:\s]*:[^:\s]*:(?P<s>\S+)$",
    b".htpasswd": rb"(?m)^[^:\s]+:(?:\$apr1\$|\$2[aby]\$|\{SHA\})(?P<s>\S+)",
    b"shadow": rb"(?m)^[^:\s]+:(?P<s>\$[^:\s]{8,})",
    b"kaggle.json": rb"\"key\"\s*:\s*\"(?P<s>[0-9a-f]{32})\"",
    b"rclone.conf": rb"(?m)^pass\s*=\s*(?P<s>\S{8,})",
    b"kubeconfig": rb"client-key-data:\s*(?P<s>\S{40,})",
    b"config": rb"client-key-data:\s*(?P<s>\S{40,})",
}
NAMED = frozenset(SPECIAL) | frozenset(
    b".pypirc pip.conf .npmrc .yarnrc .yarnrc.yml .git-credentials .my.cnf .env credentials .dockercfg .s3cfg"
    b" .boto id_rsa id_ed25519 id_ecdsa id_dsa application_default_credentials.json .vault-token .terraformrc"
    b" secrets.yaml hosts.yml".split()
)
_LIBRARIES = re.compile(
    rb"(^|/)(site-packages|dist-packages|node_modules|conda-meta|python3(\.\d+)?|share/doc)(/|$)"
    rb"|^(usr/(lib\w*|share|include|src)|lib\w*|proc|sys|dev|boot|var/lib/(dpkg|apt)|usr/local/(lib\w*|include|share))(/|$)"
    rb"|^opt/(conda|rocm[^/]*)/(lib\w*|include|share|pkgs|llvm)(/|$)"
)
_LIB = re.compile(rb"(^|/)lib(64)?(/|$)")
_NO_TEXT = re.compile(
    rb"(?i)\.(so|pyc|pyo|h|hpp|c|cc|cpp|cu|a|o|mo|gz|xz|bz2|zst|zip|whl|jar|png|jpe?g|gif|ico|svg|woff2?|ttf|css|map"
    rb"|safetensors|gguf|onnx|pt|pth|bin|npy|npz|parquet|db|sqlite3?|co|hsaco|dat|crt|po|md|rst|html?)$"
)
CODE = re.compile(rb"\.(pyi?|js|mjs|ts|go|java|rb|json|ya?ml|toml|tf|ipynb|php|lua|xml)$")


def care_for(directory: bytes) -> Care:
    """How closely a directory's files are read. Code of libraries is full of names and examples."""
    if _LIBRARIES.search(directory):
        return Care.NAMED_FILES
    return Care.NO_CODE if _LIB.search(directory) else Care.ALL_TEXT


def reads_file(name: bytes, care: Care) -> bool:
    """Is a file worth reading, by its name?"""
    if name in NAMED:
        return True
    if care is Care.NAMED_FILES or _NO_TEXT.search(name):
        return False
    return care is Care.ALL_TEXT or not CODE.search(name)
