"""Families whose sequences attend to earlier ones of their set: what they have in common."""

from __future__ import annotations

from typing import Any

from common.cli import UserError
from common.distributed.world import World
from common.models.esm2.family import EncoderFamily, ModelFlags
from extras.prepare.sources.sets import SetTokens


class SetFamily(EncoderFamily):
    reads_sets = True

    def check_flags(self, flags: ModelFlags) -> None:
        super().check_flags(flags)
        if flags.backend == "te":
            raise UserError(f"--backend te: {self.title} has torch layers only: choose auto or torch")

    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> Any:
        return super().choose(args, world, (*torch_only, f"attention over sets of {self.title}"), previous)

    def check_run(self, args: Any, config: Any, backend: str, world: World) -> None:
        super().check_run(args, config, backend, world)
        if args.strategy.replays_layers:
            raise UserError(f"--cuda_graphs: attention over sets of {self.title} cannot be recorded: drop the flag")
        data = args.data
        sizes = {"max_seq_length": (data.max_seq_length, config.max_num_positions_within_seq)}
        if data.set_tokens is not None:
            sizes["set_size"] = (data.set_size, config.max_num_sequences)
            sizes["set_tokens"] = (SetTokens.of(data.set_tokens).most, config.max_num_positions_global)
        for name, (asked, most) in sizes.items():
            if asked > most:
                raise UserError(f"--{name} {asked}: this {self.title} has at most {most:,}: lower it")
