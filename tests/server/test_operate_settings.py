"""Settings of `cohabit serve`: four sources, one outcome, and errors that name the origin of a value."""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from cohabit.server.cli import main
from cohabit.server.config.config import SETTINGS, ServeConfig, decode_config, encode_config
from cohabit.server.config.sizes import FixedSize, ShareOfWeights
from cohabit.server.config.sources import ResolvedConfig, add_flags, as_toml, read_settings
from cohabit.server.errors import ConfigError

NEEDED = ("models", "--memory", "1GiB")


def effective(*flags: str, environment: Mapping[str, str] | None = None) -> ResolvedConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return read_settings(parser.parse_args(flags), environment or {})


def config(*flags: str, environment: Mapping[str, str] | None = None) -> ServeConfig:
    return effective(*flags, environment=environment).config


def file(folder: Path, text: str) -> str:
    path = folder / "cohabit.toml"
    path.write_text(text)
    return str(path)


def refused(*flags: str, environment: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        effective(*flags, environment=environment)
    return str(caught.value)


def test_defaults_hold_where_nothing_else_is_given() -> None:
    assert config(*NEEDED) == ServeConfig(Path("models"), FixedSize(1 << 30))


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "http_port = 1\ngrpc_port = 1\nmetrics_port = 1\n")
    environment = {"COHABIT_HTTP_PORT": "2", "COHABIT_GRPC_PORT": "2"}
    found = config(*NEEDED, "--config", path, "--http-port", "3", environment=environment)
    assert (found.http_port, found.grpc_port, found.metrics_port) == (3, 2, 1)


def test_a_file_alone_is_enough(tmp_path: Path) -> None:
    path = file(tmp_path, 'repository = "zoo"\nmemory = "2GiB"\nbatch_sizes = [4, 1]\npack_weights = false\n')
    found = config("--config", path)
    assert (found.repository, found.memory) == (Path("zoo"), FixedSize(2 << 30))
    assert (found.batch_sizes, found.pack_weights) == ((1, 4), False)


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    path = file(tmp_path, 'repository = "zoo"\n')
    found = config(environment={"COHABIT_CONFIG": path, "COHABIT_MEMORY": "64MiB", "COHABIT_PACK_WEIGHTS": "no"})
    assert (found.repository, found.memory, found.pack_weights) == (Path("zoo"), FixedSize(64 << 20), False)


def test_a_flag_that_repeats_the_default_is_still_a_flag() -> None:
    assert config(*NEEDED, "--http-port", "8000", environment={"COHABIT_HTTP_PORT": "1"}).http_port == 8000


def test_rates_of_models_are_merged_and_the_upper_layer_wins(tmp_path: Path) -> None:
    path = file(tmp_path, "[models.a]\nrate = 1\n[models.b]\nrate = 2.5\n")
    found = config(*NEEDED, "--config", path, "--model-rate", "a=7", environment={"COHABIT_MODEL_RATE": "c=3"})
    assert found.model_rates == {"a": 7.0, "b": 2.5, "c": 3.0}


def test_models_tables_say_what_is_loaded(tmp_path: Path) -> None:
    path = file(tmp_path, 'model_control = "explicit"\n[models.a]\nload = true\n[models.b]\nload = false\n')
    assert config(*NEEDED, "--config", path).load_models == ("a",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http_prot = 1", "http_prot in FILE: there is no such setting"),
        ("http_port = 70000", "http_port in FILE: '70000' is not a whole number"),
        ("http_port = true", "http_port in FILE: it must be a text or a number"),
        ("pack_weights = 1", "pack_weights in FILE: it must be true or false"),
        ("load_model = true", "load_model in FILE: it must be a list"),
        (
            "layout = 'flat'",
            "layout in FILE: 'flat' is none of partitioned, resident, time_shared, pipelined, lru, on_demand",
        ),
        ("[http]\nport = 1", "http in FILE: there is no such setting"),
        ("models = 3", "models in FILE: it must be a table of models"),
        ("[models]\na = 3", "[models.a] in FILE: it must be a table"),
        ("[models.a]\nrat = 3", "[models.a] in FILE: a model has no setting 'rat'; there are rate and load"),
        ("[models.a]\nrate = '3'", "[models.a] in FILE: rate must be a number of requests per second"),
        ("[models.a]\nrate = -3", "[models] in FILE: '-3' is not a rate in requests per second"),
        ("http_port = ", "--config: FILE is not TOML: Invalid value"),
    ],
)
def test_what_a_file_gets_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = file(tmp_path, text)
    assert refused(*NEEDED, "--config", path).startswith(message.replace("FILE", path))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("COHABIT_HTTP_PROT", "1", "COHABIT_HTTP_PROT: there is no such setting"),
        ("COHABIT_http_port", "1", "COHABIT_http_port: there is no such setting"),
        ("COHABIT_HTTP_PORT", "x", "COHABIT_HTTP_PORT: 'x' is not a whole number"),
        ("COHABIT_STORE", "tape", "COHABIT_STORE: 'tape' is none of ram, file"),
        ("COHABIT_PACK_WEIGHTS", "maybe", "COHABIT_PACK_WEIGHTS: 'maybe' is neither true nor false"),
        ("COHABIT_CONFIG", "/nowhere.toml", "--config: /nowhere.toml cannot be read: No such file"),
    ],
)
def test_what_the_environment_gets_wrong_is_named(variable: str, value: str, message: str) -> None:
    assert refused(*NEEDED, environment={variable: value}).startswith(message)


def test_flags_that_are_wrong_are_named_as_flags() -> None:
    assert refused(*NEEDED, "--http-port", "x").startswith("--http-port: 'x'")


def test_what_is_missing_is_named_with_the_ways_to_give_it() -> None:
    message = refused("models")
    assert message.startswith("--memory is missing")
    assert "COHABIT_MEMORY" in message


def test_variables_that_kubernetes_sets_for_a_service_are_ignored() -> None:
    links = {"COHABIT_SERVICE_HOST": "10.0.0.1", "COHABIT_PORT": "tcp://10.0.0.1", "COHABIT_PORT_8000_TCP": "x"}
    assert config(*NEEDED, environment=links) == config(*NEEDED)


def test_what_is_printed_reads_back_to_the_same_config_and_names_origins(tmp_path: Path) -> None:
    path = file(tmp_path, 'load_model = ["a", "b"]\nmodel_control = "explicit"\n[models.a]\nrate = 2\n')
    found = effective(*NEEDED, "--config", path, environment={"COHABIT_MODEL_RATE": "a=3,b=1"})
    printed = as_toml(found)
    assert config("--config", file(tmp_path, printed)) == found.config
    assert tomllib.loads(printed)["model_rate"] == ["a=3", "b=1"]
    origins = {line.partition(" =")[0]: line.rpartition("# ")[2] for line in printed.splitlines()}
    assert origins["memory"] == "--memory"
    assert origins["model_rate"] == "COHABIT_MODEL_RATE"
    assert origins["load_model"] == f"load_model in {path}"
    assert origins["store"] == "default"


def test_print_config_prints_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such/folder", "--memory", "64MiB", "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["memory"] == "64MiB"


def test_every_setting_reads_back_from_its_encoding_and_its_printed_form(tmp_path: Path) -> None:
    given = {
        "--host": "::1",
        "--model-rate": "a=2.5",
        "--model-control": "explicit",
        "--load-model": "a",
        "--link-bandwidth": "400MB/s",
        "--token-file": "infer.tokens",
        "--tls-cert": "cert.pem",
        "--tls-key": "key.pem",
        "--grpc-port": "off",
        "--metrics-port": "off",
        "--http-unix": "http.sock",
        "--max-connection-age": "60",
        "--engine": "in-process",
    }
    found = effective(*NEEDED, *(part for pair in given.items() for part in pair))
    assert decode_config(encode_config(found.config)) == found.config
    assert config("--config", file(tmp_path, as_toml(found))) == found.config
    share = ServeConfig(Path("models"), ShareOfWeights(0.25))
    assert decode_config(encode_config(share)) == share
    assert {s.key for s in SETTINGS} == found.values.keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--load-model", "a"), "--load-model needs --model-control explicit"),
        (("--model-control", "poll", "--layout", "lru"), "--model-control poll needs a layout"),
        (("--compute-lanes", "2", "--layout", "lru"), "--compute-lanes 2 needs a layout"),
        (("--model-control", "explicit", "--memory", "25%"), "--memory: a share of the weights"),
        (("--tls-cert", "c"), "--tls-cert and --tls-key need each other"),
        (("--tls-key", "k"), "--tls-cert and --tls-key need each other"),
        (("--tls-client-ca", "ca"), "--tls-client-ca needs --tls-cert"),
        (("--frontends", "2", "--engine", "in-process"), "--frontends 2 needs --engine process"),
        (("--frontends", "2", "--grpc-port", "0"), "--frontends 2 needs fixed ports"),
        (("--http-unix", "s", "--grpc-unix", "s"), "--http-unix and --grpc-unix need different paths"),
        (("--watchdog", "-1"), "--watchdog: '-1' is not a number of seconds"),
    ],
)
def test_contradictions_are_refused(flags: tuple[str, ...], message: str) -> None:
    assert refused(*NEEDED, *flags).startswith(message)


def test_clients_may_name_shared_memory_where_every_address_is_loopback() -> None:
    local = config(*NEEDED, "--host", "localhost", "--host", "::1")
    assert local.hosts == ("localhost", "::1")
    assert local.takes_client_shm
    assert not config(*NEEDED, "--host", "127.0.0.1", "--host", "10.0.0.1").takes_client_shm
    assert not config(*NEEDED, "--client-shm", "off").takes_client_shm


def test_process_memory_stands_for_memory_and_bounds_the_queue(tmp_path: Path) -> None:
    found = effective("models", "--process-memory", "320MiB")
    assert found.config.process_memory_bytes == 320 << 20
    assert found.config.queue_bytes == 20 << 20
    assert config("--config", file(tmp_path, as_toml(found))) == found.config
    given = config("models", "--process-memory", "320MiB", "--queue-memory", "5MiB")
    assert given.queue_bytes == 5 << 20
    assert refused(*NEEDED, "--process-memory", "320MiB") == "--memory and --process-memory: give one of them"
    assert "--device cpu" in refused("models", "--process-memory", "1GiB", "--device", "cuda")
