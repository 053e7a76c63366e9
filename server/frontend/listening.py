"""Listening sockets and TLS, for both protocols."""

import contextlib
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cohabit.server.errors import ConfigError

UNREAD_S = 75.0
"""TCP_USER_TIMEOUT in seconds: the kernel closes a connection whose sent data stays unacknowledged for this long."""

_BACKLOG = 512


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server's certificate chain and key. With a client CA, clients also need a certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return the files as an SSL context. Raises ConfigError naming the flag if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        for flag, path in (("--tls-cert", self.cert), ("--tls-key", self.key)):
            _readable(flag, path)
        try:
            # An encrypted key must not ask for its password on the terminal.
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tls-cert {self.cert}, --tls-key {self.key}: {error}") from error
        if self.client_ca is not None:
            _readable("--tls-client-ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise ConfigError(f"--tls-client-ca {self.client_ca}: {error}") from error
        return context


def without_covered(hosts: Sequence[str]) -> list[str]:
    """Drop duplicate hosts, and `0.0.0.0` next to `::`, which listens on all IPv4 addresses as well."""
    return [host for host in dict.fromkeys(hosts) if host != "0.0.0.0" or "::" not in hosts]


def open_sockets(hosts: Sequence[str], port: int, flag: str) -> list[socket.socket]:
    """Listen at every address of the hosts, with non-blocking sockets. Port 0 takes a free port, the same for all.

    Raises ConfigError, which names the flag.
    """
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        for host in without_covered(hosts):
            try:
                for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    _set_options(sock, family)
                    sock.bind((address[0], port, *address[2:]))
                    _listen(sock)
                    port = sock.getsockname()[1]
                    sockets.append(sock)
            except OSError as error:
                raise ConfigError(f"{flag}: cannot listen on {host} port {port}: {error}") from error
        opened.pop_all()
        return sockets


def open_unix_socket(path: Path, flag: str) -> socket.socket:
    """Listen at a path, replacing a socket left by another server. Raises ConfigError, which names the flag."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            path.unlink()
        sock.bind(str(path))
        _listen(sock)
    except OSError as error:
        sock.close()
        raise ConfigError(f"{flag}: cannot listen on {path}: {error}") from error
    return sock


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _set_options(sock: socket.socket, family: int) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1e3))
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def _listen(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.listen(_BACKLOG)


def _readable(flag: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
