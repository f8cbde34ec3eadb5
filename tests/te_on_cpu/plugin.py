"""`pytest -p tests.te_on_cpu.plugin tests/gpu/test_te.py`: a GPU's tests over the stand-in, at GPU_CAPABILITY, with
cuDNN's attention if GPU_ATTENTION is set."""

import os
import warnings

from tests.te_on_cpu import boot

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that the compiled half is not where it looks
    capability = tuple(map(int, os.environ.get("GPU_CAPABILITY", "9.0").split(".")))
    boot.start(capability, attention="GPU_ATTENTION" in os.environ)
