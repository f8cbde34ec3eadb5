"""benchmarks/mask_rates.py: calibration of answers whose right one is drawn by a known distribution."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.mask_rates import RATES, calibration_error, row, temperature
from extras.after.inference.encoder import Encoder, EncoderFlags
from tests.extras.after.inference.embed_fixtures import make_model


def test_calibration_of_a_known_distribution():
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(20_000, 20, generator=generator, dtype=torch.double).mul(2).log_softmax(-1)
    true = torch.multinomial(logs.exp(), 1, generator=generator)[:, 0]
    sharp = (logs * 1.5).log_softmax(-1)
    errors = []
    for each in (logs, sharp):
        belief, best = each.exp().max(1)
        errors.append(calibration_error(belief, best == true))
    assert errors[0] < 0.02 < 0.08 < errors[1]
    assert abs(temperature(logs, true) - 1) < 0.03
    assert abs(temperature(sharp, true) - 1.5) < 0.05


def test_row_of_each_rate(tmp_path):
    encoder = Encoder(EncoderFlags(str(make_model(tmp_path / "model")), use_cpu=True))
    generator = np.random.default_rng(0)
    proteins = [encoder.alphabet.encode(bytes(generator.choice(list(b"ACDEFGHIKLMNPQRSTVWY"), 40))) for _ in range(6)]
    for rate in RATES.values():
        cells = row(encoder, proteins, rate)
        assert len(cells) == 6
        assert 2.5 < float(cells[0].split(" ")[0]) < 4.5  # a random model: about ln 20
