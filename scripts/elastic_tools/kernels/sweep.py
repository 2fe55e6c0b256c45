"""All configurations for one target, in a process of its own."""

from typing import TYPE_CHECKING

from elastic_tools.kernels.compiling import let_vllm_have_triton

if TYPE_CHECKING:
    from elastic_tools.kernels.table import Row


def rows_for(target: str, only: str) -> "list[Row]":
    """Compile the configurations whose names have `only` in them."""
    let_vllm_have_triton()
    from elastic_tools.kernels.cases import cases
    from elastic_tools.kernels.table import compile_case

    rows = []
    for case in cases():
        if only in str(case) and case.compiles_for(target):
            rows.append(compile_case(target, case))
            print(target, case, rows[-1].ours, f"{rows[-1].guard_cost:+.1%}", *rows[-1].faults, flush=True)
    return rows
