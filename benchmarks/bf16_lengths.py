"""What bfloat16 does to embeddings and log-probabilities, by the protein's length: attention alone, and all of it.

python -m benchmarks.bf16_lengths --model_name_or_path out/final_model --fasta my.fasta [--output table.md]

Each way is compared with transformers in fp32 on the same whole proteins, no windows. `--bf16` is embed.py's. Bfloat16
attention alone: transformers in fp32, whose queries, keys and values are rounded to bfloat16 before attention.

--repeat: for a model that was trained on repeats (benchmarks/results/contacts_coils.md), whose attention is sharp.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModelForMaskedLM

from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.prepare.sources.fasta import read_fasta

EDGES = (64, 256, 512, 1024, 2048, 4096, 8192)  # residues
Outputs = tuple[Tensor, Tensor]  # embeddings [residues, hidden], log p [residues, tokens]


def rounded_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, **unused):
    """transformers' interface: [1, heads, tokens, size] to [1, tokens, heads, size]."""
    assert attention_mask is None  # one protein without padding
    rounded = (each.bfloat16() for each in (query, key, value))
    return F.scaled_dot_product_attention(*rounded, scale=scaling).to(query.dtype).transpose(1, 2), None


def stock(directory: str, attention: str, dtype: torch.dtype, autocast: bool = False) -> Callable[[Tensor], Outputs]:
    how = {"attn_implementation": attention, "dtype": dtype}
    model = AutoModelForMaskedLM.from_pretrained(directory, trust_remote_code=False, **how).eval()

    def outputs(ids: Tensor) -> Outputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = model(ids[None], output_hidden_states=True)
        return found.hidden_states[-1][0, 1:-1].float(), found.logits[0, 1:-1].float().log_softmax(-1)

    return outputs


def ours(directory: str, bf16: bool) -> Callable[[Tensor], Outputs]:
    encoder = Encoder(EncoderFlags(directory, bf16=bf16, max_seq_length=EDGES[-1] + 2), torch.device("cpu"))

    def outputs(ids: Tensor) -> Outputs:
        (hidden,), (logits,) = encoder.hidden([ids.numpy()]), encoder.logits([ids.numpy()])
        return hidden[1:-1].float(), logits[1:-1].float().log_softmax(-1)

    return outputs


def errors(found: Outputs, expected: Outputs) -> list[float]:
    """1 - cosine of the mean embeddings, of the worst residue's; largest difference of a mean over residues, of a
    residue's, of log p of its likeliest tokens (above one in a thousand), nats."""
    likely = expected[1] > -6.9
    apart = ((found[1] - expected[1]).abs() * likely).amax(1)
    means = F.cosine_similarity(found[0].double().mean(0), expected[0].double().mean(0), dim=0)
    residues = F.cosine_similarity(found[0].double(), expected[0].double(), dim=1)
    return [1 - means.item(), 1 - residues.min().item(), apart.mean().item(), apart.max().item()]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--fasta", required=True)
    parser.add_argument("--proteins", type=int, default=5, help="the first of each range of lengths")
    parser.add_argument("--repeat", action="store_true", help="each of the first proteins up to each length")
    parser.add_argument("--output")
    args = parser.parse_args()
    AttentionInterface.register("rounded", rounded_attention)
    directory = args.model_name_or_path
    expected = stock(directory, "sdpa", torch.float32)
    ways = {
        "embed.py, fp32": ours(directory, False),
        "bf16 attention alone": stock(directory, "rounded", torch.float32),
        "embed.py --bf16": ours(directory, True),
        "transformers, autocast": stock(directory, "sdpa", torch.float32, autocast=True),
        "transformers, weights in bf16": stock(directory, "sdpa", torch.bfloat16),
    }
    encode = Encoder(EncoderFlags(directory), torch.device("cpu")).alphabet.encode
    proteins = [text for _, text in read_fasta(args.fasta)]
    lines = [
        "| residues | proteins | | 1 - cosine, mean embedding | worst residue | log p, nats: mean | largest |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        if args.repeat:
            texts = [(text * (high // len(text) + 1))[:high] for text in proteins[: args.proteins]]
        else:
            texts = [text for text in proteins if low < len(text) <= high][: args.proteins]
        if not texts:
            raise UserError(f"{args.fasta}: no protein of {low + 1} to {high} residues")
        asked = [torch.from_numpy(encode(text).astype("int64")) for text in texts]
        right = [expected(ids) for ids in asked]
        for name, way in ways.items():
            found = torch.tensor([errors(way(ids), each) for ids, each in zip(asked, right, strict=True)]).double()
            mean, worst, mean_p, worst_p = *found[:, :2].amax(0).tolist(), found[:, 2].mean(), found[:, 3].max()
            cells = f"{mean:.1e} | {worst:.1e} | {mean_p:.4f} | {worst_p:.4f}"
            lines.append(f"| {low + 1:,} to {high:,} | {len(texts)} | {name} | {cells} |")
            say(lines[-1])
    about = (
        "Of each range of lengths the largest 1 - cosine, and the mean and the largest difference of log p over "
        "residues, of the tokens that have one in a thousand or more."
    )
    title = "# bfloat16 by the length of the protein"
    where = where_measured("benchmarks.bf16_lengths", "torch", "transformers")
    publish("\n".join([title, "", *where, "", about, "", *lines]), args.output)


if __name__ == "__main__":
    run(main)
