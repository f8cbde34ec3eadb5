"""Where compiled code is kept."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from common.models.layers import cpu
from common.models.layers.compiling import CACHE, cache_by_cpu


def test_cache_by_cpu_separates_kinds_of_cpu(monkeypatch, tmp_path):
    """It was found, and computed NaN, where two kinds share a directory."""
    places = []
    for capability in ("AVX2", "AVX512", "AVX2"):
        monkeypatch.setenv(CACHE, str(tmp_path))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        for _ in range(2):
            cache_by_cpu()
        places.append(Path(os.environ[CACHE]))
    assert [place.parent for place in places] == [tmp_path] * 3
    assert places[0] == places[2] != places[1]


def test_cache_by_cpu_separates_operator_versions(monkeypatch, tmp_path):
    """It was, and failed at the first step after an update: torch knows them by name alone."""
    places = []
    for version in ("one", "other", "one"):
        monkeypatch.setenv(CACHE, str(tmp_path))
        (tmp_path / "cpu.py").write_text(version)
        monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
        cache_by_cpu()
        places.append(os.environ[CACHE])
    assert places[0] == places[2] != places[1]
