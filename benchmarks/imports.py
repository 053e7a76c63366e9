"""Imports folders of 41 architectures of transformers by name alone, and writes what became of each.

The folders are as `save_pretrained` writes them, with few, small layers of random weights and what matters of the
preprocessor's configuration. Run it with: python -m benchmarks.imports [NAME...]
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from cohabit.server.cli import main

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
DEC = TEXT | {"num_key_value_heads": 1, "max_position_embeddings": 64}
WAVEFORM = TEXT | {
    "conv_dim": [16] * 3,
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 4, 4],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}
PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (transformers.BertConfig, transformers.BertModel, TEXT | {"max_position_embeddings": 40}),
    "roberta": (
        transformers.RobertaConfig,
        transformers.RobertaForSequenceClassification,
        TEXT | {"max_position_embeddings": 42},
    ),
    "distilbert": (
        transformers.DistilBertConfig,
        transformers.DistilBertForSequenceClassification,
        {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 40},
    ),
    "albert": (
        transformers.AlbertConfig,
        transformers.AlbertForMaskedLM,
        TEXT | {"embedding_size": 16, "max_position_embeddings": 40},
    ),
    "deberta-v2": (
        transformers.DebertaV2Config,
        transformers.DebertaV2ForSequenceClassification,
        TEXT
        | {
            "max_position_embeddings": 40,
            "relative_attention": True,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "type_vocab_size": 0,
            "position_biased_input": False,
        },
    ),
    "electra": (
        transformers.ElectraConfig,
        transformers.ElectraForPreTraining,
        TEXT | {"embedding_size": 16, "max_position_embeddings": 40},
    ),
    "mpnet": (transformers.MPNetConfig, transformers.MPNetForMaskedLM, TEXT | {"max_position_embeddings": 42}),
    "xlm-roberta": (
        transformers.XLMRobertaConfig,
        transformers.XLMRobertaForMaskedLM,
        TEXT | {"max_position_embeddings": 42},
    ),
    "t5-encoder": (
        transformers.T5Config,
        transformers.T5EncoderModel,
        {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    ),
    "gpt2": (
        transformers.GPT2Config,
        transformers.GPT2LMHeadModel,
        {"vocab_size": 96, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 2},
    ),
    "gpt-neox": (
        transformers.GPTNeoXConfig,
        transformers.GPTNeoXForCausalLM,
        TEXT | {"max_position_embeddings": 40},
    ),
    "opt": (
        transformers.OPTConfig,
        transformers.OPTForCausalLM,
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "max_position_embeddings": 40,
            "word_embed_proj_dim": 32,
        },
    ),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, DEC),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, DEC | {"sliding_window": 16}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, DEC),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, DEC | {"head_dim": 16}),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, DEC | {"num_key_value_heads": 2}),
    "falcon": (
        transformers.FalconConfig,
        transformers.FalconForCausalLM,
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, DEC | {"num_local_experts": 4}),
    "qwen2-moe": (
        transformers.Qwen2MoeConfig,
        transformers.Qwen2MoeForCausalLM,
        DEC
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mamba": (
        transformers.MambaConfig,
        transformers.MambaForCausalLM,
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    "vit": (
        transformers.ViTConfig,
        transformers.ViTForImageClassification,
        TEXT | {"image_size": 32, "patch_size": 8},
    ),
    "beit": (
        transformers.BeitConfig,
        transformers.BeitForImageClassification,
        TEXT | {"image_size": 32, "patch_size": 8},
    ),
    "swin": (
        transformers.SwinConfig,
        transformers.SwinForImageClassification,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 2],
            "window_size": 4,
        },
    ),
    "convnext": (
        transformers.ConvNextConfig,
        transformers.ConvNextForImageClassification,
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    ),
    "resnet": (
        transformers.ResNetConfig,
        transformers.ResNetForImageClassification,
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    "segformer": (
        transformers.SegformerConfig,
        transformers.SegformerForSemanticSegmentation,
        {
            "hidden_sizes": [8, 16, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 16,
        },
    ),
    "detr": (
        transformers.DetrConfig,
        transformers.DetrForObjectDetection,
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 10,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": transformers.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
            ),
        },
    ),
    "mobilenet-v2": (
        transformers.MobileNetV2Config,
        transformers.MobileNetV2ForImageClassification,
        {"depth_multiplier": 0.25, "image_size": 32},
    ),
    "mobilevit": (
        transformers.MobileViTConfig,
        transformers.MobileViTForImageClassification,
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
            "num_attention_heads": 2,
        },
    ),
    "dpt": (
        transformers.DPTConfig,
        transformers.DPTForDepthEstimation,
        {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
        },
    ),
    "clip": (
        transformers.CLIPConfig,
        transformers.CLIPModel,
        {
            "text_config": TEXT | {"max_position_embeddings": 24} | PAD,
            "vision_config": TEXT | {"image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
    ),
    "siglip": (
        transformers.SiglipConfig,
        transformers.SiglipModel,
        {
            "text_config": TEXT | {"max_position_embeddings": 24, "projection_size": 32},
            "vision_config": TEXT | {"image_size": 32, "patch_size": 8},
        },
    ),
    "whisper": (
        transformers.WhisperConfig,
        transformers.WhisperForConditionalGeneration,
        {
            "vocab_size": 96,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": 20,
            "max_source_positions": 30,
            "max_target_positions": 24,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "ast": (
        transformers.ASTConfig,
        transformers.ASTForAudioClassification,
        TEXT | {"max_length": 64, "num_mel_bins": 32},
    ),
    "wav2vec2": (
        transformers.Wav2Vec2Config,
        transformers.Wav2Vec2ForCTC,
        WAVEFORM,
    ),
    "hubert": (
        transformers.HubertConfig,
        transformers.HubertForCTC,
        WAVEFORM,
    ),
    "clap": (
        transformers.ClapConfig,
        transformers.ClapModel,
        {
            "text_config": TEXT | {"max_position_embeddings": 42},
            "audio_config": {
                "window_size": 4,
                "num_mel_bins": 16,
                "spec_size": 64,
                "patch_size": 4,
                "patch_stride": [4, 4],
                "hidden_size": 64,
                "patch_embeds_hidden_size": 16,
                "depths": [1, 1, 1],
                "num_hidden_layers": 3,
                "num_attention_heads": [2, 2, 2],
            },
            "projection_dim": 16,
        },
    ),
    "patchtst": (
        transformers.PatchTSTConfig,
        transformers.PatchTSTForPrediction,
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "prediction_length": 8,
            "loss": "mse",
        },
    ),
    "informer": (
        transformers.InformerConfig,
        transformers.InformerForPrediction,
        {
            "prediction_length": 8,
            "context_length": 16,
            "lags_sequence": [1, 2, 3],
            "num_time_features": 2,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
        },
    ),
    "bart": (
        transformers.BartConfig,
        transformers.BartForConditionalGeneration,
        {
            "vocab_size": 96,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 40,
        },
    ),
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "convnext": {
        "image_processor_type": "ConvNextImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_pct": 0.875,
    },
    "resnet": {"image_processor_type": "ConvNextImageProcessor", "size": 32, "crop_pct": 0.875},
    "segformer": {"image_processor_type": "SegformerImageProcessor", "size": 64},
    "detr": {"image_processor_type": "DetrImageProcessor", "size": 64, "max_size": 128},
    "whisper": {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 20,
        "n_samples": 9600,
        "nb_max_frames": 60,
        "sampling_rate": 16000,
        "hop_length": 160,
    },
    "wav2vec2": {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "sampling_rate": 16000},
    "hubert": {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "sampling_rate": 16000},
    "clap": {
        "feature_extractor_type": "ClapFeatureExtractor",
        "feature_size": 16,
        "nb_max_frames": 100,
        "nb_max_samples": 48000,
        "max_length_s": 1,
        "hop_length": 480,
        "sampling_rate": 48000,
    },
}


def make(name: str, folder: Path) -> None:
    """Write one architecture's folder."""
    configuration, model, sizes = MODELS[name]
    torch.manual_seed(0)
    model(configuration(**sizes)).save_pretrained(folder)
    if name in PREPROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[name]))


def imported(name: str, root: Path) -> tuple[bool, str]:
    """Import a folder by its name alone. Returns whether it was, and the largest difference or the reason."""
    make(name, root / name)
    out, errors = io.StringIO(), io.StringIO()
    flags = (
        "--repository",
        str(root / "models"),
        "--cache",
        str(root / "cache"),
        "--max-batch",
        "4",
        "--threads",
        "1",
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(["import", str(root / name), *flags])
    if status:
        return False, errors.getvalue().splitlines()[-1].removeprefix(f"cohabit: {root / name}: ")
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("largest difference", "note: "))]
    difference = lines[0].removeprefix("largest difference from eager PyTorch: ").split(" of ")[0]
    return True, "; ".join([difference, *(line.removeprefix("note: ") for line in lines[1:])])


def run(names: list[str]) -> None:
    count = 0
    print("| folder | architecture | imported | largest difference from eager PyTorch and notes, or the reason |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            done, said = imported(name, Path(root))
            count += done
            print(f"| {name} | {MODELS[name][1].__name__} | {'yes' if done else 'no'} | {said} |", flush=True)
    print(f"\n{count} of {len(names)} by name alone")


if __name__ == "__main__":
    run(sys.argv[1:] or list(MODELS))
