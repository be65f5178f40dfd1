"""Replace dense layers of an existing Flax model, selected by path."""

import contextvars
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flax import linen, nnx

from optax_lowmem._src.arrays.roles.parts import PARTS, chooser
from optax_lowmem._src.arrays.typing import PyTree
from optax_lowmem._src.layers.switchback.dot_general import switchback_dot_general

Chooser = Callable[[str, Any], bool]
Where = str | Sequence[str] | Chooser
To = type | Callable[..., Any]  # a class of layers, a partial of one, or a dot_general
Method = Callable[..., PyTree]  # of a Linen module


def convert(model: nnx.Module | linen.Module, where: Where = "*", to: To | None = None) -> Any:
    """Replace dense layers of a model, keeping its parameters.

    Args:
      model: an NNX or Linen module. It is not changed.
      where: selects layers: one or several glob patterns for their paths ("decoder/*/mlp/*"; `*`
        matches `/` too), a function of (path, layer), or a part of a transformer by the names of
        its modules: `od`, `qkv`, `out`, `up`, `down`, `all`, as in `gaussws_noise`.
      to: the replacement of dense layers (`nn.Dense`, `nnx.Linear`): a class such as
        `SwitchBackLinear` or `SwitchBackDense`, or a `functools.partial` of one, whose `dtype`,
        `precision`, `promote_dtype` and `preferred_element_type` override the layer's. Or a
        `dot_general`, which is also given to `nn.DenseGeneral` and `nnx.LinearGeneral` (inside
        attention). By default `switchback_dot_general()`.

    Returns:
      An NNX model with the same variables, or a Linen module with the same parameters, which has
      `init` and `apply` only (no `bind`; if it is part of another module, convert that one).

    Raises:
      ValueError: if no dense layer matches; for Linen, when the result is first applied.
      TypeError: if the model is not a Flax module, for another `to`, or if both a layer and `to`
        override `__call__`.

    A layer that several paths share is selected by the first of them. A layer of a subclass that
    overrides `__call__` (`nnx.LoRALinear`) keeps its class, and only its product is replaced.

    Example:
      >>> from flax import nnx
      >>> from optax_lowmem import layers
      >>> model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.relu)
      >>> type(layers.convert(model, "layers/0", layers.SwitchBackLinear).layers[0]).__name__
      'SwitchBackLinear'
    """
    to = switchback_dot_general() if to is None else to
    chosen = where if callable(where) else _Selection.of(where)
    if isinstance(model, nnx.Module):
        return _convert_nnx(model, chosen, to)
    if isinstance(model, linen.Module):
        _check(to, linen.Dense)
        names = [f.name for f in dataclasses.fields(model) if f.init]
        fields = {n: getattr(model, n) for n in names if n not in ("parent", "name")}
        base: Any = type(model)
        return _converting_class(base, chosen, to)(**fields)
    raise TypeError(f"convert takes a Flax module (NNX or Linen), got {type(model).__name__}")


@dataclasses.dataclass(frozen=True)
class _Selection:
    """Select layers by patterns of their paths, or by the name of a part of a transformer."""

    where: str | tuple[str, ...]  # the name of a part, or patterns

    @classmethod
    def of(cls, where: str | Sequence[str]) -> "_Selection":
        """Return the selection of a part's name, or of one or several patterns."""
        if isinstance(where, str):
            return cls(where if where in PARTS else (where,))
        return cls(tuple(where))

    def __call__(self, path: str, layer: object) -> bool:
        if isinstance(self.where, str):
            return chooser(self.where)(f"{path}/kernel", None)
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.where)


def _no_match(paths: Iterable[str]) -> ValueError:
    known = ", ".join(f"'{path}'" for path in list(paths)[:6]) or "none"
    return ValueError(f"no dense layer matches `where`; dense layers: {known}")


def _layer_class(to: To) -> type | None:
    """Return the class of the layers that `to` makes; None for a dot_general."""
    cls = to.func if isinstance(to, functools.partial) else to
    return cls if isinstance(cls, type) else None


def _check(to: To, kind: type) -> None:
    """Raise unless `to` is a subclass of `kind` or a dot_general."""
    function = to.func if isinstance(to, functools.partial) else to
    other = isinstance(function, type) and not issubclass(function, kind)
    if not callable(to) or other or isinstance(function, nnx.Module | linen.Module):
        raise TypeError(
            f"for this model `to` must be a subclass of {kind.__module__}.{kind.__name__} or a "
            f"dot_general, got {to!r}"
        )


# arguments for which a partial given as `to` overrides the replaced layer
_ARGUMENTS_OF_CALL = ("dtype", "precision", "promote_dtype", "preferred_element_type")


def _arguments_of(layer: object, names: Iterable[str], to: To) -> dict[str, object]:
    """Return a layer's arguments for its replacement, except those that a partial overrides."""
    overridden = to.keywords if isinstance(to, functools.partial) else ()
    free = [name for name in _ARGUMENTS_OF_CALL if name in overridden]
    return {name: getattr(layer, name) for name in names if name not in free}


def _overrides_call(path: str, layer: object, other: type) -> TypeError:
    return TypeError(
        f"'{path}' is a {type(layer).__name__}, which overrides __call__, as {other.__name__} "
        "does: leave it out of `where`, or pass a dot_general as `to`."
    )


# ---- NNX -----------------------------------------------------------------------------------------

_OF_LINEAR = ("use_bias", "param_dtype", *_ARGUMENTS_OF_CALL)


def _convert_nnx(model: nnx.Module, chosen: Chooser, to: To) -> nnx.Module:
    _check(to, nnx.Linear)
    model = nnx.merge(*nnx.split(model))  # new modules with the same arrays
    kinds = (nnx.Linear,) if _layer_class(to) else (nnx.Linear, nnx.LinearGeneral)
    layers = {
        "/".join(map(str, path)): layer
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, kinds)
    }
    chosen_layers = {path: layer for path, layer in layers.items() if chosen(path, layer)}
    if not chosen_layers:
        raise _no_match(layers)
    for path, layer in chosen_layers.items():
        if _layer_class(to):
            _replace_class(path, layer, to)
        else:
            layer.dot_general = to
            if isinstance(layer, nnx.LinearGeneral):
                layer.dot_general_cls = None  # it would take precedence
    return model


def _replace_class(path: str, layer: Any, to: To) -> None:
    """Change a layer's class in place, so that every reference to the layer sees the change."""
    size, given = (layer.in_features, layer.out_features), _arguments_of(layer, _OF_LINEAR, to)
    like = nnx.eval_shape(lambda: to(*size, rngs=nnx.Rngs(0), **given))
    variables = {name for name, value in vars(like).items() if isinstance(value, nnx.Variable)}
    variables -= set(getattr(type(like), "added", ()))
    if variables - vars(layer).keys():
        raise TypeError(
            f"'{path}' has no {', '.join(variables - vars(layer).keys())}: initialise {to} anew."
        )
    if type(layer).__call__ is nnx.Linear.__call__:
        layer.__class__ = type(like)
    elif type(like).__call__ is not nnx.Linear.__call__:
        raise _overrides_call(path, layer, type(like))
    for name, value in vars(like).items():
        if not name.startswith("_") and name not in ("kernel", "bias"):
            setattr(layer, name, value)
    if hasattr(layer, "adopt"):  # creates variables that the replaced layer lacks
        layer.adopt(path)


# ---- Linen ---------------------------------------------------------------------------------------


# Flax constructs the modules inside a converted one: only this tells them that it is running
_running: contextvars.ContextVar[tuple[type, ...]] = contextvars.ContextVar("running", default=())


@functools.lru_cache(128)  # equal conversions give the same class, and so compile once
def _converting_class(base: type[linen.Module], chosen: Chooser, to: To) -> Method:
    """Return a subclass whose `init` and `apply` replace the chosen layers, at the same paths."""
    kinds = (linen.Dense,) if _layer_class(to) else (linen.Dense, linen.DenseGeneral)

    def intercepted(method: Method) -> Method:
        @linen.nowrap
        @functools.wraps(method)
        def run(self: linen.Module, *args: object, **kwargs: object) -> PyTree:
            seen: dict[str, bool] = {}

            def intercept(
                call: Method,
                given: tuple[object, ...],
                named: Mapping[str, object],
                context: linen.module.InterceptorContext,
            ) -> PyTree:
                layer = context.module
                if context.method_name != "__call__" or not isinstance(layer, kinds):
                    return call(*given, **named)
                path = "/".join(layer.path)
                seen[path] = chosen(path, layer)
                # a layer is not replaced again if another conversion has replaced it
                if not seen[path] or getattr(layer, _TAKEN, False):
                    return call(*given, **named)
                return _call_as(path, layer, to, call)(*given, **named)

            token = _running.set((*_running.get(), converted))
            try:
                with linen.intercept_methods(intercept):
                    result = method(self, *args, **kwargs)
            finally:
                _running.reset(token)
            if kwargs.get("method") is None and not any(seen.values()):
                raise _no_match(list(seen))
            return result

        return run

    def checked(self: linen.Module) -> None:
        base.__post_init__(self)
        if self.parent is not None and converted not in _running.get():
            raise TypeError(
                f"a converted {base.__name__} has `init` and `apply` only, and no `bind`. To use "
                "it inside another module, convert the outer module."
            )

    methods = {name: intercepted(getattr(base, name)) for name in ("init_with_output", "apply")}
    converted = type(
        base.__name__, (base,), methods | {"__post_init__": checked, "__module__": base.__module__}
    )
    return converted


_TAKEN = "_optax_lowmem_taken"  # attribute that marks a replaced layer
_DENSE = [f.name for f in dataclasses.fields(linen.Dense) if f.init]
_OF_DENSE = [f for f in _DENSE if f not in ("parent", "name", "dot_general", "dot_general_cls")]


def _call_as(path: str, layer: linen.Module, to: To, call: Method) -> Method:
    """Return the call of a layer's replacement, in the same scope and so with its parameters."""
    others: dict[str, object] = {"dot_general": to, "dot_general_cls": None}
    if _layer_class(to):
        twin = to(**_arguments_of(layer, _OF_DENSE, to), parent=None)
        if type(twin).__call__ is not linen.Dense.__call__:  # differs in more than dot_general
            if type(layer).__call__ is not linen.Dense.__call__:
                raise _overrides_call(path, layer, type(twin))
            twin = twin.clone(parent=layer.scope)
            object.__setattr__(twin, _TAKEN, True)
            return twin
        names = (*_ARGUMENTS_OF_CALL, *others)
        others = {name: getattr(twin, name) for name in names if name in _DENSE}

    others[_TAKEN] = True

    def run(*args: object, **kwargs: object) -> PyTree:
        kept = {name: getattr(layer, name, None) for name in others}
        try:  # by object.__setattr__, since modules are frozen
            for name, value in others.items():
                object.__setattr__(layer, name, value)
            return call(*args, **kwargs)
        finally:
            for name, value in kept.items():
                object.__setattr__(layer, name, value)

    return run
