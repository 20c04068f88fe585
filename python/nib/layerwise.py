# SPDX-License-Identifier: Apache-2.0
"""Quantize a model while it is calibrated, a layer at a time: `python -m nib.calibrate --quantize OUT --gptq`.

When the statistics and the Hessians of a layer are there, the layer alone, a small checkpoint, goes through the
library's own quantization; its codes stay in a directory beside the run's other files, and its Hessians go. In the
end the whole model is quantized as `nib quantize --codes` does it: what was chosen is taken over, all else is written
by the same plan as ever. So disk and memory are those of one layer's Hessians, and a run that was killed goes on with
the layer that it was at.

`sequential`: what was lost before is made up for (nib.corrections).
"""
import json
import os
import shutil

import torch

from . import budget, evaluate, streaming
from ._checkpoint import Weights, dequantize_checkpoint, quantize_checkpoint
from ._library import ModeError

__all__ = ["Layers", "NUMERICS", "best_fold"]

NUMERICS = ("fold", "gptq", "damp")  # options of a quantization that a layer needs too
FOLDS = (0.0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5)  # exponents that are tried; 0: no fold
FOLD, NOISE = 0.25, 0.04  # the default, and by how much less KL tells a better one from a lucky one


def best_fold(found):
    """Of {exponent: KL}: the least, but the default where that is not told from it."""
    best = min(found, key=found.get)
    return FOLD if found[FOLD] <= found[best] * (1 + NOISE) else best


class Layers:
    """The codes of a run, by layer, in a directory. `options` are quantize_checkpoint's."""

    def __init__(self, model, directory, out, options, sequential=False):
        self.model, self.directory, self.options = model, directory, options
        self.codes = os.path.join(directory, "codes")
        os.makedirs(self.codes, exist_ok=True)
        plain = {key: value for key, value in options.items() if key not in (*NUMERICS, "activations")}
        plan = quantize_checkpoint(model.directory, out, dry_run=True, **plain)  # what is wrong is said at once
        self.chosen = [row["name"] for row in plan["rows"] if row["action"] == "quantize"]
        self.stacks = self._keeps_stacks(out, plain)
        if self.stacks and options.get("gptq"):
            raise ValueError(f"{model.directory}: {options['format']} has its experts in stacks, into which codes that "
                             "GPTQ chose do not go: write compressed-tensors (--format)")
        self.tensors = {}
        if sequential:
            with Weights(model.directory) as weights:
                self.tensors = {name: weights.tensor(name) for name in self.chosen}

    def _keeps_stacks(self, out, options):
        """Whether experts are written as stacks: then all are NVFP4."""
        expert = next((name for name in self.chosen if ".experts." in name), None)
        try:
            if expert:
                quantize_checkpoint(self.model.directory, out, dry_run=True, fp8=[expert], **options)
        except ModeError as error:
            if "stays whole" not in str(error):
                raise
            return True
        return False

    def hessians(self):
        """The directory of the Hessians of the layer at work."""
        return os.path.join(self.directory, "hessians")

    def _within(self, layer):
        """The weights of a layer that are to be quantized, by the checkpoint's names, and the tensors it is made of."""
        prefix = f"{self.model.layer(layer)[1]}."
        tensors = [tensor for name in self.model.model.state_dict() if name.startswith(prefix)
                   for tensor in self.model.sources(name)]
        own = tuple({_layer_of(tensor, layer) for tensor in tensors} - {""})
        return [name for name in self.chosen if own and name.startswith(own)], list(dict.fromkeys(tensors))

    # ---- A layer ----

    def quantize(self, layer, tensors, inputs, save):
        """Layer `layer`, whose statistics and Hessians are there, to codes."""
        chosen, sources = self._within(layer)
        if not chosen:
            return
        work = self._fresh("layer")
        save(os.path.join(work, "stats"), tensors, {"format": "nib-stats-1", "inputs": json.dumps(inputs)})
        self.write_source(work, sources)
        self.keep(layer, self.run(work, chosen))
        shutil.rmtree(work)

    def _fresh(self, name):
        path = os.path.join(self.directory, name)
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
        return path

    def write_source(self, work, sources, replaced=None):
        """A layer alone as a checkpoint; `replaced` has tensors to take instead of the model's."""
        from safetensors.torch import save_file
        source = os.path.join(work, "source")
        os.makedirs(source, exist_ok=True)
        shutil.copy(os.path.join(self.model.directory, "config.json"), source)
        with self.model.source.slices(sources) as slices:
            found = {name: part[...].contiguous() for name, part in slices.items()}
        found.update(replaced or {})
        save_file(found, os.path.join(source, "model.safetensors"), {"format": "pt"})

    def run(self, work, chosen, codes=None, hessians=None):
        """Quantize it. Returns the rows of its plan; the result is in `work`/out."""
        options = {key: self.options[key] for key in NUMERICS if key in self.options}
        if options.get("gptq"):
            options["hessians"] = hessians or self.hessians()
        arguments = {"imatrix": os.path.join(work, "stats"), "only": chosen, "codes": codes, "force": True}
        source, out = os.path.join(work, "source"), os.path.join(work, "out")
        try:
            return quantize_checkpoint(source, out, **arguments, **options)["rows"]
        except ModeError as error:
            if "that could be folded" not in str(error):
                raise
            del options["fold"]  # this layer has no norm for it; the whole model's plan says so
            return quantize_checkpoint(source, out, **arguments, **options)["rows"]

    def keep(self, layer, rows, work=None):
        """The result in `work`/out is the layer's."""
        out = os.path.join(work or os.path.join(self.directory, "layer"), "out")
        for name, kept in (("config.json", "config.json"), ("model.safetensors", f"layer-{layer:05d}.safetensors")):
            os.replace(os.path.join(out, name), os.path.join(self.codes, kept))
        with open(self._note(layer), "w", encoding="utf-8") as file:
            json.dump(rows, file)

    def _note(self, layer):
        return os.path.join(self.directory, f"layer-{layer:05d}.json")

    # ---- A layer in steps ----

    def quantize_in_steps(self, layer, tensors, inputs, save, streams):
        """The same, input by input in the order of their products, with what went before quantized: `streams` is a
        corrections.Streams. Rows of the plan have what was made up for in "sequential"."""
        chosen, sources = self._within(layer)
        work = self._fresh("layer")
        if chosen:
            save(os.path.join(work, "stats"), tensors, {"format": "nib-stats-1", "inputs": json.dumps(inputs)})
            self._steps(layer, work, chosen, sources, inputs, save, streams)
        streams.advance(layer, os.path.join(work, "plain") if chosen else None)
        shutil.rmtree(work)

    def _steps(self, layer, work, chosen, sources, inputs, save, streams):
        takers, replaced, notes, scales, rows, known = {}, {}, {}, {}, None, {}
        originals = self._experts_hessians(layer)
        for module, name in inputs.items():
            takers.setdefault(name, []).append(module)
        self.write_source(work, sources)
        current, at = os.path.join(work, "source"), os.path.join(work, "hessians")
        os.makedirs(at)
        for name, modules in takers.items():
            sums = self._correct(layer, modules, chosen, streams, current, scales, replaced, notes)
            found = {f"{name}.hessian": sums.packed(), f"{name}.hessian_count": torch.tensor([sums.count])} \
                if sums else {key: value for key, value in originals.items() if key.startswith(name + ".hessian")}
            if not found:
                continue  # a router, for one: nothing of it is quantized
            known.update(found)
            self.write_source(work, sources, replaced)
            save(os.path.join(at, f"stats-of-layer-{layer:05d}.safetensors"), known,
                 {"format": "nib-stats-1", "inputs": json.dumps(inputs)})
            rows = self.run(work, chosen, hessians=at)
            scales = {module: columns for module, (columns, _) in
                      streaming.fold_scales(os.path.join(work, "out")).items() if columns is not None}
            current = os.path.join(work, "plain")
            dequantize_checkpoint(os.path.join(work, "out"), current, dtype="f32", force=True)
        rows = rows if rows is not None else self._plain_run(work, chosen)
        for row in rows:
            row["sequential"] = notes.get(row["name"], "none: nothing is known of its input")
        self.keep(layer, rows)

    def _correct(self, layer, modules, chosen, streams, current, scales, replaced, notes):
        """What is to be quantized instead of weights with one input goes to `replaced`, and what is said of them to
        `notes`. Returns the sums of the input; None: it is not known."""
        matrices = {tensor: parameter for tensor, parameter in streams.matrices(layer, modules).items()
                    if tensor.removesuffix(".weight") in chosen}
        if matrices:
            names = {tensor: tensor.removesuffix(".weight") for tensor in matrices}
            sums = streams.compare(layer, next(iter(matrices.values())), current, scales.get(modules[0]))
            notes.update(dict.fromkeys(names.values(), sums.said()))
            with self.model.source.slices(matrices) as slices:
                replaced.update({tensor: sums.corrected(slices[tensor][...]) for tensor in matrices if sums.enough()})
            return sums
        stack = streams.stack(layer, modules, {name: self.tensors[name] for name in chosen})
        if stack is None:
            return None
        own = {expert: next((scales[name] for name in names if name in scales), None)
               for expert, names in stack.names.items()}
        return streams.correct_experts(layer, stack, current, own, replaced, notes)

    def _experts_hessians(self, layer):
        """Of the original, where there are experts."""
        from safetensors import safe_open
        path = os.path.join(self.hessians(), f"stats-of-layer-{layer:05d}.safetensors")
        if not os.path.exists(path):
            return {}
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}

    def _plain_run(self, work, chosen):
        """A layer that has nothing to correct."""
        rows = self.run(work, chosen)
        dequantize_checkpoint(os.path.join(work, "out"), os.path.join(work, "plain"), dtype="f32", force=True)
        return rows

    # ---- All of them ----

    def _whole(self, out, stats, **more):
        """Quantize the whole model, with the codes of its layers."""
        options = {key: value for key, value in self.options.items() if key not in ("gptq", "damp")}
        some = any(name.endswith(".safetensors") for name in os.listdir(self.codes))
        return quantize_checkpoint(self.model.directory, out, imatrix=stats, codes=self.codes if some else None,
                                   **{**options, **more})

    def search_fold(self, stats, tokens, memory, progress=None):
        """{exponent: KL} of the model folded by each, with the statistics of its inputs."""
        note, work = (os.path.join(self.directory, name) for name in ("folds.json", "fold"))
        found = {}
        if os.path.exists(note):
            with open(note, encoding="utf-8") as file:
                found = {float(key): value for key, value in json.load(file).items()}
        activations = "nvfp4" if self.options.get("scheme") == "nvfp4" else "bf16"
        for exponent in FOLDS:
            if exponent not in found:
                self._whole(work, stats, format="compressed-tensors", force=True, fold=exponent or False)
                found[exponent] = evaluate.divergence(self.model, work, tokens, activations, memory)
                with open(note + ".tmp", "w", encoding="utf-8") as file:
                    json.dump(found, file)
                os.replace(note + ".tmp", note)
            if progress:
                progress(len(found), len(FOLDS))
        shutil.rmtree(work, ignore_errors=True)
        return found

    def spend(self, stats, bits, formats, batches, memory, progress=None):
        """The units of a budget of `bits`, with what each is worth and what it becomes. What was measured is there when
        the run goes on."""
        low, high = (os.path.join(self.directory, name) for name in ("nvfp4", "fp8"))
        note = os.path.join(self.directory, "units.json")
        plan = self._whole(low, stats, format="compressed-tensors", dry_run=True)
        units = budget.units_of(plan, formats)
        units = [unit for unit in units if not (self.stacks and unit.name.endswith(".experts"))]
        if os.path.exists(note):
            with open(note, encoding="utf-8") as file:
                gains = json.load(file)
            for unit in units:
                unit.gains = gains[unit.name]
        else:
            activations = "nvfp4" if self.options.get("scheme") == "nvfp4" else "bf16"
            self._whole(low, stats, format="compressed-tensors", force=True)
            if "fp8" in formats:
                plain = {key: value for key, value in self.options.items() if key not in ("gptq", "damp", "format")}
                quantize_checkpoint(self.model.directory, high, imatrix=stats, force=True, fp8=["*"],
                                    format="compressed-tensors", **plain)
            budget.measure(self.model, low, high, units, batches, activations, memory, progress)
            with open(note + ".tmp", "w", encoding="utf-8") as file:
                json.dump({unit.name: unit.gains for unit in units}, file)
            os.replace(note + ".tmp", note)
            for directory in (low, high):
                shutil.rmtree(directory, ignore_errors=True)
        budget.choose(units, plan["changed_elements"], bits)
        return units

    def finish(self, out, stats, **more):
        """Write the whole checkpoint. Returns its plan, with what the plans of the layers said of their weights."""
        begun = os.path.join(self.directory, "begun")
        there = [os.path.exists(os.path.join(out, name)) for name in ("config.json", ".nib-partial")]
        done = os.path.exists(begun) and there == [True, False] and not more.get("force")  # and killed just then
        with open(begun, "w", encoding="utf-8"):
            pass
        plan = self._whole(out, stats, dry_run=done, **more)
        own = {}
        for name in os.listdir(self.directory):
            if name.startswith("layer-") and name.endswith(".json"):
                with open(os.path.join(self.directory, name), encoding="utf-8") as file:
                    own.update({row["name"]: row for row in json.load(file)})
        for row in plan["rows"]:
            row["layer"] = own.get(row["name"])
        return plan


def _layer_of(tensor, layer):
    """"model.layers.3." of "model.layers.3.mlp.up_proj.weight"."""
    before, number, _ = tensor.partition(f".{layer}.")
    return before + number if number else ""
