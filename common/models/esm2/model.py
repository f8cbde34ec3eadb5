"""ESM-2 for masked language modelling: embeddings with token dropout, encoder, LM head, loss.

Fidelity to `transformers.EsmForMaskedLM` (fp32 logits within 1e-5, gradients within 1e-5 relative norm) is tested for
the shapes of all six sizes. Inside, tokens always lie packed end to end: a padded batch is unpadded on the way in, so
padding costs no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.esm2.alphabet import MASK, PAD
from common.models.esm2.config import Esm2Config
from common.models.esm2.layers_torch import LayerNorm
from common.models.layers.initialise import initialise
from common.models.layers.linear import Embedding, Linear, linear
from common.models.layers.residual import Block, Layers, Model, total
from common.shape_buckets import SHAPE_MULTIPLE, filled_up, predicted_positions

PADDED_VOCAB = 64  # rows of the embedding, or a multiple, for matrix units. Those past the tokens stay zero, unseen.
# ESM-2 was trained with 15 % of the tokens selected, 80 % of them replaced by <mask>: 12 % of the input.
TRAIN_MASK_RATIO = 0.15 * 0.8


class Esm2Output(NamedTuple):
    """The result of a forward pass. Without labels: `logits`. With labels: sums over the masked positions.

    A tuple: wrappers' hooks look for tensors in tuples and lists, and silently miss those of a dataclass.
    """

    logits: Tensor | None = None  # [T, tokens] or [B, S, tokens] (zeros where padded), fp32
    loss_sum: Tensor | None = None  # scalar fp32: cross-entropy in nats, summed over the masked positions
    correct: Tensor | None = None  # scalar int64: masked positions whose top prediction is the label
    hidden: Tensor | None = None  # [T, hidden]: after the final LayerNorm; only when asked for
    token_losses: Tensor | None = None  # [T] fp32: nats, 0 where nothing is predicted; in eval mode
    token_correct: Tensor | None = None  # [T] bool: where the top prediction is the label; in eval mode


def padded(vocab_size: int) -> int:
    """The least multiple of PADDED_VOCAB that has a row for each token."""
    return -(-vocab_size // PADDED_VOCAB) * PADDED_VOCAB


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Cross-entropy in nats, summed over the rows [P, tokens] whose target is not -100, each times its weight [P].
    Weights of 1 change no bit of it, nor of its gradient."""
    if weights is None:
        return F.cross_entropy(logits, targets, reduction="sum")
    return F.nll_loss(F.log_softmax(logits, -1) * weights[:, None], targets, reduction="sum")


class Embeddings(nn.Module):
    """residual: dtype of the residual stream under autocast."""

    def __init__(self, config: Any, residual: torch.dtype = torch.float32):
        super().__init__()
        self.token_dropout, self.residual = config.token_dropout, residual
        self.mask = getattr(config, "mask_token_id", MASK)
        rows = torch.empty(padded(getattr(config, "vocab_size", PADDED_VOCAB)), config.hidden_size)
        self.word_embeddings = Embedding.from_pretrained(rows, freeze=False)  # drawing on meta imports the compiler

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        cp_pack: Any = None,
        mask_ratio: float = TRAIN_MASK_RATIO,
    ) -> Tensor:
        """[T] -> [T, hidden]. Token dropout counts the masks of each sequence by itself, of the whole sequence with
        context parallelism. mask_ratio: at which its scale is 1."""
        x = self.word_embeddings(input_ids)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x, dtype = x.float(), self.residual  # also if a strategy casts weights to bf16
        if not self.token_dropout:
            return x.to(dtype)
        is_mask = input_ids == self.mask
        cu_seqlens = cu_seqlens.long()
        lengths = cu_seqlens.diff()
        if cp_pack is None:
            masks_before = F.pad(is_mask.cumsum(0), (1, 0))
            ratio = masks_before[cu_seqlens].diff() / lengths.clamp(min=1)
        else:
            ratio = cp_pack.masked_fractions(len(lengths))
        # A sequence of <mask> alone has zero embeddings anyway; the clamp avoids 0/0.
        scale = (1 - mask_ratio) / (1 - ratio).clamp(min=1e-6)
        per_token = torch.repeat_interleave(scale, lengths, output_size=len(input_ids))
        return (x * per_token.masked_fill(is_mask, 0.0)[:, None].to(x.dtype)).to(dtype)


class Encoder(nn.Module):
    """layers: the module that defines them (`layers_torch` or `layers_te`); those of a family may be others."""

    def __init__(self, config: Any, layers: Any, final_norm: nn.Module):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.prepare, self.begin = layers.prepare, layers.begin
        self.layers = Layers(layers.TransformerLayer(config, n) for n in range(config.num_hidden_layers))
        self.prepare_shared: Callable | None = None  # as `prepare`, of a pack that ranks share; also its layout
        self.emb_layer_norm_after = final_norm

    def forward(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, cp_pack: Any = None, at: Tensor | None = None
    ) -> Tensor:
        """[T, hidden] -> the same; [P, hidden] of the tokens `at`, int64 [P], the last layer's alone."""
        to_prepare, layout = (len(x), cu_seqlens, max_seqlen, self.head_dim), None
        if cp_pack is None:
            rotary, max_seqlen = self.prepare(*to_prepare)
        else:
            assert self.prepare_shared is not None, "a model takes its share of packs once it is in a group of ranks"
            rotary, max_seqlen, layout = self.prepare_shared(*to_prepare, cp_pack)
        stream, last = self.begin(x), () if at is None else (at,)
        for number, layer in enumerate(self.layers.in_turn(), 1):
            of_last = last if number == len(self.layers) else ()
            stream = layer(stream, rotary, cu_seqlens, max_seqlen, layout, *of_last)
        return self.emb_layer_norm_after(total(stream))


class LMHead(nn.Module):
    """dense -> GELU -> LayerNorm -> decoder tied to the embedding + bias."""

    def __init__(self, config: Esm2Config):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.num_tokens = config.num_tokens
        self.bias = nn.Parameter(torch.empty(padded(config.num_tokens)))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = self.layer_norm(F.gelu(self.dense(x)))
        return linear(x, embedding, self.bias)[..., : self.num_tokens].float()


class Esm2ForMaskedLM(Model):
    """ESM-2 of any size. Build it under `torch.device("meta")` if large.

    backend: of the encoder layers, `torch` (any device) or `te` (Transformer Engine; CUDA). Parameters are the same.
    residual: of torch's layers under autocast, the stream from layer to layer; that of `te` is always bf16.
    """

    zero_rows: dict[str, Any]
    padded_vocab: dict[str, Any]

    def __init__(self, config: Esm2Config, backend: str = "torch", residual: torch.dtype = torch.float32):
        super().__init__()
        layers: Any
        if backend == "te":
            from common.models.esm2 import layers_te as layers
        else:
            from common.models.esm2 import layers_torch as layers
        self.config, self.backend = config, backend
        self.embeddings = Embeddings(config, residual)
        self.encoder = Encoder(config, layers, LayerNorm(config.hidden_size, eps=config.layer_norm_eps))
        self.lm_head = LMHead(config)
        self._name_rows()

    def _name_rows(self) -> None:
        """For layers.initialise: <pad> and the rows past the vocabulary start, and stay, at zero."""
        size, embedding = self.config.num_tokens, "embeddings.word_embeddings.weight"
        self.zero_rows = {embedding: (self.config.pad_token_id, *range(size, padded(size)))}
        self.padded_vocab = {embedding: size, "lm_head.bias": size}

    @property
    def layers(self) -> Layers:  # pyrefly: ignore[bad-override]  # checkpoints have the attribute's name
        return self.encoder.layers

    def hidden_matrices(self) -> dict[str, list[Block]]:
        size, heads = self.config.hidden_size, self.config.num_attention_heads
        of_layer = {
            "self_attention.layernorm_qkv.weight": [Block(3 * size, groups=heads, parts=3)],
            "self_attention.proj.weight": [Block(size)],
            "layernorm_mlp.fc1_weight": [Block(self.config.intermediate_size)],
            "layernorm_mlp.fc2_weight": [Block(size)],
        }
        layers = range(self.config.num_hidden_layers)
        blocks = {f"encoder.layers.{n}.{name}": of for n in layers for name, of in of_layer.items()}
        return blocks | {"lm_head.dense.weight": [Block(size)]}

    def forward(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        predicted: Tensor | None = None,
        weights: Tensor | None = None,
        mask_ratio: float = TRAIN_MASK_RATIO,
        output_hidden: bool = False,
        at: Tensor | None = None,
        cp_pack: Any = None,
        sets: Tensor | None = None,
        context: Any = None,
    ) -> Esm2Output:
        """Run a pack (`input_ids` [T], `cu_seqlens` int32 [B + 1]) or a padded batch (`input_ids`, mask [B, S]).

        cp_pack: with context parallelism, how ranks share the pack's sequences (extras.speed.context_parallel.CpPack);
        `input_ids`, `labels` and all results are then of this rank's tokens.

        sets, context: of a family that reads sets of sequences (extras.families.sets.encoder).

        labels: of the shape of `input_ids`, -100 where nothing is predicted; the LM head runs on the labelled
        positions only. predicted: those positions (`predicted_positions`), without which the model synchronises with
        the device to count them. weights: fp32 [T], of the tokens' losses in `loss_sum`; None: 1. mask_ratio: the
        expected fraction of `<mask>`, which token dropout compensates: of this step in training, ESM-2's elsewhere.
        at: int64 [P], the tokens of a pack whose logits [P, tokens] and hidden states are wanted, without labels.
        Padding may be on either side, but not inside a sequence.
        """
        shape, unpadded = input_ids.shape, None
        if input_ids.dim() == 2:
            if attention_mask is None:
                attention_mask = torch.ones_like(input_ids)
            unpadded = attention_mask.flatten().nonzero().squeeze(1)  # [T]: indices in the padded batch
            lengths = attention_mask.sum(1)
            cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            max_seqlen = int(lengths.max())
            input_ids = input_ids.flatten()[unpadded]
            labels = labels.flatten()[unpadded] if labels is not None else None
        assert cu_seqlens is not None, "a pack comes with cu_seqlens"
        assert max_seqlen is not None, "and with max_seqlen"
        tokens = len(input_ids)
        if mock := filled_up(tokens) - tokens:  # sequences of <pad>, whose results are cut off below
            input_ids = F.pad(input_ids, (0, mock), value=PAD)
            max_seqlen = max(max_seqlen, SHAPE_MULTIPLE)  # no filler is longer: in attention they would cost squares
            ends = torch.arange(mock, 0, -max_seqlen, dtype=cu_seqlens.dtype, device=cu_seqlens.device).flip(0)
            cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:] + ends))
        embedded = self.embeddings(input_ids, cu_seqlens, cp_pack, mask_ratio)
        more = {"sets": sets, "context": context, "at": at}
        more = {name: value for name, value in more.items() if value is not None}
        hidden = self.encoder(embedded, cu_seqlens, max_seqlen, cp_pack, **more)[:tokens]
        embedding = self.embeddings.word_embeddings.weight
        if labels is not None:
            predicted = predicted_positions(labels) if predicted is None else predicted
            is_filler = predicted < 0
            targets = labels[predicted].masked_fill(is_filler, -100)  # whose loss is ignored
            places = predicted.masked_fill(is_filler, 0)
            logits = self.lm_head(hidden[places], embedding)
            loss_sum = weighted_loss(logits, targets, None if weights is None else weights[places])
            is_correct = logits.argmax(-1) == targets
            token_losses = token_correct = None
            if not self.training:
                losses = F.cross_entropy(logits, targets, reduction="none")
                token_losses = losses.new_zeros(tokens).index_add(0, places, losses)
                token_correct = losses.new_zeros(tokens).index_add(0, places, is_correct.to(losses.dtype)).bool()
            return Esm2Output(
                loss_sum=loss_sum,
                correct=is_correct.sum(),
                hidden=hidden if output_hidden else None,
                token_losses=token_losses,
                token_correct=token_correct,
            )
        logits = self.lm_head(hidden, embedding)
        if unpadded is not None:
            everywhere = logits.new_zeros(shape.numel(), logits.shape[-1])
            logits = everywhere.index_copy(0, unpadded, logits).view(*shape, -1)
        return Esm2Output(logits=logits, hidden=hidden if output_hidden else None)


def build_model(
    config: Esm2Config, seed: int, device: torch.device | str = "cpu", backend: str = "torch"
) -> Esm2ForMaskedLM:
    """A freshly initialised fp32 model on `device`."""
    with torch.device("meta"):
        model = Esm2ForMaskedLM(config, backend)
    initialise(model.to_empty(device=device), seed, config.initializer_range)
    return model
