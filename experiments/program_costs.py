"""What a program costs: FLOPs of its jaxpr, and HBM and link traffic of what XLA compiled from it.

XLA's own cost analysis counts the body of a loop once, however often it runs; here every loop is
multiplied by its trip count, so that a step of 32 micro-batches costs 32 of them. Used by
aot_tpu.py.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "s16": 16, "u16": 16,
    "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# These move nothing themselves: names for what is there, or computations counted on their own.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "call",
    "conditional", "partition-id", "replica-id", "opt-barrier", "add-dependency", "async-start",
    "async-update", "async-done", "copy-done", "slice-done", "domain",
}  # fmt: skip


# ---- FLOPs of a jaxpr -------------------------------------------------------------------------


def flops(jaxpr: Any) -> int:
    """Floating-point operations of all products in a jaxpr, on all devices together.

    A product of [m, k] and [k, n] is 2 m k n. Scans count by their length, kernels by their grid
    or, where that depends on data, by the most that they say they can need; of branches the dearest
    counts; a while loop by the most that a scope at_most_N_times around it tells, else once. What
    is not a product is left out, as in the usual count of a model's FLOPs.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_flops_of(equation) for equation in jaxpr.eqns)


def _flops_of(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    shapes = [getattr(x.aval, "shape", ()) for x in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        depth = math.prod(shapes[0][axis] for axis in contracted)
        return 2 * depth * math.prod(equation.outvars[0].aval.shape)
    if name in ("ragged_dot", "ragged_dot_general"):  # each row meets one group alone
        return 2 * math.prod(shapes[0]) * shapes[1][-1]
    inner = [flops(x) for x in _jaxprs(params)]
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "cond":
        return max(inner)
    if name == "shard_map":  # its jaxpr is one device's
        return params["mesh"].size * sum(inner)
    if name == "while":
        told = re.search(r"at_most_(\d+)_times\)*$", str(equation.source_info.name_stack))
        return (int(told[1]) if told else 1) * sum(inner)
    if name == "pallas_call":
        if params["grid_mapping"].num_dynamic_grid_bounds:
            return params["cost_estimate"].flops
        return math.prod(params["grid_mapping"].grid) * sum(inner)
    return sum(inner)


def _jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item


# ---- Traffic of a compiled module -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation in XLA's text."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes behind the operands


@dataclasses.dataclass
class Traffic:
    """Bytes per chip and execution of a program.

    `collectives` are output bytes by kind; `link_bytes` what a chip sends for them: the output of
    a gather, the input of a scatter, both for an all-reduce. `uncounted_loops` had no trip count
    to be found and are in here once.
    """

    hbm_bytes: float = 0.0
    link_bytes: float = 0.0
    collectives: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(COLLECTIVES, 0.0)
    )
    uncounted_loops: int = 0


def traffic(hlo: str, loops: bool = True) -> Traffic:
    """Traffic of a scheduled module for TPUs, `compiled.as_text()`.

    HBM: what every instruction outside of a fusion reads and writes there; operands that lie in
    VMEM cost nothing, the copies that bring them there do. Of a buffer that a fusion only slices
    the slice counts, of one that it updates in place the update. A custom call (Pallas) counts
    each operand and result once.

    Args:
      loops: False counts every loop body once, as XLA's cost analysis does.
    """
    module = _Module(hlo, loops)
    module.visit(module.entry, 1)
    return module.total


class _Module:
    def __init__(self, hlo: str, loops: bool):
        self.computations, self.entry = _parse(hlo)
        self.loops = loops
        self.total = Traffic()
        self._seen: set[tuple[str, str]] = set()

    def visit(self, name: str, times: float) -> None:
        """Adds a computation that runs so many times."""
        for one in self.computations[name].values():
            if one.opcode == "while":
                trips = self._trips(name, one)
                self.visit(_attribute(one, "body"), times * (trips if self.loops else 1))
            elif one.opcode in ("call", "async-start", "conditional"):
                for called in _called(one):
                    self.visit(called, times)
            elif _is_collective(one):
                self._collective(name, one, times)
            elif one.opcode == "fusion":
                inside = self.computations[_attribute(one, "calls")]
                scatters = _attribute(one, "calls").startswith("all-reduce-scatter")
                for inner in self._everything(inside):
                    if _is_collective(inner):
                        self._collective(name, inner, times, scatters)
                self.total.hbm_bytes += times * self._fusion_bytes(name, one)
            elif one.opcode not in _FREE:
                self.total.hbm_bytes += times * self._plain_bytes(name, one)

    def _everything(self, computation: dict[str, Instruction]) -> Iterator[Instruction]:
        for one in computation.values():
            yield one
            if one.opcode == "fusion":
                yield from self._everything(self.computations[_attribute(one, "calls")])

    def _trips(self, caller: str, loop: Instruction) -> int:
        """From the condition, which compares a counter with a constant, its step and its start.

        The step need not be 1: XLA moves the shards of a product in both directions at once, two
        in each round of a loop.
        """
        condition = self.computations[_attribute(loop, "condition")]
        steps = list(self._everything(condition))
        compared = [x for x in steps if x.opcode == "compare" and "direction=LT" in x.rest]
        limits = {int(x.operands[0]) for x in steps if _is_integer(x)}
        counters = {
            int(x.rest.partition("index=")[2].split(",")[0])
            for x in condition.values()
            if x.opcode == "get-tuple-element" and x.type[0] in "su"
        }
        if len(compared) == len(limits) == len(counters) == 1:
            (limit,), (index,) = limits, counters
            body = self.computations[_attribute(loop, "body")]
            by = self._step(body, list(body.values())[-1].operands[index])
            if by:
                return -(-(limit - self._start(caller, loop, index)) // by)
        if told := re.search(r'op_name="[^"]*at_most_(\d+)_times\)*/while"', loop.rest):
            return int(told[1])
        self.total.uncounted_loops += 1
        return 1

    def _step(self, body: dict[str, Instruction], name: str) -> int | None:
        """The constant that a body adds to its counter."""
        one = body[name]
        while one.opcode in ("copy", "bitcast"):
            one = body[one.operands[0]]
        if one.opcode == "add":
            inside = [body[x] for x in one.operands]
        elif one.opcode == "fusion":
            inside = list(self._everything(self.computations[_attribute(one, "calls")]))
        else:
            return None
        found = {int(x.operands[0]) for x in inside if _is_integer(x)}
        return found.pop() if len(found) == 1 else None

    def _start(self, caller: str, loop: Instruction, index: int) -> int:
        """The counter before the first round: a constant, or 0 if that cannot be seen."""
        lines = self.computations[caller]
        one = lines[loop.operands[0]]
        if one.opcode == "tuple":
            one = lines[one.operands[index]]
        while one.opcode in ("copy", "bitcast"):
            one = lines[one.operands[0]]
        return int(one.operands[0]) if _is_integer(one) else 0

    def _collective(
        self, caller: str, one: Instruction, times: float, scatters: bool = False
    ) -> None:
        """Once for every channel: an asynchronous one appears in the fusions of its every stage.

        Args:
          scatters: an all-reduce of which each device keeps its slice: so TPUs' compiler writes a
            reduce-scatter.
        """
        channel = re.search(r"channel_id=(\d+)", one.rest)
        key = caller, channel[1] if channel else one.name
        if key in self._seen:
            return
        self._seen.add(key)
        kind, group = one.opcode.removesuffix("-start"), _group_size(one.rest)
        # The type of a start holds operands and results; the larger half is the result's.
        sizes = [_bytes(x) for x in _elements(one.type)]
        written = sum(sizes) if kind == one.opcode else max(sizes)
        if scatters and kind == "all-reduce":
            kind, written = "reduce-scatter", written / group
        read = {"all-gather": written / group, "reduce-scatter": written * group}.get(kind, written)
        sent = {"reduce-scatter": read, "all-reduce": 2 * written}.get(kind, written)
        self.total.collectives[kind] += times * written
        self.total.link_bytes += times * sent
        self.total.hbm_bytes += times * (read + written)

    def _plain_bytes(self, computation: str, one: Instruction) -> float:
        if one.opcode == "custom-call" and 'target="AllocateBuffer"' in one.rest:
            return 0
        if one.opcode == "copy-start":  # its type is (destination, source, context)
            return sum(_bytes(x, hbm_only=True) for x in _elements(one.type)[:2])
        if one.opcode == "slice-start":
            result = _elements(one.type)[1]
            return _bytes(result) + _bytes(result, hbm_only=True)
        lines = self.computations[computation]
        written = _bytes(one.type, hbm_only=True)
        if one.opcode in ("dynamic-slice", "slice", "gather"):
            source = lines[one.operands[0]].type
            return written + (_bytes(one.type) if _bytes(source, hbm_only=True) else 0)
        if one.opcode in ("dynamic-update-slice", "scatter"):
            update = lines[one.operands[1 if one.opcode != "scatter" else 2]].type
            return 2 * _bytes(update) if written else 0
        return written + sum(_bytes(lines[x].type, hbm_only=True) for x in one.operands)

    def _fusion_bytes(self, computation: str, one: Instruction) -> float:
        lines, called = self.computations[computation], _attribute(one, "calls")
        read = sum(
            min(self._read(called, index), _bytes(lines[operand].type))
            for index, operand in enumerate(one.operands)
            if _bytes(lines[operand].type, hbm_only=True)
        )
        return read + self._written(called, one.type)

    @functools.cache  # noqa: B019  the module lives as long as the count
    def _read(self, computation: str, index: int) -> float:
        """Bytes of parameter `index` that a fused computation reads."""
        lines = self.computations[computation]
        parameter = next(
            x for x in lines.values() if x.opcode == "parameter" and x.operands[0] == str(index)
        )
        return self._used(computation, parameter)

    def _used(self, computation: str, value: Instruction) -> float:
        whole, total = _bytes(value.type), 0.0
        for one in self.computations[computation].values():
            if value.name not in one.operands or one.opcode == "parameter":
                continue
            if one.opcode in ("tuple", *COLLECTIVES):  # passed on, or counted elsewhere
                continue
            first = one.operands[0] == value.name
            if one.opcode == "bitcast":
                total += self._used(computation, one)
            elif one.opcode in ("dynamic-slice", "slice", "gather") and first:
                total += _bytes(one.type)
            elif one.opcode in ("dynamic-update-slice", "scatter") and first:
                continue  # in place
            elif one.opcode == "fusion":
                inner = _attribute(one, "calls")
                total += sum(
                    self._read(inner, i) for i, x in enumerate(one.operands) if x == value.name
                )
            else:
                return whole
        return min(total, whole)

    def _written(self, computation: str, result: str) -> float:
        """Bytes that a fused computation writes to HBM, its result being of this type."""
        lines = self.computations[computation]
        root = list(lines.values())[-1]
        if root.opcode != "tuple":
            return self._written_by(computation, root, result)
        return sum(
            self._written_by(computation, lines[name], type_)
            for name, type_ in zip(root.operands, _elements(result), strict=True)
        )

    def _written_by(self, computation: str, one: Instruction, result: str) -> float:
        size = _bytes(result, hbm_only=True)
        lines = self.computations[computation]
        while one.opcode == "bitcast":
            one = lines[one.operands[0]]
        if not size or one.opcode == "parameter" or _is_collective(one):
            return 0
        if one.opcode == "dynamic-update-slice":
            return min(_bytes(lines[one.operands[1]].type), size)
        if one.opcode == "fusion":
            return min(self._written(_attribute(one, "calls"), result), size)
        return size


def _is_collective(one: Instruction) -> bool:
    return one.opcode.removesuffix("-start") in COLLECTIVES


def _is_integer(one: Instruction) -> bool:
    return one.opcode == "constant" and re.fullmatch(r"-?\d+", one.operands[0]) is not None


def _attribute(one: Instruction, name: str) -> str:
    return re.search(rf"\b{name}=%([\w.\-]+)", one.rest)[1]


def _called(one: Instruction) -> list[str]:
    text = re.search(
        r"(?:calls|to_apply|branch_computations|true_computation)=(\{[^}]*\}|%[\w.\-]+)"
        r"(?:, false_computation=(%[\w.\-]+))?",
        one.rest,
    )
    return _NAME.findall(" ".join(filter(None, text.groups())))


def _group_size(rest: str) -> int:
    """Devices of a group: {{0,1},{2,3}}, [groups,size]<=[...] or mesh['a'=2,'b'=8] {'b'}."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        axes = dict(re.findall(r"'([\w.]+)'=(\d+)", match[1]))
        return math.prod(int(axes[name]) for name in re.findall(r"'([\w.]+)'", match[2]))
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", rest):
        return int(match[2])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(match[1].split(","))
    return 1


def _bytes(type_: str, hbm_only: bool = False) -> float:
    """Of all arrays in a type; those with a memory space, as S(1), are not in HBM."""
    total = 0.0
    for kind, dims, layout in _SHAPE.findall(type_):
        if hbm_only and re.search(r"S\(\d+\)", layout):
            continue
        total += math.prod(int(x) for x in dims.split(",") if x) * _BITS.get(kind, 0) / 8
    return total


def _elements(type_: str) -> list[str]:
    """The parts of a tuple type, or the type itself."""
    if not type_.startswith("("):
        return [type_]
    parts, depth, start = [], 0, 1
    for at, char in enumerate(type_):
        depth += char in "([{"
        depth -= char in ")]}"
        if (char == "," and depth == 1) or at == len(type_) - 1:
            parts.append(type_[start:at].strip())
            start = at + 1
    return [x for x in parts if x]


def _balanced(text: str) -> int:
    """Where the parenthesis that opens `text` is closed."""
    depth = 0
    for at, char in enumerate(text):
        depth += char == "("
        depth -= char == ")"
        if not depth:
            return at
    raise ValueError(f"unbalanced: {text[:80]}")


def _parse(hlo: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Computations by name, each its instructions by name in order, and the entry's name."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, lines = "", None
    for text in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", text):
            lines = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif lines is not None and (match := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)$", text)):
            rest = re.sub(r"/\*.*?\*/", "", match[2])
            end = _balanced(rest) + 1 if rest.startswith("(") else rest.index(" ")
            type_, rest = rest[:end], rest[end + 1 :]
            opcode, _, rest = rest.partition("(")
            close = _balanced("(" + rest) - 1
            inside, rest = rest[:close], rest[close + 1 :]
            literal = opcode in ("constant", "parameter")  # a value, or a number
            operands = (inside,) if literal else tuple(_NAME.findall(inside))
            lines[match[1]] = Instruction(match[1], type_, opcode, operands, rest)
    return computations, entry


def shard_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or `ShapeDtypeStruct`s."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
