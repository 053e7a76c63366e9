"""Cross-site protection: only the server's own page, or a client other than a browser, may change the server.

A page of another site can make a browser send such a call, without reading the answer. With DNS rebinding, it can even
pose as a page of this server. Browsers send a call's origin (Sec-Fetch-Site, Origin) and the name it used (Host).
"""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from cohabit.server.config.config import ServeConfig
from cohabit.server.errors import Refused

_FETCH_SITE = "Sec-Fetch-Site"
_OWN = frozenset({"same-origin", "none"})
_LOCAL = "localhost"
_PORTS = {"http": 80, "https": 443}
_MOST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Sites:
    """The names by which browsers reach the server, besides addresses and localhost."""

    given: frozenset[str] = frozenset()
    """Configured names: a proxy's page may have one while its calls have another in Host."""
    others: frozenset[str] | None = None
    """None if any name may be the server's: it listens on the network, and no name is configured."""

    @staticmethod
    def of(config: ServeConfig) -> "Sites":
        given = frozenset(name.lower() for name in config.names)
        if not given and not config.is_loopback:
            return Sites()
        return Sites(given, frozenset(name.lower() for name in (*config.addresses, socket.gethostname())))

    def require_own(self, headers: Mapping[str, str], *, by_name: bool = True) -> None:
        """Raise Refused for a call made by a page of another site.

        Without `by_name`, the call came over a Unix socket, which has no name.
        """
        site, origin, host = headers.get(_FETCH_SITE), headers.get("Origin"), headers.get("Host", "")
        if site is not None and site not in _OWN:
            raise _cross_site_refusal(f"{_FETCH_SITE} is {site[:_MOST_SHOWN]}")
        if origin is not None:
            scheme, _, page = origin.partition("://")
            is_own = _place_of(page, scheme) == _place_of(host, scheme) or _host_of(page) in self.given
            if _host_of(page) is None or not is_own:
                raise _cross_site_refusal(f"Origin is {origin[:_MOST_SHOWN]}, Host {host[:_MOST_SHOWN]}")
        if self.others is not None and by_name and not self._is_served(_host_of(host)):
            raise _cross_site_refusal(f"Host is {host[:_MOST_SHOWN]}, which is not a name of this server")

    def _is_served(self, host: str | None) -> bool:
        if host is None:
            return False
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return host in self.given or host in (self.others or ()) or f".{host}".endswith(f".{_LOCAL}")
        return True  # a page's name can lead to this server, but an address in Host is the server's own


ANY_NAME = Sites()


def _host_of(authority: str) -> str | None:
    """Return the host of `host:port` in lower case; None if missing."""
    try:
        host = urlsplit(f"//{authority}").hostname
    except ValueError:
        return None
    return host.removesuffix(".") if host else None


def _place_of(authority: str, scheme: str) -> tuple[str | None, int | None]:
    """Return the host and the port of `host:port`."""
    try:
        port = urlsplit(f"//{authority}").port or _PORTS.get(scheme)
    except ValueError:
        port = None
    return _host_of(authority), port


def _cross_site_refusal(reason: str) -> Refused:
    return Refused(
        "ForeignSite",
        f"a call that changes the server came from another site ({reason}); --host name:NAME tells the server another"
        " name of its own",
    )
