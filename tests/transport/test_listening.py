"""Where and how the ports listen: TLS, Unix sockets, several hosts, shared ports, connection age."""

import http.client
import socket
import ssl
import subprocess
from functools import partial
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc.service_pb2 import ServerLiveResponse

from cohabit.server.errors import ConfigError
from cohabit.server.frontend.listening import TlsFiles, address_of, without_covered
from cohabit.server.grpc.server import credentials_of
from tests.support.server.transport_fakes import Ports, identity, running

LIVE = ServerLiveResponse(live=True).SerializeToString()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA, and a server's and a client's certificate of it, each NAME.pem with NAME.key."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test CA")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")
    return folder


def https_status(server: Ports, certificates: Path, client: str | None) -> int:
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    if client is not None:
        context.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)
    try:
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status
    finally:
        connection.close()


def is_live(channel: grpc.Channel) -> bool:
    with channel:
        return bool(channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=20) == LIVE)


def secure_channel(server: Ports, certificates: Path, client: str | None) -> grpc.Channel:
    ca = (certificates / "ca.pem").read_bytes()
    pair: tuple[bytes | None, bytes | None] = (None, None)
    if client is not None:
        pair = ((certificates / f"{client}.key").read_bytes(), (certificates / f"{client}.pem").read_bytes())
    return grpc.secure_channel(server.grpc, grpc.ssl_channel_credentials(ca, *pair))


def test_tls_on_both_ports(certificates: Path) -> None:
    tls = TlsFiles(certificates / "server.pem", certificates / "server.key")
    with running(identity("one"), tls=tls) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert https_status(server, certificates, None) == 200
        assert is_live(secure_channel(server, certificates, None))
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain:
            plain.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" not in plain.recv(1 << 16)


def test_connections_without_a_tls_handshake_count_and_give_way_to_new_ones(certificates: Path) -> None:
    tls = TlsFiles(certificates / "server.pem", certificates / "server.key")
    with running(identity("one"), tls=tls, max_connections=3) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(8)]
        assert https_status(server, certificates, None) == 200
        for oldest in silent[:6]:
            assert oldest.recv(1) == b""
        silent[7].setblocking(False)
        with pytest.raises(BlockingIOError):  # still open
            silent[7].recv(1)
        for connection in silent:
            connection.close()


def test_mutual_tls_on_both_ports(certificates: Path) -> None:
    tls = TlsFiles(certificates / "server.pem", certificates / "server.key", certificates / "ca.pem")
    with running(identity("one"), tls=tls) as server:
        assert https_status(server, certificates, "client") == 200
        assert is_live(secure_channel(server, certificates, "client"))
        with pytest.raises(OSError, match=r"certificate|reset|closed|EOF"):
            https_status(server, certificates, None)
        with pytest.raises(grpc.RpcError) as caught:
            is_live(secure_channel(server, certificates, None))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("cert", "key", "ca", "message"),
    [
        ("none.pem", "server.key", None, "--tls-cert .*none.pem: No such file"),
        ("server.pem", "none.key", None, "--tls-key .*none.key: No such file"),
        ("server.pem", "client.key", None, "--tls-cert .*--tls-key .*(?i:mismatch)"),
        ("server.key", "server.key", None, "--tls-cert .*server.key"),
        ("server.pem", "server.key", "none.pem", "--tls-client-ca .*none.pem: No such file"),
        ("server.pem", "server.key", "names", "--tls-client-ca .*names"),
    ],
)
def test_tls_files_that_cannot_be_used_are_named(
    certificates: Path, cert: str, key: str, ca: str | None, message: str
) -> None:
    tls = TlsFiles(certificates / cert, certificates / key, None if ca is None else certificates / ca)
    for use in (tls.context, partial(credentials_of, tls)):
        with pytest.raises(ConfigError, match=message):
            use()


def test_unix_sockets(tmp_path: Path) -> None:
    http_path, grpc_path = tmp_path / "http", tmp_path / "grpc"
    with socket.socket(socket.AF_UNIX) as stale:  # left by a server that was killed
        stale.bind(str(http_path))
    with running(identity("one"), unix=(http_path, grpc_path)):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(http_path))
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        assert is_live(grpc.insecure_channel(f"unix:{grpc_path}"))
    assert not http_path.exists()
    assert not grpc_path.exists()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("hosts", [("127.0.0.1", "::1"), ("::",), ("0.0.0.0", "::")], ids=str)
def test_hosts_share_a_port(hosts: tuple[str, ...]) -> None:
    with running(identity("one"), hosts=hosts) as server:
        grpc_port = int(server.grpc.rpartition(":")[2])
        assert server.url == f"http://{address_of(hosts[0], server.port)}"
        for host in ("127.0.0.1", "::1"):
            connection = http.client.HTTPConnection(host, server.port, timeout=20)
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().status == 200
            connection.close()
            assert is_live(grpc.insecure_channel(address_of(host, grpc_port)))


def test_a_wildcard_covers_the_other_family() -> None:
    assert without_covered(["0.0.0.0", "::1", "0.0.0.0"]) == ["0.0.0.0", "::1"]
    assert without_covered(["0.0.0.0", "::"]) == ["::"]
