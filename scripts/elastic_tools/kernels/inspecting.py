"""What a compiled kernel is made of: registers, spills, shared memory, and the instructions of its loop."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Kinds of instructions by their names; the first that fits counts.
_SASS = {
    "matrix": r"MMA|UTC.*MMA",
    "global": r"LDG|STG|LDGSTS|ATOM|RED|UTMA",
    "shared": r"LDS|STS|LDSM|LDT|STT",
    "spill": r"LDL|STL",
    "float": r"FADD|FMUL|FFMA|FMNMX|MUFU|FSETP|FSEL|F2F|HADD|HMUL|HFMA",
    "control": r"BRA|BAR|SYNC|DEPBAR|WARP|BSSY|NOP",
}
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
    loop: int  # instructions of the innermost loop with a matrix product
    scan: int  # of the guard's loop, 0 where there is none
    mix: dict[str, int] = field(default_factory=dict)  # of the innermost loop, by kind
    parked: int = 0  # on AMD, scalar registers that wait in lanes of vector registers; no memory is touched


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
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    loops = []
    for at, text in code:
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            loops.append([name for place, name in code if int(jump[1], 16) <= place <= at])
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    spills = sum(bool(re.search(r"\b(LDL|STL)", text)) for _, text in code)
    return _found(int(registers[1]), spills, kernel.metadata.shared, [text for _, text in code], loops, _SASS)


def _amd(kernel: Any) -> Found:
    text = kernel.asm["amdgcn"]
    numbers = {
        key: int(re.findall(rf"\.{key}:\s+(\d+)", text)[0])
        for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    }
    code: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in text[: text.index(".Lfunc_end0")].splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+([vs]_\w+|ds_\w+|global_\w+|buffer_\w+|flat_\w+|scratch_\w+)(.*)", line):
            code.append(instruction[1])
            target = re.search(r"(\.LBB\w+)", instruction[2])
            if "branch" in instruction[1] and target and target[1] in labels:
                loops.append(code[labels[target[1]] :])
    shared = kernel.metadata.shared
    found = _found(numbers["vgpr_count"], numbers["vgpr_spill_count"], shared, code, loops, _AMD)
    found.parked = numbers["sgpr_spill_count"]
    return found


def _found(
    registers: int, spills: int, shared: int, code: list[str], loops: list[list[str]], kinds: dict[str, str]
) -> Found:
    matrix = [loop for loop in loops if any(re.search(kinds["matrix"], text) for text in loop)]
    # Waiting for a barrier is a loop of a few instructions too.
    tile = min((loop for loop in matrix if len(loop) > 32), key=len, default=[])
    scans = [
        len(loop)
        for loop in loops
        if loop not in matrix and len(loop) > 16 and any(re.search(kinds["global"], text) for text in loop)
    ]
    mix = Counter(
        next((kind for kind, pattern in kinds.items() if re.search(pattern, text)), "integer") for text in tile
    )
    # The search for a sequence is a loop of its own, before the guard's.
    return Found(registers, spills, shared, len(code), len(tile), max(scans, default=0), dict(mix))
