"""A client of a running server: its v2 endpoints and /metrics, all on its HTTP port."""

import argparse
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cohabit.server.activations import Activations
from cohabit.server.errors import ConfigError, RemoteError

VersionSamples = Mapping[tuple[str, str, str], float]
"""Samples by metric, model and version."""


class Metrics(NamedTuple):
    """Metrics of served models, from `/metrics`."""

    versions: VersionSamples
    """Samples without other labels."""
    memory_bytes: Mapping[str, float]
    """Bytes of the arena, by use."""
    activations: Sequence[Activations]
    plans: Mapping[tuple[str, str], tuple[str, int]]
    """By model and version: the search that found the plan of its smallest batch, and the candidates that it tried."""


def _activations(labels: Mapping[str, str], nbytes: float) -> Activations:
    bucket = "x".join(filter(None, (labels["batch"], labels.get("sizes", ""))))
    return Activations(labels["model"], int(labels["batch"]), bucket, round(nbytes))


def _plans(samples: Iterable[Sample]) -> dict[tuple[str, str], tuple[str, int]]:
    found = [s for s in samples if s.name == "cohabit_plan_evaluations"]
    found.sort(key=lambda s: int(s.labels["batch"]), reverse=True)
    return {(s.labels["model"], s.labels["version"]): (s.labels["search"], round(s.value)) for s in found}


_MOST_BYTES = 64 << 20
_TIMEOUT_S = 10.0
_PROBE_S = 2.0
_ALERTS = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE", "TLSV1_ALERT_UNKNOWN_CA")


class RemoteServer:
    """One server. Every call blocks, and raises RemoteError if the server refuses it or does not answer."""

    def __init__(self, url: str, token: str | None, timeout_s: float, ca: Path | None = None) -> None:
        """`ca` is a file of authorities for the server's certificate; None for the system's. Raises ConfigError."""
        self.url = _checked(url)
        self._tls = _tls_of(ca)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s

    def index(self) -> list[dict[str, str]]:
        listed: list[dict[str, str]] = self._json("POST", "/v2/repository/index", {})
        return listed

    def statistics(self, model: str | None) -> list[dict[str, Any]]:
        path = "/v2/models/stats" if model is None else f"/v2/models/{quote(model, safe='')}/stats"
        answer: dict[str, list[dict[str, Any]]] = self._json("GET", path)
        return answer["model_stats"]

    def load(self, model: str) -> None:
        """Load a model, without a timeout. Returns once it is served."""
        self._ask("POST", f"{self.url}/v2/repository/models/{quote(model, safe='')}/load", b"", None)

    def unload(self, model: str) -> None:
        self._ask("POST", f"{self.url}/v2/repository/models/{quote(model, safe='')}/unload", b"", None)

    def metrics(self) -> Metrics:
        body = self._ask("GET", f"{self.url}/metrics", None, self._timeout_s)
        try:
            families = text_string_to_metric_families(body.decode())
            samples = [sample for family in families for sample in family.samples]
            versions = {
                (sample.name, sample.labels["model"], sample.labels["version"]): sample.value
                for sample in samples
                if sample.labels.keys() == {"model", "version"}
            }
            return Metrics(
                versions,
                {s.labels["use"]: s.value for s in samples if s.name == "cohabit_memory_bytes"},
                [_activations(s.labels, s.value) for s in samples if s.name == "cohabit_activation_bytes"],
                _plans(samples),
            )
        except ValueError as error:
            raise RemoteError(f"{self.url}/metrics is not in Prometheus' format: {error}") from error

    def _tls_hint(self, reason: object) -> str:
        """Return advice if only one side speaks TLS, or the certificate's authority is unknown; else an empty text."""
        parts = urlsplit(self.url)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return "; name the authority that has signed it with --ca FILE"
        if parts.scheme == "https":
            return "; if the server has no TLS, give http://" if isinstance(reason, ssl.SSLError) else ""
        is_cut = isinstance(reason, ConnectionError | http.client.HTTPException)
        if (
            is_cut
            and not isinstance(reason, ConnectionRefusedError)
            and _speaks_tls(parts.hostname or "", parts.port or 80)
        ):
            return f"; it speaks TLS: give https://{parts.netloc}"
        return ""

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        sent = None if body is None else msgspec.json.encode(body)
        answer = self._ask(method, f"{self.url}{path}", sent, self._timeout_s)
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            raise RemoteError(f"{self.url}{path} did not answer with JSON: {error}") from error

    def _ask(self, method: str, url: str, body: bytes | None, timeout_s: float | None) -> bytes:
        request = urllib.request.Request(url, body, dict(self._headers), method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=self._tls) as response:
                answer: bytes = response.read(_MOST_BYTES)
                return answer
        except urllib.error.HTTPError as error:
            raise RemoteError(f"{url} answered {error.code}: {_reason(error)}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise RemoteError(f"{url} does not answer: {reason}{self._tls_hint(reason)}") from error


def _tls_of(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ca: {ca} cannot be read: {error.strerror or error}") from error


def read_token(path: Path) -> str:
    """Return the first token of a file in the server's format. Raises ConfigError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: {path} cannot be read: {error}") from error
    token = next((line for line in lines if line and not line.startswith("#")), None)
    if token is None:
        raise ConfigError(f"--token-file: {path} has no token")
    return token


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of every command that queries a running server."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server's HTTP port (default: %(default)s)"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file whose first token is sent to the server"
    )
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="CA certificates (PEM) that verify the server's certificate (default: the system's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def server_of(options: argparse.Namespace) -> RemoteServer:
    """Raises ConfigError."""
    token = None if options.token_file is None else read_token(options.token_file)
    return RemoteServer(options.url, token, _TIMEOUT_S, options.ca)


def _speaks_tls(host: str, port: int) -> bool:
    """Whether a port answers a TLS handshake, with any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), socket.create_connection((host, port), _PROBE_S) as probe:
        try:
            context.wrap_socket(probe, server_hostname=host).close()
        except ssl.SSLError as error:
            return error.reason in _ALERTS  # it speaks TLS, and requires a client certificate
        return True
    return False


def _reason(error: urllib.error.HTTPError) -> str:
    body = error.read(_MOST_BYTES)
    try:
        return str(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return error.reason


def _checked(url: str) -> str:
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        sound = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError(f"--url: '{url}' is not an http or https address")
    return full.rstrip("/")
