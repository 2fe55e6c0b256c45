"""What a compiled kernel is made of: registers, spills, shared memory, and the instructions of its loop."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import networkx
import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Kinds of instructions by their names; the first that fits counts.
_SASS = {
    "matrix": r"MMA|UTC.*MMA",
    "global": r"LDG|STG|LDGSTS|ATOM|RED|UTMA",
    "shared": r"LDS|STS|LDSM|LDT|STT",
    "spill": r"LDL|STL",
    "float": r"FADD|FMUL|FFMA|FMNMX|MUFU|FSETP|FSEL|F2F|HADD|HMUL|HFMA",
    "control": r"BRA|CALL|BAR|SYNC|DEPBAR|WARP|BSSY|NOP",
}
_BYTE = re.compile(r"LDG\S*\.U8|global_load_u(byte|8)|buffer_load_u(byte|8)")
_AMD = {
    "matrix": r"v_mfma",
    "global": r"global_|buffer_|flat_",
    "shared": r"ds_",
    "spill": r"scratch_",
    "float": r"v_(pk_)?(add|mul|fma|max|min|exp|rcp|sub|cvt|cmp)_?\w*f(16|32)",
    "control": r"s_(c?branch|barrier|waitcnt|nop)",
}


@dataclass
class Found:
    """Of one kernel. Bytes are for one program, registers for one thread."""

    registers: int
    spills: int  # instructions that touch local memory; on AMD, vector registers that wait in scratch memory
    shared_bytes: int
    instructions: int
    loop: int  # instructions of the innermost loop with a matrix product; 0: there is none
    scan: int  # of the loop over table entries, for one entry of each thread, however often it is unrolled; 0: none
    mix: dict[str, int] = field(default_factory=dict)  # of the innermost loop, by kind
    parked: int = 0  # on AMD, scalar registers that wait in lanes of vector registers; no memory is touched


@dataclass(frozen=True)
class Instruction:
    """One line of a program, and where it can lead."""

    text: str
    target: int | None = None  # the place that it may jump to
    goes_on: bool = True  # whether the next instruction may follow


def inspect(kernel: Any) -> Found:
    """Read a kernel that Triton compiled for NVIDIA or AMD."""
    if "amdgcn" in kernel.asm:
        return _amd(kernel)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([_CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    code = _sass(sass)
    spills = sum(bool(re.search(r"\b(LDL|STL)", one.text)) for one in code)
    return _found(int(registers[1]), spills, kernel.metadata.shared, code, _SASS)


def _sass(text: str) -> list[Instruction]:
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)
    places = {int(at, 16): place for place, (at, _) in enumerate(lines)}
    code = []
    for _, one in lines:
        # A call either is one, or a jump out of a loop.
        jump = re.search(r"\b(?:BRA|CALL)\S*\s+(.*?)0x([0-9a-f]+)", one)
        # A predicate stands ahead of the instruction, or, where it is the same for the warp, ahead of the address.
        sometimes = one.startswith("@") or "CALL" in one or bool(jump and jump[1])
        ends = jump is not None or re.search(r"\b(EXIT|RET)\b", one) is not None
        code.append(Instruction(one, places.get(int(jump[2], 16)) if jump else None, sometimes or not ends))
    return code


def _amd(kernel: Any) -> Found:
    text = kernel.asm["amdgcn"]
    numbers = {
        key: int(re.findall(rf"\.{key}:\s+(\d+)", text)[0])
        for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    }
    code = _gcn(text[: text.index(".Lfunc_end0")])
    found = _found(numbers["vgpr_count"], numbers["vgpr_spill_count"], kernel.metadata.shared, code, _AMD)
    found.parked = numbers["sgpr_spill_count"]
    return found


def _gcn(text: str) -> list[Instruction]:
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+((?:[vs]|ds|global|buffer|flat|scratch)_.*)", line):
            lines.append(instruction[1])
    code = []
    for one in lines:
        jump = re.match(r"s_c?branch\w*\s+(\.LBB\w+)", one)
        goes_on = not one.startswith(("s_branch", "s_endpgm", "s_setpc"))
        code.append(Instruction(one, labels[jump[1]] if jump else None, goes_on))
    return code


def loops_of(code: list[Instruction]) -> list[set[int]]:
    """The natural loops of a program, each as the places of its instructions.

    A jump backwards is not enough: compilers put what happens rarely, such as waiting for a barrier, behind the
    end of the program, from where it jumps back. A loop is what can only be entered at its head.
    """
    flow = networkx.DiGraph()
    flow.add_node(0)
    for place, one in enumerate(code):
        if one.goes_on and place + 1 < len(code):
            flow.add_edge(place, place + 1)
        if one.target is not None:
            flow.add_edge(place, one.target)
    above = networkx.immediate_dominators(flow, 0)
    loops: dict[int, set[int]] = {}
    for place in above:
        for head in flow.successors(place):
            if _is_above(head, place, above):
                loops.setdefault(head, {head}).update(_reaching(flow, place, head))
    return list(loops.values())


def _is_above(head: int, place: int, above: dict[int, int]) -> bool:
    """Whether every way from the start of the program to `place` leads through `head`."""
    while place != head and above.get(place, place) != place:
        place = above[place]
    return place == head


def _reaching(flow: Any, place: int, head: int) -> set[int]:
    """What reaches `place` without passing `head`."""
    found, rest = {head}, [place]
    while rest:
        one = rest.pop()
        if one not in found:
            found.add(one)
            rest.extend(flow.predecessors(one))
    return found


def _found(registers: int, spills: int, shared: int, code: list[Instruction], kinds: dict[str, str]) -> Found:
    loops = loops_of(code)
    matrix = [loop for loop in loops if _has(code, loop, kinds["matrix"])]
    innermost = [loop for loop in matrix if not any(other < loop for other in matrix)]
    tile = max(innermost, key=len, default=set())
    # The map has a byte for each entry, and no other loop without a product loads single bytes.
    looks = [
        len(loop) / loads
        for loop in loops
        if loop not in matrix and (loads := sum(bool(_BYTE.search(code[place].text)) for place in loop))
    ]
    mix = Counter(
        next((kind for kind, pattern in kinds.items() if re.search(pattern, code[place].text)), "integer")
        for place in tile
    )
    return Found(registers, spills, shared, len(code), len(tile), round(max(looks, default=0)), dict(mix))


def _has(code: list[Instruction], loop: set[int], pattern: str) -> bool:
    return any(re.search(pattern, code[place].text) for place in loop)
