# SPDX-License-Identifier: Apache-2.0
"""Run a causal language model of transformers one decoder layer at a time, in memory for one layer.

The model is made on the meta device. Embeddings, norms and what else stands outside of the decoder layers are loaded
once; a layer is loaded from its shards when its turn comes, by transformers' own conversions (stacked experts, renamed
modules), and freed after it. Nothing is known of a family: for layer n the model's own forward runs, in which layers
before n return what layer n - 1 returned last time, and which ends as soon as layer n has run. So masks, positions and
whatever else a model hands to its layers are the model's own.

    model = Streamed("Llama-3.1-8B")
    states = States(limit=2 << 30)
    for n in range(len(model) + 1):  # the last is the head
        with model.loaded(n):
            for b, tokens in enumerate(batches):
                states[b] = model.run(n, tokens, states[b] if n else None)
    logits = states[0]
"""
import collections.abc
import contextlib
import json
import os
import re
import tempfile

import torch

__all__ = ["Loader", "Source", "Streamed", "States"]


@contextlib.contextmanager
def naming(directory, what):
    """What other packages raise over a directory's files is anything: here it is a ValueError that names it."""
    try:
        yield
    except (OSError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, (ValueError, RuntimeError)) and os.fspath(directory) in str(error):
            raise
        raise ValueError(f"{directory}: {what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def opened(path):
    """A safetensors file."""
    from safetensors import SafetensorError, safe_open
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None
    with file:
        yield file


def _slice(file, path, tensor):
    from safetensors import SafetensorError
    try:
        return file.get_slice(tensor)
    except SafetensorError as error:
        raise ValueError(f"{path}: {tensor}: {error}") from None


class Reached(Exception):
    """The layer in question has run: nobody needs the rest of the forward."""


def _to(tree, device):
    """The tensors of a state on another device. Views of a large tensor would keep it alive, so that none is left."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to(device)
    if isinstance(tree, collections.abc.Mapping):
        return {key: _to(value, device) for key, value in tree.items()}
    return type(tree)(_to(value, device) for value in tree) if isinstance(tree, (tuple, list)) else tree


def _bytes(tree):
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return sum(_bytes(value) for value in values)


class States:
    """What layers returned, by batch: in memory up to `limit` bytes, in files of a directory beyond. A directory of the
    caller's is kept, and holds the states that are in memory too: they can be taken up again by another process."""

    def __init__(self, limit, directory=None):
        self._limit, self._memory, self._used = limit, {}, 0
        self._own = None if directory else tempfile.TemporaryDirectory(prefix="nib-states-")
        self._directory = directory or self._own.name
        os.makedirs(self._directory, exist_ok=True)

    def _path(self, key):
        return os.path.join(self._directory, f"{key}.pt")

    def __setitem__(self, key, state):
        self._used -= _bytes(self._memory.pop(key, None))
        kept = self._used + _bytes(state) <= self._limit
        if kept:
            self._memory[key] = state
            self._used += _bytes(state)
        if not kept or not self._own:
            torch.save(state, self._path(key) + ".tmp")
            os.replace(self._path(key) + ".tmp", self._path(key))

    def __getitem__(self, key):
        if key in self._memory:
            return self._memory[key]
        try:
            return torch.load(self._path(key), map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle and torch have one each
            said = str(error).partition("\n")[0] or type(error).__name__
            remedy = "" if self._own else "; --restart begins anew"
            raise ValueError(f"{self._path(key)}: a state that was kept cannot be read: {said}{remedy}") from error

    def __delitem__(self, key):
        self._used -= _bytes(self._memory.pop(key, None))
        with contextlib.suppress(FileNotFoundError):
            os.remove(self._path(key))


class Source:
    """The tensors of a directory of safetensors, as transformers' loader takes them: by name, loaded when indexed."""

    def __init__(self, directory):
        self.directory = directory
        self.files = _shards(directory)  # {tensor: file}

    def __iter__(self):
        return iter(self.files)

    def prepare(self, loader):
        """Fit the tensors to a model; whether their names have changed."""
        return False

    @contextlib.contextmanager
    def slices(self, tensors):
        """{tensor: its slice}."""
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(opened(path))
                     for path in {self.files[tensor] for tensor in tensors}}
            yield {tensor: _slice(files[self.files[tensor]], self.files[tensor], tensor) for tensor in tensors}

    def install(self, loader, names):
        """Put in place what is no plain parameter. Returns what takes it away again."""
        return lambda: None

    def stored_dtype(self):
        """The dtype of the first tensor of 16 or 32 bits."""
        names = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
        for tensor, path in self.files.items():
            with opened(path) as file:
                stored = names.get(_slice(file, path, tensor).get_dtype())
            if stored:
                return stored
        return torch.float32


def fold_scales(directory):
    """{module: (what its columns were multiplied with, what its rows were divided by)} of a folded checkpoint; None for
    what was not."""
    from safetensors import safe_open
    path = os.path.join(directory, "nib-fold.scales")
    if not os.path.exists(path):
        return {}
    with safe_open(path, framework="pt") as file:
        columns, rows = (json.loads(file.metadata()[key]) for key in ("columns", "rows"))
        return {module: tuple(file.get_tensor(which[module]) if module in which else None for which in (columns, rows))
                for module in {**columns, **rows}}


def _shards(directory):
    """{tensor: file} of a directory of safetensors."""
    index = os.path.join(directory, "model.safetensors.index.json")
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            found = json.load(file)
        found = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise ValueError(f"{index}: it has no weight_map")
        for name in set(found.values()):
            if os.path.basename(name) != name:
                raise ValueError(f"{index}: {name!r} is not a file of the directory")
        return {tensor: os.path.join(directory, name) for tensor, name in found.items()}
    files = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    if not files:
        raise ValueError(f"{directory}: there are no safetensors files in it")
    found = {}
    for name in files:
        path = os.path.join(directory, name)
        with opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _model_class(config, directory):
    import transformers
    for name in getattr(config, "architectures", None) or []:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    try:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ValueError(f"{directory}: transformers has no causal language model for {config.model_type!r}") from None


@contextlib.contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _find_layers(model):
    """The name of the list of decoder layers: the outermost with the most parameters, within the decoder."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder = model if decoder is None else decoder
    within = next((name for name, module in model.named_modules() if module is decoder), "")
    found, best = None, 0
    outer = []
    for name, module in decoder.named_modules(prefix=within):
        if not isinstance(module, torch.nn.ModuleList) or any(name.startswith(seen) for seen in outer):
            continue
        outer.append(name + ".")
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > best:
            found, best = name, size
    if not found:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers")
    return found


class Loader:
    """A model of transformers on the meta device, and how its parameters come from a Source. `dtype` is what it
    computes in (None: what config.json says); `experts` is transformers' implementation of experts."""

    def __init__(self, directory, device="cpu", dtype=None, experts=None, source=None):
        import transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
        self.directory, self.device = os.fspath(directory), torch.device(device)
        self.source = source or Source(self.directory)
        with naming(self.directory, "transformers cannot read its config.json"):
            config = transformers.AutoConfig.from_pretrained(self.directory, local_files_only=True)
        if getattr(config, "quantization_config", None):
            if source is None:
                raise ValueError(f"{self.directory}: it is quantized; take the original")
            del config.quantization_config
        self.dtype = dtype or self._stored_dtype(config)
        if experts:
            config._experts_implementation = experts
        with naming(self.directory, "transformers cannot make a model of its config.json"), torch.device("meta"), \
                _default_dtype(self.dtype):
            self.model = _model_class(config, self.directory)(config).eval().requires_grad_(False)
        self._mapping = get_model_conversion_mapping(self.model)
        self._plan = self.model._get_dtype_plan(self.dtype)
        self._sources = self._find_sources()
        if self.source.prepare(self):
            self._sources = self._find_sources()

    def load(self):
        """The whole model, in memory."""
        self._load(lambda name: True)
        return self.model

    def files(self):
        """The files that tensors are read from."""
        return sorted({*self.source.files.values()})

    def sources(self, parameter):
        """The tensors of the checkpoint that a parameter is made of, in their order: a stack of experts of many."""
        return self._sources.get(parameter, [])

    # ---- Loading ----

    def _stored_dtype(self, config):
        for found in (config, getattr(config, "get_text_config", lambda: config)()):
            if isinstance(getattr(found, "dtype", None), torch.dtype):
                return found.dtype
        return self.source.stored_dtype()

    def _find_sources(self):
        """{parameter: tensors of the checkpoint}, by transformers' renamings and conversions."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        known, prefix, found = self.model.state_dict(), self.model.base_model_prefix, {}
        for tensor in sorted(self.source, key=dot_natural_key):
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, known)
            if name not in known and tensor in known:
                name, pattern = rename_source_key(tensor, [], [], prefix, known)
            targets = by_pattern[pattern].target_patterns if pattern else [""]
            for target in targets:
                found.setdefault(name.replace(targets[0], target) if target else name, []).append(tensor)
        return found

    def _load(self, chosen):
        """Load the parameters and buffers for which chosen(name) is true, and compute the buffers that no file has.
        Returns what takes away what the source put in their place."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig
        names = [name for name in self.model.state_dict() if chosen(name)]
        tensors = dict.fromkeys(tensor for name in names for tensor in self.sources(name))
        config = LoadStateDictConfig(device_map={"": self.device}, dtype=self.dtype, dtype_plan=self._plan,
                                     weight_mapping=self._mapping)
        with self.source.slices(tensors) as slices, _quiet():
            info, _ = convert_and_load_state_dict_in_model(self.model, slices, config)
        if info.conversion_errors or info.mismatched_keys:
            first = next(iter([*info.conversion_errors.values(), *map(str, info.mismatched_keys)]))
            raise ValueError(f"{self.directory}: its tensors do not fit {type(self.model).__name__}: {first}")
        self._tie()
        self._compute_buffers(chosen)
        for name in names:
            if _get(self.model, name).is_meta:
                raise ValueError(f"{self.directory}: it has no tensor for {name}")
        return self.source.install(self, names)

    def _tie(self):
        """Heads that are the embedding: parameters that were set are no longer shared."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        for name, source in tied.items():
            if _get(self.model, name).is_meta and not _get(self.model, source).is_meta and not self.sources(name):
                _set(self.model, name, _get(self.model, source))

    def _compute_buffers(self, chosen):
        """Buffers that are not stored (frequencies of positions), and parameters that need not be, are what the model
        initializes them to: their module, or one around it. transformers leaves tensors with its flag as they are."""
        for _, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            tensor._is_hf_initialized = not tensor.is_meta
        around, computed = {}, getattr(self.model, "_keys_to_ignore_on_load_missing", None) or []
        for name, module in self.model.named_modules():
            for key, value in [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)]:
                path, stored = f"{name}.{key}" if name else key, key in module._parameters
                if stored and not any(re.search(pattern, path) for pattern in computed):
                    continue
                if value.is_meta and chosen(path):
                    made = torch.empty_like(value, device=self.device)
                    _set(self.model, path, torch.nn.Parameter(made, False) if stored else made)
                    parts = name.split(".") if name else []
                    around.update(dict.fromkeys(".".join(parts[:i]) for i in range(len(parts), -1, -1)))
        with torch.no_grad():
            for name in around:
                self._owner(name)._init_weights(self.model.get_submodule(name))

    def _owner(self, name):
        """The innermost model of transformers that a module belongs to: it knows how to initialize it."""
        import transformers
        while not isinstance(self.model.get_submodule(name), transformers.PreTrainedModel):
            name = name.rpartition(".")[0]
        return self.model.get_submodule(name)


class Streamed(Loader):
    """A causal language model of a directory of safetensors, one decoder layer at a time."""

    def __init__(self, directory, device="cpu", dtype=None, experts=None, source=None):
        super().__init__(directory, device, dtype, experts, source)
        if getattr(self.model.config, "is_encoder_decoder", False):
            raise ValueError(f"{self.directory}: {self.model.config.model_type} has an encoder, and only decoders run "
                             "by layer")
        self._list = _find_layers(self.model)
        self._layers = list(self.model.get_submodule(self._list))
        self._forwards = [layer.forward for layer in self._layers]
        self._load_outside()

    def __len__(self):
        return len(self._layers)

    def layer(self, n):
        """The module of layer n, and its name."""
        return self._layers[n], f"{self._list}.{n}"

    def _load_outside(self):
        """All but the layers, the head, and models within that do not hold the layers: eyes and ears are not needed."""
        import transformers
        apart = [name for name, module in self.model.named_modules()
                 if name and isinstance(module, transformers.PreTrainedModel) and not self._list.startswith(f"{name}.")]
        head = self.model.get_output_embeddings()
        self._head = [name for name, module in self.model.named_modules() if head is not None and module is head]
        apart = tuple(other + "." for other in [*apart, self._list, *self._head])
        self._load(lambda name: not name.startswith(apart))
        self.outside = [name for name, _ in self.model.named_parameters() if not name.startswith(apart)]

    @contextlib.contextmanager
    def loaded(self, n):
        """With the weights of layer n (len(self): of the head) in memory."""
        prefixes = tuple(name + "." for name in ([f"{self._list}.{n}"] if n < len(self) else self._head))
        names = [name for name, _ in [*self.model.named_parameters(), *self.model.named_buffers()]
                 if name.startswith(prefixes)]
        before = {name: _get(self.model, name) for name in names}
        take_away = None
        try:
            take_away = self._load(lambda name: name.startswith(prefixes))
            yield self._layers[n] if n < len(self) else self.model.get_output_embeddings()
        finally:
            if take_away:
                take_away()
            for name, value in before.items():
                _set(self.model, name, value)

    # ---- Running ----

    @torch.inference_mode()
    def run(self, n, tokens, state=None, head=True):
        """Layer n on a batch of tokens [sequences, length]: its state, from the state after layer n - 1. With
        n = len(self) the logits, on the device; with head=False what stands between the layers and the head runs, and
        nothing is returned. Layer n must be loaded."""
        reached = {}
        if n and not (isinstance(state, dict) and isinstance(state.get("shared"), dict) and "output" in state):
            raise ValueError(f"what is to be the state after layer {n - 1} is none")
        before = _to(state, self.device) if n else None

        def earlier(*_, **given):
            for key, value in before["shared"].items():
                if not isinstance(given.get(key), collections.abc.MutableMapping):
                    raise ValueError(f"the state after layer {n - 1} has {key!r} for a layer that takes none")
                given[key].update(value)
            return before["output"]

        def last(*args, **given):
            output = self._forwards[n](*args, **given)
            shared = {key: dict(value) for key, value in given.items()
                      if isinstance(value, collections.abc.MutableMapping) and value}  # what layers leave for others
            reached.update(_to({"output": output, "shared": shared}, "cpu"))
            raise Reached

        def no_head(*_, **__):
            raise Reached

        patched = {layer: last if i == n else earlier for i, layer in enumerate(self._layers[:n + 1])}
        if not head and self._head:
            patched[self.model.get_output_embeddings()] = no_head
        for module, forward in patched.items():
            module.forward = forward
        try:
            out = self.model(input_ids=tokens.to(self.device), use_cache=False)
        except Reached:
            return reached
        finally:
            for module in patched:
                del module.forward
        if n < len(self):
            raise ValueError(f"{self.directory}: {type(self.model).__name__} does not call its layer {n}")
        return out.logits if getattr(out, "logits", None) is not None else out[0]


def _get(model, name):
    parent, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(parent), leaf)


def _set(model, name, value):
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    (module._parameters if leaf in module._parameters else module._buffers)[leaf] = value


@contextlib.contextmanager
def _quiet():
    """Without a bar for every layer."""
    from transformers.utils import logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
