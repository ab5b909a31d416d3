"""The functions of the installed Megatron-Core, each with all its parameters."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

NEWER = {
    *("create_hybrid_dp_cp_groups", "get_hybrid_data_context_parallel_groups", "has_separate_all_gather_group"),
    *("hybrid_context_parallel", "create_all_gather_group", "independent_all_gather"),
}
"""Functions and parameters of Megatron-Core that its documentation does not have yet."""


def megatron() -> dict[str, str]:
    """Every function, and the parameters of a class, of the installed Megatron-Core's ``parallel_state``."""
    spec = importlib.util.find_spec("megatron")
    if spec is None:
        pytest.skip("Megatron-Core is not installed")
    source = Path(next(iter(spec.submodule_search_locations or ())), "core", "parallel_state.py")
    found = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            methods = {each.name: _parameters(each) for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= {node.name: methods.pop("__init__"), **methods}
    return {name: parameters for name, parameters in found.items() if name not in NEWER}


def _parameters(function: ast.FunctionDef) -> str:
    names = [each.arg for each in function.args.args]
    return " ".join(name for name in names if name not in ("self", *NEWER))
