"""Model repositories in Triton's layout, sound and otherwise."""

import os
from pathlib import Path

import pytest
from google.protobuf import text_format

from cohabit.planner.shapes import Bucket
from cohabit.server.errors import RepositoryError
from cohabit.server.file_state import FileState
from cohabit.server.ipc.model import GraphCapture, ModelInfo, TensorSpec
from cohabit.server.repository.scan import scan, versions_of
from cohabit.server.repository.sources import ModelSource, Unloadable
from cohabit.server.triton.model_config import ModelConfig, config_as_json, config_mismatch, config_of

INFO = ModelInfo("m", 1, (TensorSpec("x", "FP32", (3, 4)),), (TensorSpec("y", "INT64", ()),), max_batch_size=8)


def add(repository: Path, name: str, *versions: str, config: str | None = None) -> Path:
    for version in versions:
        (repository / name / version).mkdir(parents=True)
        (repository / name / version / "model.pt2").write_bytes(b"")
    if config is not None:
        (repository / name).mkdir(exist_ok=True)
        (repository / name / "config.pbtxt").write_text(config)
    return repository / name


def only(repository: Path) -> ModelSource | Unloadable:
    (model,) = scan(repository)
    return model


def reason(repository: Path) -> str:
    model = only(repository)
    assert isinstance(model, Unloadable)
    return model.reason


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_highest_version_is_served_by_number(tmp_path: Path) -> None:
    add(tmp_path, "m", "2", "10", "9")
    path = (tmp_path / "m" / "10" / "model.pt2").resolve()
    assert only(tmp_path) == ModelSource("m", 10, path, state=FileState.of(path))


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", [10]),
        ("version_policy { latest { } }", [10]),
        ("version_policy { latest { num_versions: 2 } }", [9, 10]),
        ("version_policy { latest { num_versions: 7 } }", [2, 9, 10]),
        ("version_policy { all { } }", [2, 9, 10]),
        ("version_policy { specific { versions: [9, 2, 4, 9] } }", [2, 9]),
    ],
)
def test_the_policy_chooses_the_versions(tmp_path: Path, policy: str, versions: list[int]) -> None:
    add(tmp_path, "m", "2", "10", "9", config=policy)
    found = [model for model in scan(tmp_path) if isinstance(model, ModelSource)]
    assert [(model.name, model.version) for model in found] == [("m", version) for version in versions]
    assert sum(model.rate_share for model in found) == pytest.approx(1.0)
    assert versions_of(tmp_path, "m") == found
    assert [entry.version for entry in versions_of(tmp_path, "m", exactly={10, 2})] == [2, 10]


def test_a_version_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    add(tmp_path, "m", "1", "3", config="version_policy { all { } }")
    (tmp_path / "m" / "2").mkdir()
    assert [type(entry) for entry in scan(tmp_path)] == [ModelSource, Unloadable, ModelSource]
    assert scan(tmp_path)[1] == Unloadable("m", "it has no file model.pt2", 2)


def test_a_version_is_the_same_until_its_file_or_the_configuration_changes(tmp_path: Path) -> None:
    folder = add(tmp_path, "m", "1", config="max_batch_size: 4 output { name: 'y' label_filename: 'labels' }")
    (folder / "labels").write_text("cat")
    before = only(tmp_path)
    assert only(tmp_path) == before
    for path, text in (("1/model.pt2", "new"), ("labels", "dog"), ("config.pbtxt", "max_batch_size: 8")):
        (folder / path).write_text(text)
        assert only(tmp_path) != before
        before = only(tmp_path)


def test_policy_for_versions_that_are_not_there(tmp_path: Path) -> None:
    add(tmp_path, "m", "1", config="version_policy: { specific: { versions: [4] } }")
    assert reason(tmp_path) == "version_policy asks for [4], the versions are [1]"


def test_what_is_no_version_is_skipped(tmp_path: Path) -> None:
    model = add(tmp_path, "m", "1", "0", "007", "latest", "-2")
    (model / "3").write_text("a file")
    found = only(tmp_path)
    assert isinstance(found, ModelSource)
    assert found.version == 1


def test_hidden_folders_and_files_are_skipped(tmp_path: Path) -> None:
    add(tmp_path, "m", "1")
    add(tmp_path, ".git", "1")
    (tmp_path / "README.md").touch()
    assert isinstance(only(tmp_path), ModelSource)


def test_models_come_by_name(tmp_path: Path) -> None:
    for name in ("zebra", "ant", "Bee_2.5-b"):
        add(tmp_path, name, "1")
    assert [model.name for model in scan(tmp_path)] == ["Bee_2.5-b", "ant", "zebra"]


def test_one_bad_model_does_not_hide_the_others(tmp_path: Path) -> None:
    add(tmp_path, "good", "1")
    add(tmp_path, "bad", config="name: ")
    bad, good = scan(tmp_path)
    assert isinstance(bad, Unloadable)
    assert isinstance(good, ModelSource)


@pytest.mark.parametrize("name", ["a b", "-rf", "é", "a'b", "a\nb"])
def test_names_are_validated(tmp_path: Path, name: str) -> None:
    add(tmp_path, name, "1")
    assert "is not usable" in reason(tmp_path)


def test_folder_without_a_program(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert only(tmp_path) == Unloadable("m", "it has no file model.pt2", 1)


def test_folder_without_versions(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert "no version folder" in reason(tmp_path)


def test_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to(tmp_path / "gone")
    assert "leads nowhere" in reason(tmp_path)


def test_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="gone does not exist"):
        scan(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(RepositoryError, match="cannot be read"):
        scan(tmp_path / "file")


@pytest.mark.parametrize("part", ["ranker", "ranker/1", "ranker/1/model.pt2"])
def test_a_part_of_a_repository_names_the_repository(tmp_path: Path, part: str) -> None:
    add(tmp_path, "ranker", "1")
    with pytest.raises(RepositoryError, match=f"not a repository of models; .*: cohabit serve {tmp_path}$"):
        scan(tmp_path / part)


def test_a_model_may_be_named_like_a_version(tmp_path: Path) -> None:
    add(tmp_path, "1", "1")
    assert [source.name for source in scan(tmp_path)] == ["1"]


def test_empty_repository(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"is empty; put models there as NAME/1/model\.pt2"):
        scan(tmp_path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('nme: "m"', "no field named"),
        ("max_batch_size: many", "config.pbtxt is not a ModelConfig"),
        ("input [ {", "config.pbtxt is not a ModelConfig"),
        ("max_batch_size: 99999999999", "config.pbtxt is not a ModelConfig"),
        ('name: "other"', "config.pbtxt names the model 'other', its folder 'm'"),
        ("input " + "{ reshape " * 5000, "config.pbtxt is not a ModelConfig"),
    ],
)
def test_bad_config_is_the_models_reason(tmp_path: Path, text: str, part: str) -> None:
    add(tmp_path, "m", "1", config=text)
    assert part in reason(tmp_path)


def test_label_files_are_read_with_the_model(tmp_path: Path) -> None:
    folder = add(
        tmp_path, "m", "1", config="output { name: 'y' label_filename: 'labels.txt' } output { name: 'z' }"
    )
    (folder / "labels.txt").write_bytes("cat\r\n\ngrüner Hund\n".encode())
    (model,) = scan(tmp_path)
    assert isinstance(model, ModelSource)
    assert model.labels == {"y": ("cat", "", "grüner Hund")}


@pytest.mark.parametrize(
    "name", ["gone.txt", "../other/labels.txt", "/etc/hostname", "1", "link", "latin", "large"]
)
def test_label_files_that_are_refused(tmp_path: Path, name: str) -> None:
    folder = add(tmp_path / "repository", "m", "1", config=f"output {{ name: 'y' label_filename: '{name}' }}")
    (tmp_path / "labels.txt").touch()
    (folder / "link").symlink_to(tmp_path / "labels.txt")
    (folder / "latin").write_bytes(b"\xff")
    (folder / "large").write_bytes(bytes((1 << 20) + 1))
    assert name.rpartition("/")[2] in reason(tmp_path / "repository")


def test_a_pooling_that_is_not_known_keeps_the_model_from_loading(tmp_path: Path) -> None:
    add(tmp_path, "m", "1", config="parameters { key: 'pooling' value { string_value: 'weighted' } }")
    assert reason(tmp_path) == "config.pbtxt: parameter 'pooling': 'weighted' is none of mean, cls, lasttoken, max"


def test_config_that_is_not_text(tmp_path: Path) -> None:
    (add(tmp_path, "m", "1") / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    assert "config.pbtxt cannot be read" in reason(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        'name: "m" platform: "pytorch_pt2" max_batch_size: 8',
        "max_batch_size: 4 input [{ name: 'x' data_type: TYPE_FP32 dims: [3, 4] }]",
        "max_batch_size: 8 input [{ name: 'x' data_type: TYPE_FP32 dims: [-1, 4] }]",
        "input [{ name: 'x' data_type: TYPE_FP32 dims: [-1, 3, 4] }]",
        "max_batch_size: 8 output [{ name: 'y' data_type: TYPE_INT64 }]",
    ],
)
def test_config_that_agrees(text: str) -> None:
    assert config_mismatch(config(text), INFO) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "q"', "names the model 'q'"),
        ("max_batch_size: 9", "has max_batch_size 9, the program takes at most 8"),
        ("max_batch_size: 8 input [{ name: 'q' data_type: TYPE_FP32 }]", "has input 'q', the program has x"),
        (
            "max_batch_size: 8 input [{ name: 'x' data_type: TYPE_FP16 dims: [3, 4] }]",
            "says TYPE_FP16 for input 'x', the program TYPE_FP32",
        ),
        (
            "max_batch_size: 8 input [{ name: 'x' data_type: TYPE_FP32 dims: [4, 3] }]",
            "says dims [4, 3] for input 'x', the program [3, 4]",
        ),
        (
            "max_batch_size: 8 output [{ name: 'y' data_type: TYPE_INT64 dims: [1] }]",
            "says dims [1] for output 'y'",
        ),
    ],
)
def test_config_that_disagrees(text: str, message: str) -> None:
    assert message in (config_mismatch(config(text), INFO) or "")


def test_completed_config_is_tritons_json() -> None:
    written = config_as_json(config_of(INFO, config("parameters { key: 'a' value { string_value: 'b' } }")))
    assert written["name"] == "m"
    assert written["max_batch_size"] == 8
    assert written["version_policy"] == {"latest": {"num_versions": 1}}
    assert written["input"][0]["data_type"] == "TYPE_FP32"
    assert written["input"][0]["dims"] == [3, 4]
    assert written["output"][0]["dims"] == []
    assert written["parameters"] == {"a": {"string_value": "b"}}
    (group,) = written["instance_group"]
    assert (group["name"], group["kind"], group["count"], group["gpus"]) == ("m_0", "KIND_CPU", 1, [])
    assert written["optimization"] == {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    }


def test_numbers_of_a_config_are_numbers_in_json() -> None:
    text = """
        version_policy { specific { versions: [ 1, 2 ] } }
        dynamic_batching {
          max_queue_delay_microseconds: 500 priority_levels: 2 default_priority_level: 1
          default_queue_policy { default_timeout_microseconds: 7 }
          priority_queue_policy { key: 2 value { default_timeout_microseconds: 8 } }
        }
        model_warmup { inputs { key: "x" value { dims: [ 3 ] } } }
        metric_tags { key: "a" value: "1" }
    """
    written = config_as_json(config_of(INFO, config(text)))
    assert written["version_policy"]["specific"]["versions"] == [1, 2]
    batching = written["dynamic_batching"]
    assert (batching["max_queue_delay_microseconds"], batching["priority_levels"]) == (500, 2)
    assert batching["default_queue_policy"]["default_timeout_microseconds"] == 7
    assert batching["priority_queue_policy"]["2"]["default_timeout_microseconds"] == 8
    assert written["model_warmup"][0]["inputs"]["x"]["dims"] == [3]
    assert written["metric_tags"] == {"a": "1"}


def test_the_configuration_says_how_each_batch_is_issued() -> None:
    captures = {
        Bucket(1): GraphCapture(2, 4096, None),
        Bucket(8): GraphCapture(0, 0, "op item reads a number on the host"),
    }
    written = config_as_json(config_of(INFO, captures=captures))
    assert written["parameters"] == {
        "cohabit.execution.batch_1": {"string_value": "one graph; 2 of them take 4096 bytes"},
        "cohabit.execution.batch_8": {
            "string_value": "issued to the streams one by one: op item reads a number on the host"
        },
    }


def test_a_file_that_was_written_or_replaced_is_another(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    assert FileState.of(path) is None
    path.write_bytes(b"abc")
    before = FileState.of(path)
    assert before == FileState.of(path)
    os.utime(path, ns=(1, 1))
    assert FileState.of(path) != before
    replacement = tmp_path / "new"
    replacement.write_bytes(b"xyz")
    os.replace(replacement, path)
    assert FileState.of(path) != before
