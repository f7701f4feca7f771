"""What makes the host wait for the device: calls by name, operators by name. Pure."""

from collections.abc import Mapping

METHODS: Mapping[str, str] = {
    "item": "item",
    "tolist": "tolist",
    "cpu": "to cpu",
    "numpy": "numpy",
    "__array__": "numpy",
    "__bool__": "bool",
    "__float__": "float",
    "__int__": "int",
    "__index__": "int",
    "__complex__": "complex",
    "__repr__": "print",
    "__format__": "print",
    "__contains__": "in",
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "masked_select",
    "unique": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "equal",
    "allclose": "allclose",
    "is_nonzero": "bool",
}
"""Methods of a tensor that return values or shapes only the device knows, and what they are
called in the report."""
FUNCTIONS = (
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
    "equal",
    "allclose",
    "is_nonzero",
)
"""The same as functions of `torch`."""
DEVICE_CALLS = ("synchronize", "empty_cache")
"""Functions of `torch.cuda` that wait whatever they are given."""
OPERATORS: Mapping[str, str] = {
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::bincount": "bincount",
    "aten::equal": "equal",
    "aten::_to_copy": "to cpu",
    "aten::copy_": "to cpu",
    "aten::index": "boolean index",
    "aten::index_put_": "boolean index",
}
"""Operators that may wait, on a device there is to wait for."""
PRINTED = ("print",)
"""What runs dozens of small operators itself; nobody looks at each of them."""
