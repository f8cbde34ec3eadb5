"""The flags of a protein decoder's run: a decoder's, with the data flags of proteins in place of text's."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.cli import UserError
from common.data.flags import ProteinFlags, SourceFlags
from common.files.runs import resolve_directory
from common.flags import flag, with_flags
from extras.families.decoders.causal_arguments import CausalArguments
from extras.families.decoders.residues import RESIDUE_TOKENS, RESIDUES, reads_residues


@dataclass(frozen=True)
class ResidueFlags(ProteinFlags):
    """Which proteins, and how a decoder reads them."""

    advanced = ("directions", "fill_in")
    unlisted = (
        *("streaming", "max_train_samples", "tokens_per_pack", "dataloader_num_workers"),
        "gradient_accumulation_steps",
    )

    tokenizer: str = flag(
        RESIDUES, "Change it for text: one token a residue, of proteins (residues).", choices=(RESIDUES,)
    )
    directions: str = flag(
        "forward",
        "To score and generate from both ends: both reads half of the proteins backwards, drawn anew each epoch.",
        choices=("forward", "both"),
    )
    fill_in: float = flag(
        0.0,
        "To learn to fill in: the fraction of proteins, drawn anew each epoch, of which one to four spans are cut out "
        "and predicted from the rest.",
    )

    def check(self) -> None:
        if not 0 <= self.fill_in <= 1:
            raise UserError(f"--fill_in {self.fill_in}: a fraction of the proteins, 0 to 1")
        self.require_at_least(RESIDUE_TOKENS.num_special + 1, "max_seq_length")


@dataclass(frozen=True)
class ProteinDecoderArguments(CausalArguments):
    """Flags of causal language modelling of proteins."""

    changed = CausalArguments.changed | {
        # Of proteins, as these classes have them; other defaults stay the guides'.
        "dataset_dir": flag(None, SourceFlags.__dataclass_fields__["dataset_dir"].metadata["help"]),
        "max_seq_length": flag(
            2048,
            "Most tokens of a protein, <bos>, 1, 2 and <eos> included; longer ones are cropped at random. Lower it to "
            "save memory.",
            "max_context_width",
        ),
        "num_train_epochs": flag(
            None, "For prepared proteins: passes over --dataset_dir, without --max_steps.", "epochs"
        ),
        "per_device_train_batch_size": flag(
            2, "Times --max_seq_length, the tokens of a pack. Lower it if memory runs out.", "train_batch_size"
        ),
    }

    data: ResidueFlags = field(default_factory=ResidueFlags)

    @property
    def batch(self) -> tuple[int, str]:
        return super(CausalArguments, self).batch

    def resolve(self) -> ProteinDecoderArguments:
        args = super().resolve()
        if args.model.vocab_size is None and not args.model.model_name_or_path:
            args = with_flags(args, vocab_size=RESIDUE_TOKENS.vocab_size)
        return args

    def check(self) -> None:
        if (weights := self.model.model_name_or_path) is None:
            return
        directory = resolve_directory(weights)
        if (directory / "tokenizer.json").is_file() and not reads_residues(directory):
            raise UserError(
                f"--model_name_or_path {weights}: its tokenizer is not of residues: drop --tokenizer {RESIDUES}, or "
                "train a decoder of proteins from random weights (--model or --model_type)"
            )


def arguments_for(tokenizer: str | None) -> type[CausalArguments]:
    """The flags of a decoder's run with the --tokenizer that its command line names."""
    return ProteinDecoderArguments if tokenizer == RESIDUES else CausalArguments
