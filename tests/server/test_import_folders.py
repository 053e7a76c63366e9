"""What `cohabit import` makes of Hugging Face directories, and the reason where one is refused."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import save_file

from cohabit.server.cli import main
from cohabit.server.commands.import_model import _default_name
from cohabit.server.errors import ImportFailed
from cohabit.server.importing import huggingface
from cohabit.server.importing.adapter import base_of, merge
from cohabit.server.importing.exporting import export
from cohabit.server.importing.folder_files import cached_folder, require_own_files
from cohabit.server.importing.huggingface_inputs import Lengths
from cohabit.server.triton.config_fields import pooling_of
from cohabit.server.triton.model_config import read_config
from tests.support.server.import_modules import HERE, Code, X

pytestmark = pytest.mark.process


def test_a_hubs_name_is_looked_up_in_the_local_cache_alone(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "hub")
    said = refused("someone/encoder")
    assert "someone/encoder is neither a path here nor in the local Hugging Face cache" in said
    assert "importing never uses the network: download it with `hf download someone/encoder`" in said
    folder = Path("hub/models--someone--encoder/snapshots/1234")
    tiny(str(folder))
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_text("1234")
    assert cached_folder("someone/encoder").resolve() == folder.resolve()
    assert _default_name(argparse.Namespace(path="someone/encoder")) == "encoder"


def test_a_text_models_tokenizer_and_pooling_come_with_it(imported: Any) -> None:
    tiny("bert")
    state = transformers.BertModel.from_pretrained("bert").state_dict()
    torch.save(state, "bert/pytorch_model.bin")  # a pickle of tensors alone is taken
    Path("bert/model.safetensors").unlink()
    Path("bert/tokenizer.json").write_text("a tokenizer")
    Path("bert/1_Pooling").mkdir()
    Path("bert/1_Pooling/config.json").write_text(
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    Path("bert/modules.json").write_text("[]")
    said = " ".join(imported("bert").split())
    assert "of modules.json, /v1/embeddings pools (cls) and normalises" in said
    assert """curl localhost:8000/v1/embeddings --data '{"model": "bert", "input": "some text"}'""" in said
    assert Path("models/bert/tokenizer.json").read_text() == "a tokenizer"
    assert pooling_of(read_config(Path("models/bert/config.pbtxt"))) == "cls"


@pytest.mark.parametrize(
    ("pooling", "modules", "found"),
    [
        ({"pooling_mode": "cls"}, ["Pooling", "Normalize"], "cls"),
        ({"pooling_mode": ["max"], "include_prompt": True}, ["Pooling"], "max"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ["Pooling"], "lasttoken"),
        ({"pooling_mode_max_tokens": True, "include_prompt": True}, ["Pooling"], "max"),
        ({"word_embedding_dimension": 8}, ["Pooling"], "mean"),
        ({"pooling_mode": "weightedmean"}, ["Pooling"], "it pools by weightedmean; supported are"),
        ({"pooling_mode": ["cls", "mean"]}, ["Pooling"], "it pools by cls, mean; supported are"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            ["Pooling"],
            "it pools by mean, max; supported are",
        ),
        ({"pooling_mode": "mean"}, ["Pooling", "Dense", "Normalize"], "its modules.json has Dense, which is not"),
    ],
)
def test_embeddings_are_those_of_sentence_transformers_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: Mapping[str, Any], modules: Sequence[str], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("bert")
    Path("bert/tokenizer.json").write_text("a tokenizer")
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    written = [
        {"idx": n, "name": str(n), "path": paths.get(kind, f"{n}_{kind}"), "type": f"sentence_transformers.{kind}"}
        for n, kind in enumerate(["Transformer", *modules])
    ]
    Path("bert/modules.json").write_text(json.dumps(written))
    Path("bert/1_Pooling").mkdir()
    Path("bert/1_Pooling/config.json").write_text(json.dumps(pooling))
    subject = huggingface.from_folder(Path("bert"))
    if " " in found:
        (note,) = subject.notes
        assert note.startswith(f"it has no /v1/embeddings, which would differ from sentence-transformers: {found}")
        assert (subject.tokenizer, subject.pooling) == (None, None)
    else:
        assert subject.tokenizer is not None
        assert subject.pooling == found


def save(folder: str, architecture: str, **sizes: Any) -> None:
    """Write a model with random weights, as `save_pretrained` does."""
    model = getattr(transformers, architecture)
    model(model.config_class(**sizes)).save_pretrained(folder)


def tiny(folder: str, architecture: str = "BertModel", **changes: Any) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    save(folder, architecture, num_hidden_layers=1, max_position_embeddings=16, **sizes)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_cannot_be_imported_says_why(refused: Any) -> None:
    tiny("bert")
    assert "--sequence-length is 17, the model has 16 positions" in refused("bert", "--sequence-length", "17")
    tiny("roberta", "RobertaModel")  # its positions begin after that of padding, which is 1
    assert "--sequence-length is 15, the model has 14 positions" in refused("roberta", "--sequence-length", "15")
    tiny("own", architectures=["MyModel"], auto_map={"AutoModel": "code.MyModel"})
    assert "has no architecture MyModel; its own code is never run" in refused("own")
    tiny("headless", architectures=["BertForSequenceClassification"])
    assert "its weights lack classifier.bias, classifier.weight" in refused("headless")
    tiny("quantized", quantization_config={"quant_method": "gptq"})
    assert "its weights are quantized" in refused("quantized")
    (Path("bert") / "model.safetensors").unlink()
    assert "bert has no weights: there is no *.safetensors in it" in refused("bert")
    torch.save({"embeddings": Code()}, "bert/pytorch_model.bin")
    assert "(a pickle; only its tensors are read)" in refused("bert", "--sequence-length", "4")
    save("t5", "T5Model", vocab_size=20, d_model=8, d_ff=8, num_layers=1, num_heads=1)
    said = refused("t5")
    assert "T5Model is an encoder with a decoder, which is not supported; its encoder alone" in said
    assert said.endswith("--architecture T5Stack"), "the way out"
    subject = huggingface.from_folder(Path("t5"), architecture="T5Stack")
    assert [given.name for given in subject.inputs] == ["input_ids", "attention_mask"]


def test_inputs_that_are_not_known_lead_to_their_declaration(refused: Any) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    save("canine", "CanineModel", **sizes, num_hash_buckets=16, max_position_embeddings=16)
    said = refused("canine")
    assert "the range of its input input_ids is not known, because CanineConfig has no vocab_size" in said
    assert said.endswith("declare every input with --input NAME:TYPE:DIMS (input_ids)")
    save("vilt", "ViltModel", vocab_size=20, image_size=32, **sizes)
    assert "what it computes depends on values, in" in refused("vilt")  # it selects the pixels' patches by a mask
    series = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1], "num_time_features": 2}
    save("informer", "InformerForPrediction", d_model=8, **series)
    said = refused("informer")
    assert (
        "InformerForPrediction also needs past_time_features, past_observed_mask, whose sizes are not known" in said
    )


def test_an_encoder_of_a_model_with_a_decoder_is_taken(tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    save(tmp_path, "T5EncoderModel", **sizes)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_encoder_decoder": True}))
    subject = huggingface.from_folder(tmp_path, (), Lengths(fixed=4))
    assert [given.name for given in subject.inputs] == ["input_ids", "attention_mask"]
    assert subject.notes == ()


def test_tensors_of_a_model_that_are_not_served_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("layout", "LayoutLMModel")
    (note,) = huggingface.from_folder(Path("layout")).notes
    assert note == (
        "the model also takes bbox, which the entry does not; declare every input with --input NAME:TYPE:DIMS"
    )
    for name in ("BertModel", "RobertaModel", "BertForSequenceClassification"):
        tiny(name, name)
        assert huggingface.from_folder(Path(name)).notes == ()


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("bert")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused("bert").endswith("need the package transformers; pip install 'transformers>=5'")


def test_a_name_without_an_owner_is_a_hubs_name_too(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "hub")
    said = refused("bert-base-uncased")
    assert "download it with `hf download bert-base-uncased`, or give its folder" in said


def test_a_text_model_without_a_largest_length_has_its_tokenizers_or_a_usual_one(refused: Any) -> None:
    save("t5", "T5EncoderModel", vocab_size=20, d_model=8, d_ff=8, num_layers=1, num_heads=1)
    subject = huggingface.from_folder(Path("t5"))
    assert subject.most_tokens == 512
    assert "512 tokens are the most, because nothing in the folder says more" in subject.notes[0]
    assert huggingface.from_folder(Path("t5"), (), Lengths(most=40)).most_tokens == 40
    Path("t5/tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    assert huggingface.from_folder(Path("t5")).most_tokens == 64
    Path("t5/tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    assert huggingface.from_folder(Path("t5")).most_tokens == 512
    tiny("bert")
    assert "--max-sequence-length is 17, the model has 16" in refused("bert", "--max-sequence-length", "17")
    both = ("--max-sequence-length", "8", "--sequence-length", "8")
    assert "contradict one another" in refused("bert", *both, status=2)


def clip(folder: str) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 12}
    text, vision = (
        {"vocab_size": 20, "projection_dim": 4, **tokens, **sizes},
        {"image_size": 16, "patch_size": 8, **sizes},
    )
    save(folder, "CLIPModel", text_config=text, vision_config=vision, projection_dim=4)


def test_a_folder_of_models_is_imported_with_a_line_for_each_and_failures_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("c", "a"):
        tiny(f"tuned/{name}")
    tiny("tuned/b")
    Path("tuned/b/config.json").write_text('{"model_type": "no such"}')
    Path("tuned/notes").mkdir()
    assert main(["import", "tuned", "--sequence-length", "4"]) == 1
    out, errors = capsys.readouterr()
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["models/a", "b", "models/c"]
    assert lines[3].startswith("2 of 3 models imported")
    assert errors.splitlines()[-1].startswith("b: tuned/b")
    assert main(["import", "tuned/[ac]*", "--sequence-length", "4", "--replace"]) == 0
    for arguments, reason in (
        (["tuned", "tuned/a"], "would both be the entry 'a'"),
        (["tuned", "--name", "x"], "--name is for one model"),
    ):
        assert main(["import", *arguments]) == 2
        assert reason in " ".join(capsys.readouterr().err.split())


LAYER = "encoder.layer.0."
"""Layers of BERT that adapters of the tests change."""


def adapter(folder: str, tensors: Mapping[str, torch.Tensor], **config: Any) -> None:
    """Write an adapter of the model in the folder `base`, as peft does."""
    Path(folder).mkdir()
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, f"{folder}/adapter_model.safetensors")
    given = {"peft_type": "LORA", "base_model_name_or_path": "base", "lora_alpha": 6, "r": 3}
    given["rank_pattern"] = {"word_embeddings": 2}
    Path(folder, "adapter_config.json").write_text(json.dumps(given | config))


def factors(layer: str, outputs: int, inputs: int, rank: int = 3) -> dict[str, torch.Tensor]:
    shapes = {"A": (rank, inputs), "B": (outputs, rank)}
    return {f"{layer}.lora_{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("config", "scale", "word_scale"),
    [
        ({}, 2.0, 3.0),
        ({"use_rslora": True}, 6 / 3**0.5, 6 / 2**0.5),
        ({"alpha_pattern": {"attention.self.query": 3}}, 1.0, 3.0),
        ({"alpha_pattern": {"self.key": 3, "layer.1.attention.self.query": 3}}, 2.0, 3.0),
    ],
)
def test_an_adapter_s_weights_are_those_merged_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], scale: float, word_scale: float
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("base")
    Path("base/tokenizer.json").write_text("the base's")
    query, head = f"bert.{LAYER}attention.self.query", torch.randn(5, 8)
    words = {"bert.embeddings.word_embeddings.lora_embedding_A": torch.randn(2, 20)}
    words["bert.embeddings.word_embeddings.lora_embedding_B"] = torch.randn(8, 2)
    low, bias = factors(query, 8, 8), torch.randn(8)
    whole = {"classifier.weight": head, "classifier.bias": torch.zeros(5), f"{query}.bias": bias}
    # As peft saves them with `bias="all"`: wrapped layers have longer names, and a replaced module is there, too.
    saved = {name.replace("query.bias", "query.base_layer.bias"): tensor for name, tensor in whole.items()}
    saved |= {"classifier.modules_to_save.bias": torch.zeros(5), "classifier.original_module.bias": torch.ones(5)}
    adapter("tuned", low | words | saved, task_type="SEQ_CLS", **config)
    merge(Path("tuned"), base_of(Path("tuned"), None), Path("merged"))
    base = transformers.BertModel.from_pretrained("base").state_dict()
    merged = transformers.BertForSequenceClassification.from_pretrained("merged").state_dict()
    a, b = low.values()
    expected = {f"bert.{name}": tensor for name, tensor in base.items()} | whole
    expected[f"{query}.weight"] = base[f"{LAYER}attention.self.query.weight"] + scale * (b @ a)
    a, b = words.values()
    expected["bert.embeddings.word_embeddings.weight"] = (
        base["embeddings.word_embeddings.weight"] + word_scale * (b @ a).T
    )
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name])
    assert Path("merged/tokenizer.json").read_text() == "the base's"


def test_an_adapter_s_answers_are_those_of_its_layers_beside_the_base_s(imported: Any) -> None:
    """GPT-2's layers have their inputs first; a convolution's factors are convolutions."""
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=20, n_embd=8, n_head=2, n_layer=1, n_positions=16)
    )
    base.save_pretrained("base")
    low = factors("transformer.h.0.attn.c_attn", 24, 8)
    adapter("tuned", low, task_type="CAUSAL_LM", base_model_name_or_path="nowhere/else")
    imported("tuned", "--base", "base", "--outputs", "logits", "--sequence-length", "4")
    layer, (a, b) = base.transformer.h[0].attn.c_attn, low.values()
    layer.register_forward_hook(lambda _, given, result: result + 2 * given[0] @ a.T @ b.T)
    tokens = torch.tensor([[1, 2, 3, 4]])
    program = torch.export.load("models/tuned/1/model.pt2").module()
    found = program(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    torch.testing.assert_close(found["logits"], base.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({}, {"peft_type": "IA3"}, "peft_type is IA3; only LORA"),
        ({}, {"use_dora": True}, "use_dora is not supported"),
        ({}, {"lora_alpha": "much"}, "Expected `float`, got `str` - at `$.lora_alpha`"),
        ({}, {"alpha_pattern": {"(a+)+": 1}}, "alpha_pattern has '(a+)+', which is not the end of a layer's name"),
        ({}, {"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the base's weights"),
        ({}, {"task_type": "SEQ_2_SEQ_LM"}, "no bert model for task_type SEQ_2_SEQ_LM"),
        (
            factors("pooler.dense", 8, 8),
            {"base_model_name_or_path": None},
            "does not name the base; give its folder",
        ),
        (factors("pooler.dense", 8, 8), {"base_model_name_or_path": "nowhere"}, "--base names another folder"),
        (factors("pooler.dense", 7, 8), {}, "pooler.dense.weight of shape (7, 8), which has the shape (8, 8)"),
        (factors("nothing", 8, 8), {}, "nothing is not a layer of the base"),
        (factors("pooler.dense", 8, 8, 4), {}, "the factors of pooler.dense have the rank 4"),
        ({"pooler.dense.bias": torch.full((8,), torch.nan)}, {}, "pooler.dense.bias has numbers that are NaN"),
        (
            {"pooler.dense.lora_A.weight": torch.ones(3, 8)},
            {},
            "pooler.dense is not a layer of the base with factors",
        ),
        ({"pooler.dense.lora_magnitude_vector": torch.ones(8)}, {}, "which is not there in the base"),
    ],
)
def test_an_adapter_that_cannot_be_merged_says_why(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], reason: str, refused: Any
) -> None:
    tiny("base")
    adapter("tuned", tensors, **config)
    assert reason in refused("tuned")


def test_parts_of_a_configuration_say_what_a_model_of_two_towers_takes(refused: Any) -> None:
    clip("clip")
    subject = huggingface.from_folder(Path("clip"))
    assert {given.name: given.dims for given in subject.inputs} == {
        "input_ids": (-1, -1), "attention_mask": (-1, -1), "pixel_values": (-1, 3, 16, 16)
    }  # fmt: skip
    assert subject.most_tokens == 12
    assert list(subject.module(**subject.examples(2, 0))) == ["text_embeds", "image_embeds"]
    assert subject.notes[0].endswith("no row for each row: logits_per_image, logits_per_text")
    chosen = huggingface.from_folder(Path("clip"), outputs=("image_embeds",))
    assert list(chosen.module(**chosen.examples(2, 0))) == ["image_embeds"]
    assert chosen.notes == ()
    assert "the model has no output logits; it has logits_per_image" in refused("clip", "--outputs", "logits")
    said = refused("clip", "--outputs", "logits_per_text")
    assert "logits_per_text has no row for each row of the inputs, but shape [3, 3] for 3" in said


def test_a_tower_is_imported_by_its_architecture(refused: Any) -> None:
    clip("clip")
    texts = huggingface.from_folder(Path("clip"), architecture="CLIPTextModelWithProjection")
    assert [given.name for given in texts.inputs] == ["input_ids", "attention_mask"]
    assert "text_embeds" in texts.module(**texts.examples(2, 0))
    assert "transformers has no Tower, and CLIPModel has no parts of that" in refused(
        "clip", "--architecture", "Tower"
    )
    assert "--architecture is for Hugging Face models" in refused(
        f"{HERE}:linear", *X, "--architecture", "Tower", status=2
    )
    sizes = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 10}
    frames = {
        "max_source_positions": 6,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 20,
        "pad_token_id": 0,
    }
    save("whisper", "WhisperForConditionalGeneration", **sizes, **frames)
    assert refused("whisper").endswith("imported with --architecture WhisperEncoder")
    (given,) = huggingface.from_folder(Path("whisper"), architecture="WhisperEncoder").inputs
    assert (given.name, given.dims) == ("input_features", (-1, 10, 12))


def test_spectrograms_waveforms_and_series_have_the_sizes_of_the_folder(refused: Any) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    save("ast", "ASTModel", max_length=32, num_mel_bins=16, **sizes)
    waves = {"conv_dim": [8], "conv_stride": [5], "conv_kernel": [10], "num_conv_pos_embeddings": 4}
    save("wave", "Wav2Vec2Model", num_conv_pos_embedding_groups=2, **waves, **sizes)
    Path("wave/preprocessor_config.json").write_text(json.dumps({"sampling_rate": 100}))
    series = {"num_input_channels": 3, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8}
    save("series", "PatchTSTModel", num_hidden_layers=1, num_attention_heads=2, **series)
    found = {name: huggingface.from_folder(Path(name)) for name in ("ast", "wave", "series")}
    assert {name: subject.inputs[0].dims for name, subject in found.items()} == {
        "ast": (-1, 32, 16), "wave": (-1, 1000), "series": (-1, 16, 3)
    }  # fmt: skip
    assert "waveforms have 1000 samples, which are 10 s at 100 Hz" in found["wave"].notes[0]
    assert huggingface.from_folder(Path("wave"), (), Lengths(fixed=400)).inputs[0].dims == (-1, 400)


def test_experts_are_imported(imported: Any) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
    save("experts", "MixtralForCausalLM", num_hidden_layers=1, **heads, **sizes)
    assert "largest difference from eager PyTorch" in imported("experts")


def test_a_model_that_loops_over_tokens_is_imported_at_one_length(imported: Any) -> None:
    save("mamba", "MambaModel", vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=2)
    said = imported("mamba", "--max-sequence-length", "3")
    assert "exported for sequences of 3 tokens only, because it has a loop over them" in said


def test_text_models_are_exported_with_a_dynamic_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("bert")
    subject = huggingface.from_folder(Path("bert"))
    program = export(subject, 8)
    names = program.graph_signature.user_inputs
    shapes = {str(tuple(n.meta["val"].shape)) for n in program.graph.nodes if n.name in names}
    assert len(names) == 3
    assert len(shapes) == 1, "the inputs have one batch and one length"
    assert sorted((int(r.lower), int(r.upper)) for r in program.range_constraints.values()) == [(1, 8), (1, 16)]
    assert [answer.shape for answer in subject.answer(subject.examples(3, 1))] == [(3, 16, 8), (3, 8)]


def _replaced(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _linked(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights elsewhere": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"weight_map": {"w": "../secret.safetensors"}}'),
        "weight_map names '../secret.safetensors'",
    ),
    "weights at an absolute path": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"weight_map": {"w": "/etc/passwd"}}'),
        "weight_map names '/etc/passwd'",
    ),
    "weights that are missing": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"weight_map": {"w": "none.safetensors"}}'),
        "weight_map names 'none.safetensors'",
    ),
    "a linked tokenizer": (
        lambda f: _linked(f / "tokenizer.json", Path("/etc/passwd")),
        "leads out of the directory",
    ),
    "linked weights": (
        lambda f: _linked(f / "model.safetensors", f.parent.absolute() / "secret.safetensors"),
        "leads out of the directory",
    ),
    "a device": (lambda f: _linked(f / "tokenizer_config.json", Path("/dev/zero")), "is not a regular file"),
    "a pipe": (lambda f: os.mkfifo(f / "preprocessor_config.json"), "is not a regular file"),
    "a pipe for weights": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors"))[1],
        "is not a regular file",
    ),
    "a pipe in a folder": (
        lambda f: ((f / "1_Pooling").mkdir(), os.mkfifo(f / "1_Pooling" / "config.json"))[1],
        "is not a regular file",
    ),
    "deep JSON": (lambda f: _replaced(f / "config.json", b"[" * 100_000), "nested too deeply"),
    "a deep index": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"a":' * 100_000),
        "nested too deeply",
    ),
    "layers without end": (_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, the limit is 65536"),
    "layers of a part without end": (_config(text_config={"n_layers": 10**9}), "n_layers is 1000000000"),
    "depths without end": (_config(depths=[2, 10**9]), "depths is 1000000000"),
    "a label far away": (_config(id2label={"100000000": "x"}), "num_labels is 100000001, the limit is 1048576"),
    "labels without end": (_config(num_labels=10**8), "num_labels is 100000000, the limit is 1048576"),
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_from_elsewhere_is_data(refused: Any, kind: str) -> None:
    tiny("bert")
    Path("secret.safetensors").write_bytes((Path("bert") / "model.safetensors").read_bytes())
    spoil, reason = DIRECTORIES[kind]
    spoil(Path("bert"))
    assert reason in refused("bert")


def test_hugging_faces_cache_links_to_its_own_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "hash").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    require_own_files(snapshot)
    (snapshot / "tokenizer.json").symlink_to("../../../models--x/refs")
    (tmp_path / "models--x" / "refs").write_text("{}")
    with pytest.raises(ImportFailed, match="leads out of the directory"):
        require_own_files(snapshot)
