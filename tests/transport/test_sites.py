"""Pages of other sites change nothing, with DNS rebinding neither; clients that are no browser are not asked."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.frontend.sites import ANY_NAME, Sites
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import Ports, identity, running

CHANGES = [
    "/v2/repository/models/one/load",
    "/v2/repository/models/one/unload",
    "/v2/repository/other/models/one/unload",
    "/v2/logging",
    "/v2/trace/setting",
    "/v2/models/one/trace/setting",
    "/v2/systemsharedmemory/region/r/register",
    "/v2/systemsharedmemory/unregister",
    "/v2/cudasharedmemory/region/r/register",
    "/v2/cudasharedmemory/unregister",
]
OWN = "models.example"


@pytest.fixture(scope="module", params=["loopback", "network", "named"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Ports]]:
    hosts = {"loopback": ("127.0.0.1",), "network": ("0.0.0.0",), "named": ("0.0.0.0", f"name:{OWN}")}
    config = ServeConfig(Path("fakes"), FixedSize(1), hosts=hosts[request.param])
    with running(identity("one"), sites=Sites.of(config)) as ports:
        yield request.param, ports


def status(ports: Ports, path: str, headers: Mapping[str, str]) -> int:
    return ask(ports, "POST", path, b'{"log_verbose_level": 1}', {"Content-Type": "text/plain", **headers}).status


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:1"},
        {"Host": "localhost:8000", "Origin": "http://evil.example"},
        {"Host": "localhost:8000", "Origin": "http://localhost:3000"},
        {"Host": "localhost:8000", "Origin": "http://localhost.evil.example:8000"},
        {"Host": "localhost:8000", "Origin": "null"},
        {"Host": "localhost:8000", "Origin": "http://[::1"},
        {"Host": "", "Origin": "http://"},
        {"Origin": "https://models.example.evil.example", "Host": OWN},
    ],
    ids=str,
)
def test_a_page_of_another_site_changes_nothing(server: tuple[str, Ports], headers: Mapping[str, str]) -> None:
    for path in CHANGES:
        answer = ask(server[1], "POST", path, b"{}", {"Content-Type": "text/plain", **headers})
        assert answer.status == 403, path
        assert "another site" in answer.json["error"]
        assert "--host name:NAME" in answer.json["error"]


@pytest.mark.parametrize(
    "origin", [{}, {"Origin": "http://evil.example:8000"}], ids=["no origin", "its own origin"]
)
def test_a_name_that_leads_to_the_server_by_rebinding_is_not_its_own(
    server: tuple[str, Ports], origin: Mapping[str, str]
) -> None:
    kind, ports = server
    found = {status(ports, path, {"Host": "evil.example:8000", **origin}) == 403 for path in CHANGES}
    assert found == {kind != "network"}, "on a network, any name may be the server's until it is named"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:8000"},
        {"Host": "[::1]:8000", "Origin": "http://[::1]:8000", "Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
        {"Host": "LOCALHOST.:80", "Origin": "http://localhost"},
        {"Host": "10.1.2.3", "Origin": "https://10.1.2.3"},
        {"Host": "app.localhost:8000"},
        {"Host": "localhost", "Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
def test_its_own_page_and_programs_change_the_server(server: tuple[str, Ports], headers: Mapping[str, str]) -> None:
    assert status(server[1], "/v2/logging", headers) == 200


def test_a_proxys_page_changes_a_server_that_was_told_its_name(server: tuple[str, Ports]) -> None:
    kind, ports = server
    proxied = {"Host": "127.0.0.1:8000", "Origin": f"https://{OWN}", "Sec-Fetch-Site": "same-origin"}
    assert (status(ports, "/v2/logging", proxied) == 200) == (kind == "named")
    assert (status(ports, "/v2/logging", {"Host": OWN, "Origin": f"https://{OWN}"}) == 200) == (kind != "loopback")


def test_reading_and_inference_ask_nothing(server: tuple[str, Ports]) -> None:
    _, ports = server
    foreign = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    for method, path in (("GET", "/v2/health/live"), ("GET", "/v2/logging"), ("POST", "/v2/repository/index")):
        assert ask(ports, method, path, b"", foreign).status == 200


def test_without_a_configuration_any_name_is_the_servers() -> None:
    assert Sites.of(ServeConfig(Path("fakes"), FixedSize(1), hosts=("0.0.0.0",))) == ANY_NAME
