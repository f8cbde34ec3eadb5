"""What a compiled layer launches: its graphs as torch.compile has them, fused by the rules that Inductor goes by.

The graphs are those of AOTAutograd with Inductor's decompositions and its cut between forward and backward pass. Fused
are operators over the same numbers: elementwise ones with each other and, row by row, with sums over rows (LayerNorm);
sums over columns (gradients of biases and norms) go with sums over the rows of the same large tensor, if neither waits
for the other (Inductor's mix-order reductions, on by default in torch 2.13), or else are kernels of their own, which
read what others have written. A kernel costs the union of what it reads and writes. Matmuls and attention stay what
they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx

from common.compat import (
    aot_function,
    fx_graph_cse,
    make_boxed_func,
    min_cut_rematerialization_partition,
    operator_schema,
    select_decomp_table,
)
from extras.plan.step_model.counts import ATTENTION, MATMULS, Work, tensors

SUMS = ("sum", "mean", "var_mean", "amax")
VIEWS = ("view", "permute", "unbind", "split", "split_with_sizes", "slice", "unsqueeze", "squeeze", "expand", "alias")
VIEWS += ("getitem", "t", "transpose", "select", "_unsafe_view", "reshape", "detach")
# What a kernel that sums over rows and columns asks for (torch 2.13, `MixOrderReduction.can_fuse`).
MIXED_NUMBERS, MIXED_ROWS, MIXED_ROWS_A_COLUMN = 5 << 20, 4096, 2
PARTS = 6  # at most, that a tensor is cut into or put together from: halves of queries, keys and values


def graphs_of(function: Callable, *args) -> list[fx.GraphModule]:
    """The forward and the backward graph of function(*args), whose results are tensors; under a FakeTensorMode."""
    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs) -> Callable:
        found.append(fx.GraphModule(graph, fx_graph_cse(graph.graph)))
        return make_boxed_func(graph)

    options = {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
    go_back(aot_function(function, fw_compiler=keep, bw_compiler=keep, **options)(*args))
    return found


def go_back(results: Tensor | tuple[Tensor, ...]) -> None:
    results = tensors(results)
    torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def fused_work(graph: fx.GraphModule) -> Work:
    work = Work()
    kernels = _Kernels(graph.graph)
    for node in graph.graph.nodes:
        name = _name(node)
        if name in MATMULS:
            work.matmul(*(node.args[place].meta["val"] for place in MATMULS[name]))
        elif name in ATTENTION:
            work.attention += ATTENTION[name]
            work.kernels += 1
    for nodes in kernels.fused():
        # A copy of rows that attention asks for is one kernel; a weight's cast is another.
        work.kernel("+".join(dict.fromkeys(_name(n) for n in nodes)), kernels.bytes_of(nodes))
    return work


class _Kernels:
    """Operators of a graph, put together as long as no kernel comes to wait for itself."""

    def __init__(self, graph: fx.Graph):
        self.nodes = [n for n in graph.nodes if n.op == "call_function" and _name(n) not in VIEWS]
        self.kernel = {n: number for number, n in enumerate(self.nodes)}  # which kernel a node is in
        self.members = {number: [n] for n, number in self.kernel.items()}
        self.alone = {n for n in self.nodes if _name(n) in MATMULS or _name(n) in ATTENTION}
        self.given = {n: {_computed(a) for a in n.all_input_nodes} for n in self.nodes}
        self.users: dict[fx.Node, set] = {}
        for n, inputs in self.given.items():
            for a in inputs:
                self.users.setdefault(a, set()).add(n)
        self.kept = {_computed(a) for a in graph.output_node().all_input_nodes}

    def fused(self) -> list[list[fx.Node]]:
        """Lists of the nodes of a kernel."""
        while any(self._join(pairs()) for pairs in (self._into_columns, self._by_result, self._by_input)):
            pass
        self._join_orders()
        return [nodes for nodes in self.members.values() if nodes[0] not in self.alone]

    def bytes_of(self, nodes: list[fx.Node]) -> int:
        inside = set(nodes)
        reads = {source for n in nodes for a in self.given[n] - inside for source in self._sources(a)} - inside
        return sum(_read(a, nodes) for a in reads) + sum(self._written(n) for n in nodes)

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """What is read for it: column sums recompute values that no kernel writes."""
        if node not in self.kernel or node in self.alone or _over(node) or self._is_written(node):
            return {node}
        return {source for a in self.given[node] for source in self._sources(a)}

    def _written(self, node: fx.Node) -> int:
        """Bytes; of several results (a mean, a deviation) those that are asked for outside."""
        if isinstance(node.meta["val"], Tensor):
            return _size(node) if self._is_written(node) else 0
        ours = self.kernel[node]
        return sum(_size(r) for r in node.users if any(u.op == "output" or self._in_other(u, ours) for u in r.users))

    def _in_other(self, user: fx.Node, kernel: int) -> bool:
        return user in self.kernel and self.kernel[user] != kernel

    def _is_written(self, node: fx.Node) -> bool:
        outside = (u for u in self.users.get(node, ()) if self.kernel[u] != self.kernel[node])
        return node in self.kept or any(_over(node) or not self._sums_columns(self.kernel[u]) for u in outside)

    def _sums_columns(self, kernel: int) -> bool:
        """And nothing else."""
        return {_over(n) for n in self.members[kernel]} - {""} == {"columns"}

    def _join_orders(self) -> None:
        """Sums over columns with those over rows of what both read."""
        for first in [k for k in self.members if self._sums_columns(k)]:
            for second in [k for k, nodes in self.members.items() if any(_over(n) == "rows" for n in nodes)]:
                waits = self._waits_for(first, second) or self._waits_for(second, first)
                if self._both_orders(second, first) and not waits:
                    for n in self.members.pop(first):
                        self.members[second].append(n)
                        self.kernel[n] = second
                    break

    def _both_orders(self, rows: int, columns: int) -> bool:
        shapes = {_shape(n) for k in (rows, columns) for n in self.members[k] if _over(n)}
        if len(shapes) != 1:
            return False
        numbers, lines = shapes.pop()
        large = numbers >= MIXED_NUMBERS and lines >= max(MIXED_ROWS, MIXED_ROWS_A_COLUMN * numbers // lines)
        read = [{s for n in self.members[k] for a in self.given[n] for s in self._sources(a)} for k in (rows, columns)]
        return large and any(_size(a) >= numbers for a in read[0] & read[1])

    def _into_columns(self):
        """What feeds nothing but sums over columns belongs to them."""
        return ((a, n) for a, n in self._by_result() if _over(n) == "columns" and self.users[a] == {n})

    def _by_result(self):
        return ((a, n) for n in self.nodes for a in self.given[n] if a in self.kernel)

    def _by_input(self):
        for users in self.users.values():
            ordered = sorted(users, key=self.nodes.index)
            yield from zip(ordered, ordered[1:], strict=False)

    def _join(self, pairs) -> bool:
        joined = False
        for a, b in pairs:
            first, second = self.kernel[a], self.kernel[b]
            if first != second and self._fit(first, second) and not self._between(first, second):
                for n in self.members.pop(second):
                    self.members[first].append(n)
                    self.kernel[n] = first
                joined = True
        return joined

    def _fit(self, first: int, second: int) -> bool:
        nodes = self.members[first] + self.members[second]
        if any(n in self.alone for n in nodes):
            return False
        sizes = {_numbers(n) for n in nodes}
        rows = {_rows(n) for n in nodes if _over(n) == "rows"}
        columns = {n for n in nodes if _over(n) == "columns"}
        if columns:  # only what feeds them alone goes in
            fed = all(self.users.get(n, set()) <= set(nodes) and n not in self.kept for n in set(nodes) - columns)
            return fed and not rows and len(sizes) == 1
        if rows:
            return len(sizes - rows) <= 1 and len(rows) == 1
        # Halves that are turned and put together again are computed where the whole is written.
        return max(sizes) % min(sizes) == 0 and max(sizes) <= PARTS * min(sizes)

    def _waits_for(self, kernel: int, other: int) -> bool:
        """Whether it reads what the other has written, or what is computed from that."""
        seen, ahead = set(), [kernel]
        while ahead:
            inputs = (a for n in self.members[ahead.pop()] for a in self.given[n])
            read = {self.kernel[source] for a in inputs for source in self._sources(a) if source in self.kernel}
            if other in read:
                return True
            ahead += read - seen - {kernel}
            seen |= read
        return False

    def _between(self, first: int, second: int) -> bool:
        """Whether a third kernel lies on a way from one to the other."""
        for start, end in ((first, second), (second, first)):
            seen, ahead = set(), [k for k in self._after(start) if k != end]
            while ahead:
                kernel = ahead.pop()
                if kernel == end:
                    return True
                if kernel not in seen:
                    seen.add(kernel)
                    ahead += self._after(kernel)
        return False

    def _after(self, kernel: int) -> set[int]:
        users = (u for n in self.members[kernel] for u in self.users.get(n, ()))
        return {self.kernel[u] for u in users} - {kernel}


def _name(node: fx.Node) -> str:
    target = node.target
    if node.op != "call_function":
        return ""
    schema = operator_schema(target)
    return schema.name.split("::")[1] if schema else target.__name__


def _computed(node: fx.Node) -> fx.Node:
    """What a view is of."""
    while node.op == "call_function" and _name(node) in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _size(node: fx.Node) -> int:
    values = node.meta["val"]
    values = values if isinstance(values, (tuple, list)) else [values]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


def _read(node: fx.Node, users: list[fx.Node]) -> int:
    """Bytes of `node` that these read: of several results (attention's) those they ask for."""
    if isinstance(node.meta["val"], Tensor):
        return _size(node)
    results = {a for n in users for a in n.all_input_nodes if _computed(a) is node}
    parts = {}
    for a in results:
        while _name(a) != "getitem" or a.all_input_nodes[0] is not node:
            a = a.all_input_nodes[0]
        parts[a.args[1]] = _size(a)
    return sum(parts.values())


def _over(node: fx.Node) -> str:
    """What a sum is over: `rows` (the last dimension), `columns`; nothing where it is none."""
    if _name(node) not in SUMS:
        return ""
    dims = [d % node.args[0].meta["val"].dim() for d in (node.args[1] if len(node.args) > 1 else [0]) or [0]]
    return "rows" if max(dims) == node.args[0].meta["val"].dim() - 1 else "columns"


def _numbers(node: fx.Node) -> int:
    """Over how many numbers a kernel of this operator goes."""
    value = node.args[0].meta["val"] if _over(node) else node.meta["val"]
    return math.prod(value.shape)


def _shape(node: fx.Node) -> tuple[int, int]:
    """Of what is summed: (numbers, rows)."""
    return _numbers(node), _rows(node)


def _rows(node: fx.Node) -> int:
    return math.prod(node.args[0].meta["val"].shape[:-1])
