"""A trace of a forward that computes it on the way: what each node gives is known."""

import operator
from typing import Any

import torch
from torch import fx, nn

from flatout.agent.untouched import streams_kept


class ComputedTrace(fx.Tracer):
    """Traces one forward, with modules inside as calls, and computes each of its nodes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.values: dict[fx.Node, Any] = {}
        """What the nodes gave."""
        self.is_computing = False

    def given(self, node: fx.Node) -> Any:
        """Return what the forward is given for a placeholder."""
        raise NotImplementedError

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        """Return a stand-in for a value, which is computed too."""
        proxy = super().create_proxy(*args, **kwargs)
        self.is_computing = True
        try:
            with streams_kept(), torch.no_grad():
                self.value_of(proxy.node)
        finally:
            self.is_computing = False
        return proxy

    def value_of(self, node: fx.Node) -> Any:
        """Return what a node gives; tensors that are attributes of a module have no stand-ins."""
        if node not in self.values:
            self.values[node] = self._compute(node)
        return self.values[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.given(node)
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.root)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value_of)
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return self.root.get_submodule(str(node.target))(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute of a module: as it is, where values are computed."""
        if self.is_computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call a module inside: as it is, where values are computed."""
        if self.is_computing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)
