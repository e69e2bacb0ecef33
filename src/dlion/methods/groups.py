"""Parameter groups of a model, for methods that treat matrices of hidden layers by themselves.

A parameter is known by the module that holds it, and by the place of that module in the model.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from dlion.checks import check_pattern
from dlion.methods.matrices import TABLES, Matrices, are_matrices

MATRIX = "matrix"
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


class Found(NamedTuple):
    """What a parameter is: ``role`` is ``matrix``, or what else; ``held`` is how it holds them."""

    name: str
    tensor: Tensor
    role: str
    held: Matrices


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups, which print as a table of what is no vector.

    Parameters of layers that repeat share a line.
    """

    def __init__(self, found: Iterable[Found]) -> None:
        self.found = [*found]
        hidden = [each for each in self.found if each.role == MATRIX]
        rest = [(each.name, each.tensor) for each in self.found if each.role != MATRIX]
        super().__init__(
            {
                "params": [(each.name, each.tensor) for each in hidden if each.held == held],
                "use_muon": True,
                **_options(held),
            }
            for held in dict.fromkeys(each.held for each in hidden)
        )
        if rest:
            self.append({"params": rest, "use_muon": False})

    def __repr__(self) -> str:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for each in self.found:
            if each.tensor.dim() > 1:
                alike.setdefault(_line(each), []).append(each.name)
        lines = [
            (names[0], shape, what)
            if len(names) == 1
            else (pattern, f"{len(names)} x {shape}", what)
            for (pattern, shape, what), names in alike.items()
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        hidden = sum(each.tensor.numel() for each in self.found if each.role == MATRIX)
        total = sum(each.tensor.numel() for each in self.found)
        return "\n".join([*rows, f"{hidden:,} of {total:,} parameters are in matrices"])


def param_groups(
    model: nn.Module,
    *,
    rest: str | Iterable[str] = (),
    matrices: str | Iterable[str] = (),
    split: Mapping[str, int | Iterable[int]] | None = None,
) -> ParamGroups:
    """Return parameter groups of a model: matrices of hidden layers, and the rest.

    Methods of Muon's family orthogonalise the first::

        groups = dlion.param_groups(model)
        print(groups)  # a table of what goes where
        optimizer = dlion.SignMuon(groups, lr=1e-2)

    The rest is:

    - vectors, also as one row or column;
    - tables: Embedding, EmbeddingBag, and what is tied to one;
    - layers that make the model's output: what ``get_output_embeddings()`` or ``get_classifier()``
      returns; the last layer in the order of the modules, unless it is part of a block that
      repeats; the last layers of branches before it that read as many inputs; and outside of such
      blocks layers with as many outputs, or as many as the model has classes or tokens or a table
      has rows;
    - embeddings of patches: a first convolution whose windows do not overlap, or a first Linear
      outside of the blocks that repeat;
    - depthwise convolutions, and weights of norms;
    - parameters that are not called ``weight``, in modules of unknown type: only ``forward`` knows
      their use. Of three dimensions they are stacks ``[E, rows, columns]`` where one reads what
      another makes, as experts do.

    Each group has ``use_muon``, and where it is not the default ``stacked``, ``transposed``
    (transformers' Conv1D is ``[in, out]``) or ``split``. Other options can be set on the groups.

    Args:
        model: with all its parameters, before or after FSDP2's ``fully_shard``.
        rest: regular expressions of names; these parameters are of the rest.
        matrices: regular expressions of names; these are matrices, whatever module has them.
        split: of matrices that are several fused, as of query, key and value: a regular expression
            of names, and how many equal ones there are, or the outputs of each.

    Raises:
        ValueError: if there is no matrix; if an expression matches no parameter of two or more
            dimensions, or a split does not fit.
    """
    cuts = {**(split or {})}
    chosen = {"rest": _listed(rest), "matrices": _listed(matrices), "split": [*cuts]}
    _check_patterns(model, chosen)
    known = _Roles(model)
    named = model.named_parameters()
    groups = ParamGroups(_found(name, tensor, known, chosen, cuts) for name, tensor in named)
    if not any(group["use_muon"] for group in groups):
        raise ValueError(
            f"{type(model).__name__} has no matrix in a hidden layer: choose a method that needs"
            f" none, or name some in matrices=\n{groups!r}"
        )
    return groups


def _found(
    name: str,
    tensor: Tensor,
    known: "_Roles",
    chosen: dict[str, list[str]],
    cuts: dict[str, int | Iterable[int]],
) -> Found:
    role, held = known.of(tensor)
    if _matches(name, chosen["matrices"]):
        role = MATRIX
    for pattern in _matches(name, chosen["split"])[:1]:
        held = held.cut(cuts[pattern], name, tensor.shape)
    if tensor.dim() < 2 or not are_matrices(held.shapes(tensor.shape)):
        role = "vector"
    elif _matches(name, chosen["rest"]):
        role = "named in rest"
    return Found(name, tensor, role, held)


class _Layer(NamedTuple):
    """A module that multiplies by its weight."""

    path: str
    module: nn.Module
    outputs: int
    inputs: int


class _Roles:
    """The roles of a model's parameters, by the modules that use them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._uses: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for path, module in self._modules.items():
            for name, tensor in module.named_parameters(recurse=False):
                use = module, name
                if isinstance(module, ParametrizationList):  # of weight_norm, say
                    owner, _, name = path.rpartition(".parametrizations.")
                    use = self._modules[owner], name
                self._uses.setdefault(tensor, []).append(use)
        self._layers = [*self._find_layers()]
        self._repeated = {layer.path for layer in self._layers if self._is_repeated(layer.path)}
        self._outputs = self._find_outputs(model)
        self._inputs = self._find_inputs()

    def of(self, tensor: Tensor) -> tuple[str, Matrices]:
        """Return the role of a parameter, and how it holds matrices if it does."""
        roles = [self._in_module(tensor, *use) for use in self._uses[tensor]]
        # of one that is used twice: rather a table, or an output, than a matrix
        return next((found for found in roles if found[0] != MATRIX), roles[0])

    def _in_module(self, tensor: Tensor, module: nn.Module, name: str) -> tuple[str, Matrices]:
        held = _held(module, name, tensor)
        known = held or Matrices(stacked=tensor.dim() == 3)
        if _is_table(module):
            return "table", known
        if isinstance(module, _NORMS):
            return "scale", known
        if isinstance(module, _ConvNd) and module.groups > 1 and tensor.shape[1:2] == (1,):
            return "depthwise", known
        if module in self._outputs:
            return "output", known
        if module in self._inputs:
            return "input", known
        return "of unknown use" if held is None else MATRIX, known

    def _find_layers(self) -> Iterator[_Layer]:
        for path, module in self._modules.items():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() < 2:
                continue
            if not (_is_table(module) or isinstance(module, _NORMS)):
                held = _held(module, "weight", weight) or Matrices()
                outputs, inputs = held.shapes(weight.shape)[0]
                if isinstance(module, _ConvNd):
                    outputs, inputs = module.out_channels, module.in_channels
                yield _Layer(path, module, outputs, inputs)

    def _is_repeated(self, path: str) -> bool:
        """Whether a layer is part of a block, beside which others of its type have the same."""
        parts, weight = path.split("."), self._modules[path].weight
        for depth in range(1, len(parts)):
            above, own, inside = parts[: depth - 1], parts[depth - 1], parts[depth:]
            parent = self._modules[".".join(above)]
            block = self._modules[".".join([*above, own])]
            for name, other in parent.named_children():
                twin = self._modules.get(".".join([*above, name, *inside]))
                if name == own or type(other) is not type(block):
                    continue
                shape = getattr(getattr(twin, "weight", None), "shape", None)
                container = isinstance(block, nn.Sequential | nn.ModuleList)
                if shape == weight.shape or (twin is None and not container):
                    return depth > 1 or self._may_follow_itself(own)
        return False

    def _may_follow_itself(self, part: str) -> bool:
        """Whether a part of the model reads as much as it makes, unlike one of two networks."""
        layers = [layer for layer in self._layers if f"{layer.path}.".startswith(f"{part}.")]
        return layers[0].inputs == layers[-1].outputs

    def _find_outputs(self, model: nn.Module) -> set[nn.Module]:
        """Return the layers that make the model's output."""
        found = {*self._find_declared(model)}
        tables = {getattr(m, "num_embeddings", 0) for m in self._modules.values()}
        inside = {layer.inputs for layer in self._layers if layer.path in self._repeated}
        sizes = (_classes(model) | tables) - inside
        read = {layer.inputs for layer in self._layers if layer.module in found}
        outside = [layer for layer in self._layers if layer.path not in self._repeated]
        if outside and outside[-1] == self._layers[-1] and outside[-1].outputs not in read:
            last = outside[-1]
            sizes |= {last.outputs} - {layer.inputs for layer in self._layers}
            found |= {last.module, *self._find_beside(last)}
        return found | {
            layer.module
            for layer in outside
            if layer.outputs in sizes and layer.outputs != layer.inputs
        }

    def _find_beside(self, last: _Layer) -> Iterator[nn.Module]:
        """Yield the last layers of branches right before the one of the last layer of all.

        Two branches read as many, and the second cannot read what the first one makes.
        """
        parts = last.path.split(".")
        for depth, part in enumerate(parts):
            parent = "".join(f"{each}." for each in parts[:depth])
            branches: dict[str, list[_Layer]] = {}
            for layer in self._layers:
                if layer.path.startswith(parent):
                    name = layer.path.removeprefix(parent).partition(".")[0]
                    branches.setdefault(name, []).append(layer)
            own = branches.pop(part)
            for name, branch in reversed(branches.items()):
                alike = type(self._modules[parent + name]) is type(self._modules[parent + part])
                # of the whole model's parts a head may read what several layers make together
                alone = parent or alike or _is_chain(branch)
                if not (alone and branch[0].inputs == own[0].inputs != branch[-1].outputs):
                    break
                if branch[-1].path not in self._repeated:
                    yield branch[-1].module

    def _find_declared(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the output layers that a model of transformers or timm names."""
        outputs = {layer.module: layer.outputs for layer in self._layers}
        for method in ("get_output_embeddings", "get_classifier"):
            try:
                named = getattr(model, method, lambda: None)()
            except (AttributeError, NotImplementedError):  # some kinds have the method alone
                continue
            for head in named if isinstance(named, list | tuple) else [named]:
                if isinstance(head, nn.Module):
                    layers = [each for each in head.modules() if each in outputs]
                    yield from (each for each in layers if outputs[each] == outputs[layers[-1]])

    def _find_inputs(self) -> set[nn.Module]:
        """Return the layers that embed patches of the model's input."""
        convolutions = [each for each in self._modules.values() if isinstance(each, _ConvNd)]
        found: set[nn.Module] = {
            each
            for each in convolutions
            if each.in_channels == convolutions[0].in_channels
            and tuple(each.kernel_size) == tuple(each.stride)
            and max(each.stride) > 1
        }
        tables = any(map(_is_table, self._modules.values()))
        if self._layers and self._repeated and not tables:
            first = self._layers[0]
            if isinstance(first.module, nn.Linear) and first.path not in self._repeated:
                found.add(first.module)
        return found - self._outputs


def _held(module: nn.Module, name: str, tensor: Tensor) -> Matrices | None:
    """Return how a parameter of a module holds matrices, None if its use is unknown."""
    if isinstance(module, nn.Linear | nn.Bilinear | nn.MultiheadAttention | nn.RNNBase):
        return Matrices()
    if isinstance(module, _ConvNd):
        return Matrices(transposed=isinstance(module, _ConvTransposeNd))
    conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    if conv1d and hasattr(module, "nf"):  # of transformers
        return Matrices(transposed=True)
    if re.search(TABLES, name):
        return None
    if tensor.dim() == 3 and len(tensor) > 1:
        _, rows, columns = tensor.shape
        stacks = [p.shape for p in module.parameters(recurse=False) if p.dim() == 3]
        # as experts have, one reads what another makes
        chained = any(shape[1] == columns or shape[2] == rows for shape in stacks)
        if name.endswith("weight") or (chained and len(stacks) > 1):
            return Matrices(True, bool(getattr(module, "is_transposed", False)))
    return Matrices() if tensor.dim() == 2 and name.endswith("weight") else None


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or hasattr(module, "num_embeddings")


def _classes(model: nn.Module) -> set[int]:
    """Return the numbers of classes or tokens that a model says it has."""
    config = getattr(model, "config", None)
    said = [getattr(config, name, None) for name in ("vocab_size", "num_labels")]
    said.append(getattr(model, "num_classes", None))
    numbers = {each for each in said if isinstance(each, int) and each > 1}
    return numbers | {each + 1 for each in numbers}  # detectors have a class for nothing


def _options(held: Matrices) -> dict[str, Any]:
    """Return what a parameter group says of its matrices."""
    default = Matrices()._asdict()
    return {name: value for name, value in held._asdict().items() if value != default[name]}


def _listed(patterns: str | Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else [*patterns]


def _is_chain(layers: Sequence[_Layer]) -> bool:
    return all(one.outputs == two.inputs for one, two in itertools.pairwise(layers))


def _matches(name: str, patterns: Iterable[str]) -> list[str]:
    return [pattern for pattern in patterns if re.search(pattern, name)]


def _check_patterns(model: nn.Module, patterns: Mapping[str, Iterable[str]]) -> None:
    names = [name for name, tensor in model.named_parameters() if tensor.dim() > 1]
    for option, given in patterns.items():
        for pattern in given:
            check_pattern(option, pattern)
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(
                    f"{option}={pattern} matches no parameter of two or more dimensions"
                )


def _line(found: Found) -> tuple[str, str, str]:
    """Return name, shape and role of a parameter; numbers of layers are left out."""
    shapes = found.held.shapes(found.tensor.shape) if found.role == MATRIX else []
    what = f"{len(shapes)} matrices" if len(shapes) > 1 else found.role
    stored = ", stored as [in, out]" if shapes and found.held.transposed else ""
    name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", found.name)
    return name, str([*found.tensor.shape]), what + stored
