"""Addresses as `host:port`. Small, because the health check imports it every few seconds."""

import socket

from service.errors import SettingsError

DEFAULT_LISTEN = "0.0.0.0:8000"  # inside the container; compose publishes it on the loopback only


def parse_listen(text: str, variable: str = "WEIR_LISTEN") -> tuple[str, int]:
    """Parse the `host:port` of an environment variable; the host of `[::1]:8000` is `::1`.

    Raises SettingsError.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65536:
        raise SettingsError(f"{variable} {text!r} is not host:port", f"for example {DEFAULT_LISTEN}")
    if not any(character in host for character in ":[]"):
        return host, int(port)
    try:
        if (host[0], host[-1]) != ("[", "]"):
            raise ValueError
        address, percent, interface = host[1:-1].partition("%")  # a link-local one may name its interface
        short = socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, address))
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"{variable} {text!r} has no IPv6 address in brackets", "for example [::]:8000, or [::1]:8000"
        ) from error
    return f"{short}{percent}{interface}", int(port)


def format_address(host: str, port: int) -> str:
    """Return an address as `parse_listen` takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
