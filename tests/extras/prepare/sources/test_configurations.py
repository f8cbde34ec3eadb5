"""Which files are a data set's configuration: as its card says, or as its directories do."""

from __future__ import annotations

import pytest

from common.cli import UserError
from extras.prepare.sources.find_files import split_of
from extras.prepare.sources.hub import choose_files

PATHS = [
    "en/c4-train.00000-of-00002.json.gz",
    "en/c4-train.00001-of-00002.json.gz",
    "en/c4-validation.00000-of-00001.json.gz",
    "en.noblocklist/c4-train.00000-of-00001.json.gz",
    "multilingual/c4-de.tfrecord-00000.json.gz",
    "multilingual/c4-de-validation.tfrecord-00000.json.gz",
]
ENGLISH = {"train": PATHS[:2], "validation": PATHS[2:3]}


def choose(card: str, configuration: str | None = None):
    return choose_files("--dataset a/b", PATHS, card, configuration, split_of)


def card(*entries: str) -> str:
    return "---\nlicense: odc-by\nconfigs:\n" + "".join(f"- {entry}\n" for entry in entries) + "---\n# Text\n"


IN_SPLITS = (
    "{config_name: en, data_files: [{split: train, path: en/c4-train.*.json.gz}, "
    "{split: validation, path: [en/c4-validation.*.json.gz]}]}"
)
GERMAN = "{config_name: de, data_files: {train: 'multilingual/c4-de.*', held_out: multilingual/c4-de-validation.*}}"


LAUGHS = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))


@pytest.mark.parametrize("entry", ["config_name: *a8", "data_files: [*a8]", "{config_name: en, data_dir: *a8}"])
def test_card_rejects_alias_bombs(entry):
    with pytest.raises(UserError, match="a list or mapping in place of a name"):
        choose(f"---\na0: &a0 [lol]\n{LAUGHS}\nconfigs:\n- {entry}\n---\n")


def test_card_rejects_deep_nesting():
    with pytest.raises(UserError, match=r"front matter of its README\.md is not YAML"):
        choose(f"---\nconfigs: {'[' * 10_000}\n---\n")


@pytest.mark.parametrize("text", ["", "# Text", "---\nlicense: odc-by\n---\n"])
def test_configuration_without_card_is_a_directory(text):
    assert choose(text, "en") == ENGLISH
    assert choose(text) is choose(text, "") is None  # everything, as it lies there


@pytest.mark.parametrize(
    ("entries", "configuration", "expected"),
    [
        ([IN_SPLITS, GERMAN], "en", ENGLISH),
        ([IN_SPLITS, GERMAN], "de", {"train": PATHS[4:5], "held_out": PATHS[5:]}),
        ([IN_SPLITS, GERMAN], "en.noblocklist", {"train": PATHS[3:4]}),  # not in the card: a directory
        ([IN_SPLITS], None, ENGLISH),  # the only one
        ([GERMAN, IN_SPLITS.replace("config_name: en,", "config_name: en, default: true,")], None, ENGLISH),
        (["{config_name: en, data_dir: en}"], None, ENGLISH),
        (["{config_name: x, data_dir: en, data_files: 'c4-t*'}"], "x", {"train": PATHS[:2]}),
        (["{config_name: x, data_files: ['**/c4-train*']}"], "x", {"train": [PATHS[3], *PATHS[:2]]}),
    ],
)
def test_card_names_files_and_splits(entries, configuration, expected):
    assert choose(card(*entries), configuration) == expected


@pytest.mark.parametrize(
    ("text", "configuration", "message"),
    [
        (card(IN_SPLITS, GERMAN), None, "several configurations: choose by --dataset_config_name en, de"),
        (card(IN_SPLITS, GERMAN), "fr", "no files of a configuration fr: it has en, de"),
        ("", "fr", "no files of a configuration fr: it has en, en.noblocklist, multilingual"),
        (card("{config_name: en, data_files: nowhere/*}"), "en", "no files of a configuration en"),
        ("---\nconfigs: [\n---\n", "en", "the front matter of its README.md is not YAML"),
    ],
)
def test_configuration_unknown_is_one_line(text, configuration, message):
    with pytest.raises(UserError, match=message):
        choose(text, configuration)
