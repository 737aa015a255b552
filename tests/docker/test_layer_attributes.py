"""What `images/tools/layer.py` puts into the payload's layer, with the image's own Python."""

import os
import struct
import subprocess
from pathlib import Path

from buildtool.core.shipped import IMAGES

ROOT = Path(__file__).parents[2]
NOBODY = 0xFFFFFFFF
# user::rw- user:1234:rw- group::r-- mask::rw- other::r--, as the kernel stores them
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in ((1, 6, NOBODY), (2, 6, 1234), (4, 4, NOBODY), (16, 6, NOBODY), (32, 4, NOBODY))
)
SCRIPT = """set -e
python3 -B /media/layer.py payload
python3 -c 'import os
for path in ("/opt/weir/new", "/opt/weir/new/file"):
    found = os.stat(path)
    print(os.listxattr(path), oct(found.st_mode)[-4:], found.st_uid, int(found.st_mtime))'
"""


def test_attributes_of_the_hosts_files_are_not_in_the_payloads_layer(tmp_path: Path) -> None:
    """BuildKit hands over ACLs and SELinux labels of the context, which depend on where it is."""
    folder, tools = tmp_path / "payload/opt/weir/new", tmp_path / "tools"
    folder.mkdir(parents=True)
    tools.mkdir()
    (folder / "file").touch()
    for path in (folder, folder / "file"):
        os.setxattr(path, "system.posix_acl_access", ACL)
    installer = next((ROOT / ".weir/context/cpu/tools").glob("installer-*.whl"))
    for origin in (installer, IMAGES / "tools/layer.py"):
        (tools / origin.name).write_bytes(origin.read_bytes())
    words = [
        "docker",
        "run",
        "--rm",
        "--network=none",
        "--user=0",
        "--env=SOURCE_DATE_EPOCH=7",
        "--entrypoint=sh",
    ]
    mounts = [f"--volume={tmp_path / 'payload'}:/mnt:ro", f"--volume={tools}:/media:ro"]
    done = subprocess.run(
        [*words, *mounts, "weir/cpu:latest", "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[] 0755 0 7", "[] 0644 0 7"], done.stderr
