"""Where compiled code is kept."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from common.model.compiling import CACHE, cache_by_cpu


def test_what_is_compiled_for_one_kind_of_cpu_is_not_found_by_another(monkeypatch, tmp_path):
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
