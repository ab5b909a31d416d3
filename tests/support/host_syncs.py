"""Record what makes the host wait for a GPU, in a program that runs on the CPU.

    with host_syncs() as found:
        layer(tokens)
    assert len(found) <= 1

It knows the operations of torch whose result has to be on the host: values, and shapes that depend on values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FUNCTIONS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
OPERATIONS = ("_local_scalar_dense", "bincount", "nonzero", "masked_select", "unique", "_unique2", "equal", "histogram")


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Names of the operations inside for which the host would wait for a GPU."""
    found: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in FUNCTIONS:
                found.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            unknown_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
            indices = args[1] if name in ("index", "index_put", "index_put_") else ()
            masked = any(each is not None and each.dtype is torch.bool for each in indices)
            if name in OPERATIONS or unknown_size or masked:
                found.append(name)
            return func(*args, **(kwargs or {}))

    with Functions(), Operations():
        yield found
