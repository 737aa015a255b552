"""What the host's apt is set up to use."""

from buildtool.command import CommandFailed, find, run


def host_mirror() -> str | None:
    """The Debian mirror that the host's own apt uses; None (mmdebstrap's default) elsewhere."""
    if not find("apt-get"):
        return None
    try:
        listed = run(
            ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
        )
    except CommandFailed:
        return None
    for line in listed.stdout.splitlines():
        origin, label, uri = (*line.split(" ", 2), "", "")[:3]
        if origin == label == "Debian":
            return uri.strip() or None
    return None
