"""Settings of `cohabit serve`: four sources, one outcome, and errors that name the origin of a value."""

import argparse
import socket
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from cohabit.server.cli import COMMANDS, main
from cohabit.server.config.config import SETTINGS, ServeConfig, decode_config, encode_config
from cohabit.server.config.sizes import FixedSize, ShareOfWeights
from cohabit.server.config.sources import ResolvedConfig, add_flags, as_toml, read_settings
from cohabit.server.errors import ConfigError
from tests.support.server.server_fakes import identity, running, serving

pytestmark = pytest.mark.process

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
    path = file(tmp_path, 'repository = "zoo"\nmemory = "2GiB"\nbatch_sizes = [4, 1]\nquick_start = false\n')
    found = config("--config", path)
    assert (found.repository, found.memory) == (Path("zoo"), FixedSize(2 << 30))
    assert (found.batch_sizes, found.quick_start) == ((1, 4), False)


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    path = file(tmp_path, 'repository = "zoo"\n')
    variables = {"COHABIT_CONFIG": path, "COHABIT_MEMORY": "64MiB", "COHABIT_QUICK_START": "no"}
    planners_own = {"COHABIT_INTERPRET": "1"}
    found = config(environment=variables | planners_own)
    assert (found.repository, found.memory, found.quick_start) == (Path("zoo"), FixedSize(64 << 20), False)


def test_a_flag_that_repeats_the_default_is_still_a_flag() -> None:
    assert config(*NEEDED, "--http-port", "8000", environment={"COHABIT_HTTP_PORT": "1"}).http_port == 8000


def test_rates_of_models_are_merged_and_the_upper_layer_wins(tmp_path: Path) -> None:
    path = file(tmp_path, 'rates = ["a=1", "b=2.5"]\n')
    found = config(*NEEDED, "--config", path, "--rates", "a=7", environment={"COHABIT_RATES": "c=3"})
    assert found.model_rates == {"a": 7.0, "b": 2.5, "c": 3.0}


def test_a_file_of_rates_takes_the_place_of_its_lines(tmp_path: Path) -> None:
    rates = tmp_path / "rates.txt"
    rates.write_text("# measured\na=5\n\nb=0.5  # rare\n")
    path = file(tmp_path, f'rates = ["{rates}", "b=1"]\n')
    assert config(*NEEDED, "--config", path).model_rates == {"a": 5.0, "b": 1.0}
    assert config(*NEEDED, "--config", path, "--rates", "a=7").model_rates == {"a": 7.0, "b": 1.0}
    assert config(*NEEDED, "--config", path, "--rates", str(rates)).model_rates == {"a": 5.0, "b": 0.5}
    rates.write_text("a=5\nb\n")
    with pytest.raises(ConfigError, match=r"--rates: .*, line 2: 'b' is not of the form NAME=RATE"):
        config(*NEEDED, "--rates", str(rates))


def test_earlier_names_of_settings_work_in_every_source(tmp_path: Path) -> None:
    path = file(tmp_path, 'model_control = "poll"\n')
    found = config(*NEEDED, "--config", path, "--exit-timeout", "3", environment={"COHABIT_POLL_INTERVAL": "2"})
    assert (found.model_control, found.poll_interval_s, found.exit_timeout_s) == ("poll", 2.0, 3.0)
    assert config(*NEEDED, "--model-control", "poll") == config(*NEEDED, "--model-control-mode", "poll")


def test_there_are_at_most_40_settings_and_each_is_told_in_one_sentence() -> None:
    assert len(SETTINGS) <= 40
    for setting in SETTINGS:
        assert setting.help[0].islower() or setting.help.startswith("CPU"), setting.flag
        assert ". " not in setting.help, setting.flag
        assert len(setting.help.split()) <= 40, setting.flag


def test_a_unix_folder_is_listened_on_in_addition_to_the_addresses() -> None:
    alone, added = (
        config(*NEEDED, "--host", "unix:/run/c"),
        config(*NEEDED, "--host", "::", "--host", "unix:/run/c"),
    )
    assert (alone.addresses, alone.unix_folder) == (("127.0.0.1",), Path("/run/c"))
    assert (added.addresses, added.unix_folder) == (("::",), Path("/run/c"))
    assert alone.is_loopback
    assert config(*NEEDED).unix_folder is None


def test_the_unix_folder_has_a_socket_for_each_protocol(tmp_path: Path) -> None:
    sockets = [tmp_path / "http.sock", tmp_path / "grpc.sock"]
    with running(serving(identity("id", "FP32")), hosts=(f"unix:{tmp_path}",)) as own:
        assert own.server.http_url.startswith("http://127.0.0.1:")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(sockets[0]))
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b'{"live":true}' in b"".join(iter(lambda: client.recv(4096), b""))
        with grpc.insecure_channel(f"unix:{sockets[1]}") as channel:
            assert service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest()).live
    assert not any(path.exists() for path in sockets)


def test_only_one_kind_of_store_leaves_reads_unverified() -> None:
    kinds = {store: config(*NEEDED, "--store", store) for store in ("ram", "file", "verified-file")}
    assert {store: found.store_kind for store, found in kinds.items()} == {
        "ram": "ram",
        "file": "file",
        "verified-file": "file",
    }
    assert [store for store, found in kinds.items() if not found.verifies_reads] == ["file"]


def test_tracing_is_set_as_in_triton() -> None:
    found = config(*NEEDED, "--trace-config", "triton,file=a=b.json", "--trace-config", "rate=7")
    assert (found.trace_file, found.trace_rate) == (Path("a=b.json"), 7)
    given = config(*NEEDED, environment={"COHABIT_TRACE_CONFIG": "file=t.json"})
    assert (given.trace_file, given.trace_rate) == (Path("t.json"), 1000)
    assert config(*NEEDED).trace_file is None
    collected = config(*NEEDED, "--trace-config", "opentelemetry,url=http://here:4318", "--trace-config", "rate=2")
    assert (collected.collector, collected.trace_rate) == ("http://here:4318", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http_prot = 1", "http_prot in FILE: there is no such setting"),
        ("http_port = 70000", "http_port in FILE: '70000' is not a whole number"),
        ("http_port = true", "http_port in FILE: it must be a text or a number"),
        ("quick_start = 1", "quick_start in FILE: it must be true or false"),
        ("load_model = true", "load_model in FILE: it must be a list"),
        (
            "layout = 'flat'",
            "layout in FILE: 'flat' is none of partitioned, elastic, resident, time_shared, pipelined, lru, on_demand",
        ),
        ("[http]\nport = 1", "http in FILE: there is no such setting"),
        ("[models.a]\nrate = 3", "models in FILE: there is no such setting"),
        ("rates = ['a=-3']", "rates in FILE: '-3' is not a rate in requests per second"),
        ("trace_config = ['rate=0']", "trace_config in FILE: '0' is not a whole number"),
        ("trace_config = ['otlp=collector']", "trace_config in FILE: 'otlp=collector' has no URL of a collector"),
        ("trace_config = ['level=OFF']", "trace_config in FILE: 'level=OFF' is neither file=F"),
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
        ("COHABIT_QUICK_START", "maybe", "COHABIT_QUICK_START: 'maybe' is neither true nor false"),
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


def test_without_memory_the_whole_server_takes_what_is_left() -> None:
    def taking_what_is_left(*flags: str) -> ResolvedConfig:
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_flags(parser)
        return read_settings(parser.parse_args(["models", *flags]), {}, lambda: (3 << 30, "this machine"))

    found = taking_what_is_left()
    assert found.takes_memory_left
    assert (found.config.process_memory_bytes, found.config.memory) == (3 << 30, FixedSize(3 << 30))
    assert 'process_memory = "3GiB"' in as_toml(found)
    assert found.origins["process_memory"] == found.origins["memory"] == "what this machine has left"
    for given in (("--memory", "25%"), ("--process-memory", "1GiB")):
        assert not taking_what_is_left(*given).takes_memory_left
    with pytest.raises(ConfigError, match="--memory is missing"):
        taking_what_is_left("--device", "cuda")


def test_what_is_printed_reads_back_to_the_same_config_and_names_origins(tmp_path: Path) -> None:
    path = file(tmp_path, 'load_model = ["a", "b"]\nmodel_control = "explicit"\nrates = ["a=2"]\n')
    found = effective(*NEEDED, "--config", path, environment={"COHABIT_RATES": "a=3,b=1"})
    printed = as_toml(found)
    assert config("--config", file(tmp_path, printed)) == found.config
    assert tomllib.loads(printed)["rates"] == ["a=3", "b=1"]
    origins = {line.partition(" =")[0]: line.rpartition("# ")[2] for line in printed.splitlines()}
    assert origins["memory"] == "--memory"
    assert origins["rates"] == "COHABIT_RATES"
    assert origins["load_model"] == f"load_model in {path}"
    assert origins["store"] == "default"


def test_print_config_prints_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no/such/folder", "--memory", "64MiB", "--print-config"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["memory"] == "64MiB"


def test_every_setting_reads_back_from_its_encoding_and_its_printed_form(tmp_path: Path) -> None:
    given = {
        "--rates": "a=2.5",
        "--model-control": "explicit",
        "--load-model": "a",
        "--link-bandwidth": "400MB/s",
        "--token-file": "infer.tokens",
        "--tls-cert": "cert.pem",
        "--tls-key": "key.pem",
        "--grpc-port": "off",
        "--metrics-port": "off",
        "--host": "unix:/run/cohabit",
        "--trace-config": "file=t.json",
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
        (("--load-model", "a"), "--load-model needs --model-control-mode explicit"),
        (("--model-control", "poll", "--layout", "lru"), "--model-control-mode poll needs a layout"),
        (("--compute-lanes", "2", "--layout", "lru"), "--compute-lanes 2 needs a layout"),
        (("--model-control", "explicit", "--memory", "25%"), "--memory: a share of the weights"),
        (("--tls-cert", "c"), "--tls-cert and --tls-key need each other"),
        (("--tls-key", "k"), "--tls-cert and --tls-key need each other"),
        (("--tls-client-ca", "ca"), "--tls-client-ca needs --tls-cert"),
        (("--host", "unix:a", "--host", "unix:b"), "--host: give one folder for Unix sockets"),
        (("--trace-config", "rate=1"), "--trace-config rate= needs --trace-config file=FILE or otlp=URL"),
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


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["sreve", "models"], "serve"),
        (["serve", "models", "--memroy", "1GiB"], "--memory"),
        (["serve", "models", "--memroy=1GiB"], "--memory"),
        (["serve", "models", "--memory", "1GiB", "--layout", "partitoned"], "partitioned"),
        (["export-bundle", "models", "-o", "bundle", "--memroy", "1GiB"], "--memory"),
        (["cache", "remesure", "models/resnet50"], "remeasure"),
        (["cache", "rm", "--unusedby", "models"], "--unused-by"),
        (["cache", "ls", "--cahce", "folder"], "--cache"),
        (["--verison"], "--version"),
    ],
)
def test_a_mistyped_word_of_the_command_line_is_answered_with_the_one_meant(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "error: " in said
    assert said.endswith(f"; did you mean '{meant}'?\n")


def test_words_like_no_other_get_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["xyzzy"], ["serve", "models", "--xyzzy"], ["serve", "models", "more"], ["load", "--u", "x"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "did you mean" not in capsys.readouterr().err


def test_a_mistyped_model_is_answered_with_its_neighbour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "resnet50" / "1").mkdir(parents=True)
    assert main(["check", str(tmp_path / "resnt50")]) == 2
    assert "did you mean 'resnet50'?" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_has_every_command_and_its_flags(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    missing = [name for name in COMMANDS if name not in script]
    missing += [s.flag for s in SETTINGS if s.flag.startswith("--") and s.flag.removeprefix("--") not in script]
    assert not missing


def test_bash_completes_commands_choices_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "models").mkdir()
    complete = """
        complete_words() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _shtab_cohabit
            echo "${COMPREPLY[@]}"
        }
        complete_words cohabit che
        complete_words cohabit serve --layout pa
        complete_words cohabit serve mod
    """
    script = capsys.readouterr().out + complete
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ran.stdout.split("\n")[:3] == ["check", "partitioned", "models"]
