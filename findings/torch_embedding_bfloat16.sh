#!/usr/bin/env bash
# torch 2.13.0, CPU: the gradient of a bfloat16 table by embedding(), table[ids] or embedding_bag() is summed in bfloat16 and
# stops at 256 equal terms; index_select, gather and a product with one-hot rows give the sum. With the 20 residues of proteins
# each row of the table has hundreds of terms in a batch; float16 is right. Two ways to write one look-up learn
# differently.
# Seen 2026-11-28, Python 3.11, one token 1,000 times, gradient 1 each:
#   embedding 256   table[ids] 256   embedding_bag 256
#   index_select 1000   gather 1000   one-hot 1000   embedding in float16 1000
# Fails if embedding() gives more than 300. What helps: an fp32 table (autocast keeps it), or index_select.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$directory/venv/bin/python" - <<'END'
import torch
from torch.nn import functional

ids = torch.zeros(1000, dtype=torch.long)
WAYS = {
    "embedding": lambda table: functional.embedding(ids, table),
    "table[ids]": lambda table: table[ids],
    "embedding_bag": lambda table: functional.embedding_bag(ids[None], table, mode="sum"),
    "index_select": lambda table: table.index_select(0, ids),
    "gather": lambda table: table.gather(0, ids[:, None].expand(-1, 8)),
    "one-hot": lambda table: functional.one_hot(ids, 33).to(table.dtype) @ table,
}


def gradient(look_up, kind):
    table = torch.ones(33, 8, dtype=kind, requires_grad=True)
    look_up(table).sum().backward()
    return int(table.grad[0, 0])


found = {name: gradient(look_up, torch.bfloat16) for name, look_up in WAYS.items()}
found["embedding in float16"] = gradient(WAYS["embedding"], torch.float16)
print("   ".join(f"{name} {value}" for name, value in found.items()))
assert list(found.values()) == [256] * 3 + [1000] * 4
END
