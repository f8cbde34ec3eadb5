"""--backend hf: transformers' EsmForMaskedLM, as it is, computes in this program's loop.

Its forward pass runs on padded batches: the sequences of a pack become rows, padded to the longest. The parameters are
those of the other backends, given to it under its own names. So data, initial weights, optimiser, evaluation,
checkpoints and export are the same, and a run may resume with another backend. It is the peer of the benchmarks.
--backend hf_flash is the same with attention by flash-attn, which runs on GPUs only.

Under FSDP2 the model is one group: all weights are gathered before the forward pass, and kept until the backward pass.
"""

from __future__ import annotations

import warnings
from copy import copy
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from transformers import EsmForMaskedLM

from common.cli import UserError
from common.compat import use_attention
from common.data.collators import IGNORE
from common.distributed.strategy import ReplicaFlags
from common.distributed.world import World
from common.models.esm2.alphabet import PAD
from common.models.esm2.config import Esm2Config
from common.models.esm2.convert import ADAPTER
from common.models.esm2.model import TRAIN_MASK_RATIO, Esm2ForMaskedLM, Esm2Output, weighted_loss
from common.models.layers.recompute import RecomputeFlags


def check(args: Any, world: World) -> str | None:
    """UserError for a flag that changes this program's layers, which do not run here. A remark where weights are
    sharded."""
    model, precision, strategy = args.model, args.precision, args.strategy
    sharded = isinstance(strategy, RecomputeFlags)
    unsupported = {
        "--torch_compile": model.torch_compile,
        "--bf16_residual": model.bf16_residual,
        "--fused_gelu": model.fused_gelu,
        "--gradient_checkpointing": isinstance(strategy, ReplicaFlags) and strategy.gradient_checkpointing,
        "--activation_checkpointing": sharded and strategy.activation_checkpointing != "none",
        "--offload_activations": getattr(strategy, "offload_activations", False),
        "--cp_size": world.cp_size > 1,
        "--fp8": precision.fp8,
        "--fp4": precision.fp4,
        "--dry_run": world.is_dry_run,
    }
    name = f"--backend {model.backend}"
    for flag in (flag for flag, is_given in unsupported.items() if is_given):
        raise UserError(f"{name}: {flag} is not of transformers' layers: drop one of the two")
    if strategy.needs_layers:
        raise UserError(f"{name}: Megatron-FSDP gathers weights layer by layer: use train_fsdp2.py, or train_ddp.py")
    if model.backend == "hf_flash":
        if world.device.type != "cuda" or find_spec("flash_attn") is None:
            raise UserError(f"{name}: flash-attn is not here (it needs a GPU): use --backend hf")
        if not precision.bf16:
            raise UserError(f"{name}: flash-attn computes in bf16: add --bf16, or use --backend hf")
    return f"All weights are gathered at once, and kept until the backward pass ({name})" if sharded else None


class StockEsm(Esm2ForMaskedLM):
    """The parameters of Esm2ForMaskedLM, computed with by EsmForMaskedLM. attention: transformers' name of it."""

    calls_layers = False
    takes_fillers = False  # each sequence, empty or not, is a row as long as the longest

    def __init__(self, config: Esm2Config, attention: str = "sdpa"):
        super().__init__(config)
        stock = config.to_transformers()
        use_attention(stock, attention)
        with torch.device("meta"):
            model = EsmForMaskedLM(stock)
        empty = copy(stock)
        empty.num_hidden_layers = 0
        with torch.device("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a contact head of no layers has no weights
            self._buffers_of_stock = dict(EsmForMaskedLM(empty).named_buffers())  # positions and rotary frequencies
        assert self._buffers_of_stock.keys() == dict(model.named_buffers()).keys(), "buffers of layers: not handled"
        self._names = {name for name, _ in model.named_parameters()}
        self._stock = [model]  # in a list: its parameters, which stay on the meta device, are not this module's
        self._mask_ratio = TRAIN_MASK_RATIO
        model.esm.embeddings.register_forward_hook(self._scaled)

    def _scaled(self, embeddings: Any, inputs: tuple, embedded: Tensor) -> Tensor:
        """Stock token dropout is made for 12 % of `<mask>` in training: scale to the fraction of this batch."""
        if self._mask_ratio == TRAIN_MASK_RATIO or not embeddings.token_dropout:
            return embedded
        return embedded * ((1 - self._mask_ratio) / (1 - TRAIN_MASK_RATIO))

    def forward(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        mask_ratio: float = TRAIN_MASK_RATIO,
        **unused: Any,
    ) -> Esm2Output:
        """Run a pack [T], padded to `max_seqlen`, or a padded batch [B, S]. The LM head runs on all positions."""
        where, self._mask_ratio = None, mask_ratio
        if input_ids.dim() == 1:
            assert cu_seqlens is not None, "a pack comes with cu_seqlens"
            assert max_seqlen is not None, "and with max_seqlen"
            starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
            places = torch.arange(len(input_ids), device=input_ids.device)
            row = torch.repeat_interleave(
                torch.arange(len(lengths), device=places.device), lengths, output_size=len(places)
            )
            where = row, places - starts[row]
            shape = len(lengths), max_seqlen
            attention_mask = input_ids.new_zeros(shape).index_put(where, input_ids.new_ones(()))
            input_ids = input_ids.new_full(shape, PAD).index_put(where, input_ids)
            labels = labels if labels is None else labels.new_full(shape, IGNORE).index_put(where, labels)
            weights = weights if weights is None else weights.new_zeros(shape).index_put(where, weights)
        tensors = self._weights() | self._constants(input_ids.device)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        logits = functional_call(self._stock[0], tensors, kwargs=inputs, tie_weights=True).logits.float()  # [B, S, 33]
        if labels is None:
            return Esm2Output(logits=logits if where is None else logits[where])
        of_tokens = None if weights is None else weights.flatten()
        loss_sum = weighted_loss(logits.flatten(0, 1), labels.flatten(), of_tokens)
        is_correct, token_losses = logits.argmax(-1) == labels, None
        if not self.training:
            token_losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
        tokens = where if where is not None else ...
        return Esm2Output(
            loss_sum=loss_sum,
            correct=is_correct.sum(),
            token_losses=token_losses[tokens] if token_losses is not None else None,
            token_correct=is_correct[tokens] if token_losses is not None else None,
        )

    def _weights(self) -> dict[str, Tensor]:
        parameters = dict(self.named_parameters())
        autocast = torch.is_autocast_enabled(self.lm_head.bias.device.type)

        def get(name: str) -> Tensor:
            if autocast and name.endswith("layernorm_qkv.weight"):
                # Stock weights are cast by autocast. Those that are parts of a fused one are copies: cast them before.
                return parameters[name].to(torch.get_autocast_dtype(parameters[name].device.type))
            return parameters[name]

        return {name: tensor for name, tensor in ADAPTER.to_hf(get, self.config) if name in self._names}

    def _constants(self, device: torch.device) -> dict[str, Tensor]:
        self._buffers_of_stock = {name: tensor.to(device) for name, tensor in self._buffers_of_stock.items()}
        return self._buffers_of_stock
