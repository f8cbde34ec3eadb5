"""Context parallelism of sets: attention of packs whose sequences several ranks share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.layers.attention import Layout
from extras.speed.context_attention import CpLayout


class CpSetLayout(CpLayout):
    """Sets of a pack that ranks share: a rank's tokens attend to their sequences and to those before them in the set.

    numbers, positions: as those of `SetLayout`, of this rank's tokens, padding and fillers included; int64 [T].
    """

    def __init__(self, shared: CpLayout, positions: Tensor, sets: Tensor | None):
        """shared: of the same pack, by its sequences; positions: of this rank's tokens in their whole sequences, int64
        [T] on the device (extras.speed.cp_model.share_of); sets: the batch's, int32 [2, B + 1] on the host."""
        real, bounds, device = shared.real, shared.bounds, positions.device
        super().__init__(real, bounds, device, shared.context, _boundaries(sets, real.shape[1]))
        ends = F.pad(real.sum(0).cumsum(0), (1, 0))  # of whole sequences
        first = torch.repeat_interleave(self.sets[:-1], self.sets.diff())  # of each sequence's set
        counts = bounds[shared.context.rank].diff()
        of_sequences = torch.stack((torch.arange(len(first)) - first, ends[:-1] - ends[first]))
        of_tokens = torch.repeat_interleave(of_sequences, counts, dim=1)
        numbers, starts = F.pad(of_tokens, (0, len(positions) - of_tokens.shape[1])).to(device, non_blocking=True)
        self.numbers, self.positions = numbers, starts + positions

    def of_layer(self, number: int) -> Layout:
        """For one of the global layers: the same for all."""
        return self


def _boundaries(sets: Tensor | None, sequences: int) -> Tensor | None:
    """Boundaries of sets in so many sequences, int64 [sequences + 1]. Sequences that `sets` does not name are sets of
    their own; those that it has beyond are a rank's own fillers."""
    if sets is None:
        return None
    named = sets[1].cpu().long().clamp(max=sequences)
    return torch.cat((named, torch.arange(len(named), max(len(named), sequences + 1))))
