import pytest

pytest.register_assert_rewrite("tests.guides.checks", "tests.guides.rows")
