"""A family's weights between this project's names and the published ones: lossless, one tensor at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.hooks import extra
from common.models.layers.hf_directory import check_finite, check_tensors, is_checkpoint, local_directory, read_tensors
from common.models.layers.residual import Model

if TYPE_CHECKING:  # what reads a model needs no model card
    from common.models.layers.model_card import Training

Pieces = Iterator[tuple[str, Tensor]]


class StateDictAdapter(ABC):
    """Between our parameters and the published tensors that each is made of: query, key and value of one matrix, ...

    model: makes one of a configuration; tags: the Hub's, its pipeline's first, without the model_type; published,
    opened_by: as hf_directory.Export; optional: how the names of published tensors begin that a checkpoint may lack;
    redundant: how those end that are not read: constants, and copies of tied ones.
    """

    model: Callable[..., Model]
    tags: tuple[str, ...] = ("fill-mask", "protein")
    published: Collection[str] = ()
    opened_by = ""
    optional: tuple[str, ...] = ()
    redundant: tuple[str, ...] = ()

    @abstractmethod
    def parts(self, config: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(our name, the published names) of every parameter, in the order of an export."""

    @abstractmethod
    def write_tokenizer(self, directory: Path, tokenizer: Any = None) -> None:
        """The files that transformers' AutoTokenizer opens. tokenizer: of a text task."""

    def split(self, name: str, tensor: Tensor, parts: int, config: Any) -> Sequence[Tensor]:
        """A parameter as its published tensors; by default they lie end to end, of equally many rows."""
        return tensor.chunk(parts)

    def join(self, name: str, tensors: list[Tensor], config: Any) -> Tensor:
        """The inverse of `split`."""
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def current_name(self, name: str, config: Any) -> str | None:
        """The published name of a checkpoint's tensor, which may have an older one; None for one that is not read."""
        return None if name.endswith(self.redundant) else name

    def to_hf(self, get: Callable[[str], Tensor], config: Any, extras: Mapping[str, Tensor] | None = None) -> Pieces:
        """Published tensors. `get` is called for each of our parameters once, always in the same order.

        extras: those that `from_hf` read and training leaves as they are.
        """
        for ours, names in self.parts(config):
            tensors = self.split(ours, get(ours), len(names), config)
            yield from zip(names, (tensor.contiguous() for tensor in tensors), strict=True)

    def from_hf(self, theirs: Mapping[str, Tensor], config: Any, where: str = "") -> tuple[Pieces, dict[str, Tensor]]:
        """((our name, fp32 tensor) pairs, extras). UserError, which begins with `where`, unless `theirs` are such a
        model's tensors, and for NaN or infinity when one is read."""
        tensors = {now: tensor for name, tensor in theirs.items() if (now := self.current_name(name, config))}
        check_tensors(tensors, self.expected(config)[0], config.architecture, where, self.optional)
        parts = list(self.parts(config))
        used = {name for _, names in parts for name in names}
        extras = {name: check_finite(name, x, where) for name, x in tensors.items() if name not in used}
        pieces = (
            (ours, self.join(ours, [check_finite(name, tensors[name], where).float() for name in names], config))
            for ours, names in parts
        )
        return pieces, extras

    def expected(self, config: Any) -> tuple[dict[str, Tensor], int]:
        """(the published tensors, on the meta device; the number of our parameters)."""
        from common.models.layers.initialise import count_parameters

        with torch.device("meta"):
            model = self.model(config)
            return dict(self.to_hf(model.state_dict().__getitem__, config)), count_parameters(model)

    def read(self, name: str, config: Any) -> tuple[Pieces, dict[str, Tensor]]:
        """(our parameters in fp32, tensors that only the export needs) of a model: a local directory's safetensors, a
        run's checkpoint, or a Hub repository."""
        if is_checkpoint(root := local_directory(name)):
            read, extras = extra().read_checkpoint(root, config)
            ours = (name for name, _ in self.parts(config))
            return ((name, check_finite(name, read(name), str(root)).float()) for name in ours), extras
        return self.read_published(str(root), config)

    def read_published(self, name: str, config: Any) -> tuple[Pieces, dict[str, Tensor]]:
        """(our parameters in fp32, tensors that only the export needs) of published safetensors."""
        root, theirs = read_tensors(name)
        return self.from_hf(theirs, config, str(root))

    def save(
        self,
        pieces: Pieces,
        config: Any,
        directory: Path,
        training: Training | None = None,
        tokenizer: Any = None,
        shard_bytes: int | None = None,
    ) -> None:
        """Write a directory that transformers' from_pretrained opens offline (or `opened_by`), tensors in fp32.

        pieces: as `to_hf` gives them; training: for the model card; shard_bytes: of a file, SHARD_BYTES by default.
        The directory appears when it is complete; an existing one is replaced.
        """
        from common.models.layers.model_card import UNKNOWN, Export
        from common.models.layers.write_directory import SHARD_BYTES, write_directory

        training = training or UNKNOWN
        constants = self.constants(config)
        expected, parameters = self.expected(config)
        pipeline, *topics = self.tags
        export = Export(
            config,
            (pipeline, config.model_type.lower(), *topics),
            expected | constants,
            parameters,
            lambda partial: self.finish(partial, training, tokenizer),
            training,
            self.published,
            self.opened_by,
        )
        write_directory(chain(pieces, constants.items()), export, directory, shard_bytes or SHARD_BYTES)

    def constants(self, config: Any) -> dict[str, Tensor]:
        """Tensors of an export that are no parameters."""
        return {}

    def finish(self, directory: Path, training: Training, tokenizer: Any) -> Mapping[str, str]:
        """Write the tokenizer's files, once config.json and the weights are there. Returns {heading: text} for the end
        of the model card."""
        self.write_tokenizer(directory, tokenizer)
        return {}
