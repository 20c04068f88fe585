# SPDX-License-Identifier: Apache-2.0
"""Models of transformers over quantized checkpoints: linear layers and experts hold NVFP4 weights as they are stored.

Directories are those of compressed-tensors and of ModelOpt, whoever wrote them. Tensors go through transformers' own
loader, with its renamings and conversions (stacks of experts made of single ones): a weight and its scales are one
tensor to it, a Packed. Stacks that were cut for other servers are put together here. Scales of KV caches are left out:
the cache stays as it is.
"""
import contextlib
import dataclasses
import os
import re
import types

import torch

from .. import streaming
from .packed import ACTIVATIONS, Packed, PackedLinear, PackedStack

__all__ = ["PackedSource", "from_pretrained"]


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a checkpoint names the parts of a weight: by suffixes of the module's name."""
    codes: str
    scales: str
    tensor_scale: str
    input_scale: str
    name: str  # of the parameter
    divisor: bool = False  # tensor scales are divided by
    turned: bool = False  # [experts, K/2, N]

    def parts(self, name):
        stem = name[:len(name) - len(self.codes)] if self.codes else name
        return [stem + suffix for suffix in (self.scales, self.tensor_scale, self.input_scale)], stem + self.name


_FORMS = (_Form(".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale", ".weight",
                divisor=True),
          _Form(".weight", ".weight_scale", ".weight_scale_2", ".input_scale", ".weight"),
          _Form("", "_weight_scale", "_weight_scale_2", "_input_scale", "", turned=True))

# Stacks that servers other than transformers have in pieces: the stack, relative to the list of experts (.. is what is
# around it), and the members of which its rows are made.
_STACKS = {"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",),
           "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"), "down_proj_bias": ("down_proj.bias",),
           "../input_linear.weight": ("w1.weight", "w3.weight"), "../output_linear.weight": ("w2.weight",)}
_PLAIN = ("F32", "BF16", "F16")
_CACHE = re.compile(r".*\.([kvq]_scale|[kv]_(proj|bmm_quantizer)\.[kv_]*(output_)?scale|k_zero_point|v_zero_point)$")


class _Weight:
    """A quantized weight that is loaded when it is indexed."""

    def __init__(self, source, form, name, parts):
        self.source, self.form, self.name, self.parts = source, form, name, parts
        self.turned = form.turned

    def _scale(self, name, rows):
        """A tensor scale, as a multiplier of each row; NaN where the checkpoint has none."""
        if name not in self.source.files:
            return torch.full(rows, float("nan"))
        value = self.source.load(name).float()
        if not bool(((value > 0) & value.isfinite()).all()):
            raise ValueError(f"{self.source.files[name]}: {name}: a tensor scale of {value.flatten()[0]} is none")
        value = 1.0 / value if self.form.divisor else value
        if value.numel() != 1:
            value = value.reshape(value.shape + (1,) * (len(rows) - value.dim()))
        return value.reshape(-1)[0].expand(rows).clone() if value.numel() == 1 else value.expand(rows).clone()

    def __getitem__(self, _):
        codes, scales = (self.source.load(name).view(torch.uint8) for name in (self.name, self.parts[0]))
        if self.form.turned:
            codes, scales = (part.transpose(-1, -2).contiguous() for part in (codes, scales))
        if codes.shape[:-1] != scales.shape[:-1] or 2 * codes.shape[-1] != 16 * scales.shape[-1]:
            raise ValueError(f"{self.source.files[self.name]}: {self.name}: codes {list(codes.shape)} and scales "
                             f"{list(scales.shape)} are not those of one weight with blocks of 16")
        rows = codes.shape[:-1]
        return Packed([codes, scales, self._scale(self.parts[1], rows), self._scale(self.parts[2], rows)],
                      self.source.dtype, self.source.activations, self.turned)


class _Float8:
    """A weight of FP8 beside those of NVFP4: its values, by a scale for each row or for all."""

    def __init__(self, source, name):
        self.source, self.name, self.turned = source, name, False

    def __getitem__(self, _):
        values, scale = self.source.load(self.name).float(), self.source.load(f"{self.name}_scale").float()
        if scale.numel() not in (1, len(values)):
            raise ValueError(f"{self.source.files[self.name]}: {self.name}_scale has {scale.numel()} values for "
                             f"{len(values)} rows")
        values = (values * scale.reshape(-1, 1)).to(self.source.dtype)
        return values.t().contiguous() if self.turned else values


class _Pieces:
    """A stack put together of what was cut: members of each expert, by name, one below the other or in turns."""

    def __init__(self, source, experts, turned, interleaved):
        self.source, self.experts, self.turned, self.interleaved = source, experts, turned, interleaved

    def __getitem__(self, _):
        whole = torch.stack([self._joined([self.source._get(member)[...] for member in members])
                             for members in self.experts])
        return whole.transpose(1, 2) if self.turned and whole.dim() == 3 else whole

    def _joined(self, members):
        if len(members) == 1:
            return members[0]
        if not self.interleaved:
            return torch.cat(members)
        if isinstance(members[0], Packed):
            rows = [torch.stack(parts, 1).flatten(0, 1) for parts in zip(*(member.rows for member in members))]
            return members[0]._like(rows)
        return torch.stack(members, 1).flatten(0, 1)


class PackedSource(streaming.Source):
    """The tensors of a quantized directory: a weight with its scales is one of them."""

    def __init__(self, directory, activations="bf16"):
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations are {' or '.join(map(repr, ACTIVATIONS))}, not {activations!r}")
        super().__init__(directory)
        self.activations, self.dtype = activations, torch.bfloat16
        self.dtypes, self.shapes, self._open = {}, {}, {}
        self._read_headers()
        self.weights, self._joined = self._find_weights(), {}

    def _read_headers(self):
        from safetensors import SafetensorError, safe_open
        for path in sorted(set(self.files.values())):
            try:
                self._open[path] = file = safe_open(path, framework="pt")
                for name in file.keys():
                    if self.files.get(name) == path:
                        part = file.get_slice(name)
                        self.dtypes[name], self.shapes[name] = part.get_dtype(), tuple(part.get_shape())
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: {error}") from None
        for name, path in self.files.items():
            if name not in self.dtypes:
                raise ValueError(f"{path}: the index says that {name} is there, and it is not")

    def load(self, name):
        return self._open[self.files[name]].get_tensor(name).clone()  # a mapping would follow the file

    def _find_weights(self):
        """{parameter: _Weight}; everything else must be plain."""
        found, parts = {}, set()
        for name, dtype in self.dtypes.items():
            if dtype != "U8":
                continue
            for form in _FORMS:
                scales = form.parts(name)[0] if name.endswith(form.codes) else [None]
                if self.dtypes.get(scales[0]) == "F8_E4M3" and scales[1] in self.dtypes:
                    found[form.parts(name)[1]] = _Weight(self, form, name, scales)
                    parts.update([name, *scales])
                    break
        self.plain = {}
        for name, dtype in self.dtypes.items():
            if name in parts or _CACHE.match(name):
                continue
            if dtype == "F8_E4M3" and len(self.shapes[name]) == 2 and self.dtypes.get(f"{name}_scale") in _PLAIN:
                found[name] = _Float8(self, name)
                continue
            if name.endswith("_scale") and self.dtypes.get(name.removesuffix("_scale")) == "F8_E4M3":
                continue
            if dtype not in _PLAIN and not dtype.startswith(("I64", "BOOL")):
                raise ValueError(f"{self.files[name]}: {name} is {dtype}, and no part of an NVFP4 weight; `nib "
                                 "dequantize` makes a plain directory of it, and `nib quantize` an NVFP4 one of that")
            self.plain[name] = self.files[name]
        if not found:
            raise ValueError(f"{self.directory}: it has no NVFP4 weight of compressed-tensors or ModelOpt; `nib "
                             "inspect` shows what is there, `nib quantize` and `nib convert` write such directories")
        return found

    def __iter__(self):
        yield from self.plain
        yield from self.weights
        yield from self._joined

    @contextlib.contextmanager
    def slices(self, tensors):
        yield {name: self._get(name) for name in tensors}

    def _get(self, name):
        for table in (self._joined, self.weights):
            if name in table:
                return table[name]
        return self._open[self.plain[name]].get_slice(name)

    # ---- To the model ----

    def prepare(self, loader):
        """Put cut stacks together, and turn what the model has transposed."""
        from transformers.pytorch_utils import Conv1D
        self.dtype = loader.dtype
        modules = dict(loader.model.named_modules())
        for name, module in modules.items():
            for tensor in loader.sources(f"{name}.weight") if isinstance(module, Conv1D) else []:
                if tensor in self.weights:
                    self.weights[tensor].turned = True
        groups, known = {}, set(loader.model.state_dict())
        for parameter, tensors in loader._sources.items():
            if parameter not in known:
                for tensor in tensors:
                    match = re.fullmatch(r"(.*)\.(\d+)\.(\w+\.(?:weight|bias))", tensor)
                    if match:
                        groups.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        for prefix, experts in groups.items():
            self._join(loader, prefix, [experts[e] for e in sorted(experts)], modules)
        return bool(self._joined)

    def _join(self, loader, prefix, experts, modules):
        around = prefix.rpartition(".")[0]
        for stack, members in _STACKS.items():
            if not all(member in expert for expert in experts for member in members):
                continue
            name = f"{around}.{stack[3:]}" if stack.startswith("../") else f"{prefix}.{stack}"
            path, _, leaf = self._model_name(loader, name).rpartition(".")
            owner = modules.get(path)
            if owner is None or owner._parameters.get(leaf) is None:
                continue
            pieces = [[expert[member] for member in members] for expert in experts]
            rows = sum(self._size(expert[member]) for expert in experts[:1] for member in members)
            turned = getattr(owner, "is_transposed", owner._parameters[leaf].shape[1] != rows)
            self._joined[name] = _Pieces(self, pieces, turned, not getattr(owner, "is_concatenated", True))

    def _size(self, tensor):
        """The number of rows of a tensor."""
        return self.shapes[self.weights[tensor].name if tensor in self.weights else tensor][0]

    @staticmethod
    def _model_name(loader, name):
        from transformers.core_model_loading import WeightRenaming, rename_source_key
        renamings = [entry for entry in loader._mapping if isinstance(entry, WeightRenaming)]
        return rename_source_key(name, renamings, [], loader.model.base_model_prefix, loader.model.state_dict())[0]

    def install(self, loader, names):
        """Put PackedLinear where a layer's weight is packed, and PackedStack where another parameter is."""
        from transformers.pytorch_utils import Conv1D
        undo = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = loader.model.get_submodule(path)
            packed = module._parameters.get(leaf)
            if not isinstance(packed, Packed):
                continue
            if isinstance(module, torch.nn.Embedding):
                raise ValueError(f"{self.directory}: {name} is an embedding, and packed ones are not looked up in; "
                                 f"quantize the model with `nib quantize --ignore {path}`")
            if leaf == "weight" and isinstance(module, (torch.nn.Linear, Conv1D)):
                undo.append(_replace_module(loader.model, path, PackedLinear(
                    packed.matrix(), module._parameters["bias"], packed.dtype)))
            else:
                undo.append(_replace_parameter(module, leaf, PackedStack(packed)))

        def take_away():
            for one in undo:
                one()
        return take_away


def _replace_module(model, path, made):
    parent, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent)
    before = parent._modules[leaf]
    parent._modules[leaf] = made
    made.train(before.training)

    def back():
        parent._modules[leaf] = before
    return back


def _replace_parameter(module, leaf, made):
    before = module._parameters.pop(leaf)
    module._modules[leaf] = made

    def back():
        del module._modules[leaf]
        module._parameters[leaf] = before
    return back


def _no_saving(self, *_args, **_kwargs):
    raise NotImplementedError("a model over packed weights is not saved: the directory it came from is its checkpoint")


def from_pretrained(directory, activations="bf16", device="cpu", dtype=None):
    """A model of transformers over an NVFP4 directory of compressed-tensors or ModelOpt: its quantized linear layers
    and experts hold the packed weights, and multiply by them.

    activations: "bf16" multiplies activations as they are (in block fixed point, which is finer than BF16); "nvfp4"
    quantizes them first, by the scales that the checkpoint has for them, or by each token's own. dtype: of all else
    (None: what config.json says).
    """
    directory = os.fspath(directory)
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"{directory}: there is no such directory; models are read from disk")
    try:
        import transformers
        import transformers.core_model_loading  # noqa: F401
    except ImportError as error:
        raise ImportError("from_pretrained needs transformers 5 and safetensors: pip install 'transformers>=5' "
                          f"safetensors ({error})") from None
    source = PackedSource(directory, activations)
    loader = streaming.Loader(directory, device, dtype, experts="eager", source=source)
    model = loader.load()
    if model.can_generate() and os.path.exists(os.path.join(directory, "generation_config.json")):
        with streaming.naming(directory, "transformers cannot read its generation_config.json"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)
    model.save_pretrained = types.MethodType(_no_saving, model)
    return model
