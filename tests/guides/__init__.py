import pytest

for name in ("checks", "eks", "fsdp", "recipe", "slurm"):
    pytest.register_assert_rewrite(f"tests.guides.{name}")
