"""docs/flags.md is what the code says: which flags of transformers there are here, and which are unknown."""

from __future__ import annotations

import re

import pytest
import transformers

from common.cli import UserError
from common.flags import parse_arguments
from common.training.schedule import SCHEDULES
from tests.conftest import ROOT
from tests.data_fixtures import load_script

PAGE = (ROOT / "docs" / "flags.md").read_text()
PINNED = re.search(r"^transformers==(.*)$", (ROOT / "requirements.txt").read_text(), re.M)[1]


@pytest.mark.skipif(transformers.__version__ != PINNED, reason="another version of transformers has other flags")
def test_flags_page_is_up_to_date():
    assert load_script("docs/make_flags.py").page() == PAGE, "python docs/make_flags.py makes it anew"


def test_flags_listed_as_absent_are_unknown():
    (section,) = re.findall(r"\n## Not here\n(.*?)\n## ", PAGE, re.S)
    absent = [flag for row in section.splitlines() for flag in re.findall(r"`(--\w+)`", row.split(" | ")[0])]
    assert len(absent) > 80
    assert f"{len(absent)} other flags" in section
    for args in load_script("docs/make_flags.py").SCRIPTS.values():
        with pytest.raises(UserError, match="unknown flag") as error:
            parse_arguments(None, args, argv=[f"{flag}=1" for flag in absent])
        assert [flag for flag in absent if f" {flag}=1" not in str(error.value)] == []


def test_training_page_has_every_schedule():
    (table,) = re.findall(r"\n## Learning rate\n(.*?)\n## ", (ROOT / "docs" / "training.md").read_text(), re.S)
    names = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert names == {*SCHEDULES["mlm"]}
