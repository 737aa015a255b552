"""The address that the service listens on. Health checks import this every few seconds, so it is small."""

from service.errors import SettingsError

DEFAULT_LISTEN = "0.0.0.0:8000"  # inside the container; compose publishes it on the loopback only


def parse_listen(text: str, variable: str = "WEIR_LISTEN") -> tuple[str, int]:
    """`host:port` of a variable. Raises SettingsError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65536:
        raise SettingsError(f"{variable} {text!r} is not host:port", f"for example {DEFAULT_LISTEN}")
    return host, int(port)
