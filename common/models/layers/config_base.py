"""What the configurations of all families have in common: config.json read, checked and written again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from common.cli import UserError
from common.files.safe_files import shorten
from common.models.layers.hf_directory import (
    check_heads,
    check_no_dropout,
    check_positive,
    check_sizes,
    fields_of,
    read_config,
)

# Keys of ours in config.json, which transformers keeps: what stands between chains; tokens of the longest sets of
# homologs that the model was trained on.
CHAINS, TRAINED_SETS = "chains", "trained_set_tokens"
Config = TypeVar("Config", bound="ConfigBase")


@dataclass
class ConfigBase:
    """A subclass is a dataclass of config.json's fields, the last of them `others`: all other keys, written again.

    fixed: {name: the only value that is computed here, or a tuple of those, the one for messages first}, whether a
    field or not; a name that is absent is fine. described: who has it, for the message.
    """

    described: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    positive: ClassVar[tuple[str, ...]]  # fields that must be above 0, besides sizes
    fingerprint_fields: ClassVar[tuple[str, ...]]
    vocabulary: ClassVar[str]  # the tokens in order, separated by blanks

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a config.json. ValueError if it is malformed, OSError if it cannot be read."""
        return cls.of(read_config(path))

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """From the content of a config.json. ValueError if it is malformed."""
        values, others = fields_of(cls, content)
        return cls(**values, others=others)  # pyrefly: ignore[unexpected-keyword]  # a field of subclasses

    def content(self) -> dict[str, Any]:
        """The inverse of `read`: names and values of a config.json."""
        values = asdict(self)
        return values.pop("others") | values

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of the same model: its shape, and its alphabet."""
        own = {name: getattr(self, name) for name in self.fingerprint_fields} | {"alphabet": self.vocabulary}
        return own | ({CHAINS: self.chains} if self.chains else {})

    @property
    def chains(self) -> str:
        """What stands between the chains of a record: "separator" or "linker"; "" if the model reads single chains."""
        return getattr(self, "others", {}).get(CHAINS, "")

    def stated(self) -> dict[str, Any]:
        """The values that `fixed` is compared with."""
        values = dict(vars(self))
        return values.pop("others") | values

    def check(self, where: str) -> None:
        """Refuse a configuration that this implementation would silently compute differently, but for dropout, which
        only training applies (`check_no_dropout`), and sizes that make no model."""
        stated = self.stated()
        for name, allowed in self.fixed.items():
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            if name in stated and stated[name] not in allowed:
                raise UserError(f"{where}: {name} is {shorten(stated[name])}, {self.described} {allowed[0]!r}")
        check_sizes(self, where)
        check_positive(self, where, *self.positive)
        check_heads(self, where)


def override(config: Config, changes: str, check: bool = True) -> Config:
    """Apply `--config_overrides name=value,name=value`; values take the type of what they replace. UserError for a
    configuration that no model here has, unless it is checked later."""
    for change in changes.split(","):
        name, _, text = (part.strip() for part in change.partition("="))
        old = vars(config).get(name)
        try:
            if not isinstance(old, int | float):
                raise ValueError
            kind = {"true": True, "false": False}.__getitem__ if isinstance(old, bool) else type(old)
            value = kind(text.lower())
        except (ValueError, KeyError):
            raise UserError(f"--config_overrides {change}: expected name=value, a number or true/false") from None
        setattr(config, name, value)
    if check:
        config.check("--config_overrides")
    check_no_dropout(config, "--config_overrides")
    return config
