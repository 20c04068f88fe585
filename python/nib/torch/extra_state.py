# SPDX-License-Identifier: Apache-2.0
"""What a pickled extra state may be: TransformerEngine's names for the question. Layers of nib read such states without
running code, whatever the answer."""
import os
import pickletools
from enum import Enum

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


class CheckpointExtraStatePolicy(Enum):
    """What a recipe keeps: nothing, histories, or what its function asks for."""
    STATELESS = "stateless"
    STATEFUL_FP8_DELAYED_SCALING = "stateful_fp8_delayed_scaling"
    DYNAMIC = "dynamic"


_MODULES = ("transformer_engine.common.recipe", "nib.torch.recipe")
_POLICIES = {"DelayedScaling": CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING,
             "CustomRecipe": CheckpointExtraStatePolicy.DYNAMIC,
             **dict.fromkeys(("Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling"),
                             CheckpointExtraStatePolicy.STATELESS)}
_RECIPE_POLICIES = {(module, name): policy for module in _MODULES for name, policy in _POLICIES.items()}
_HISTORIES = {"scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd"}


def recipe_extra_state_policy(recipe):
    return _RECIPE_POLICIES.get((type(recipe).__module__, type(recipe).__name__))


def is_stateless_recipe(recipe):
    return recipe_extra_state_policy(recipe) is CheckpointExtraStatePolicy.STATELESS


def unsafe_pickle_extra_state_enabled():
    return os.environ.get(UNSAFE_PICKLE_EXTRA_STATE_ENV, "0") == "1"


def extra_state_pickle_advisory(context):
    return (f"Refusing to load pickled Transformer Engine extra state for {context}: it names more than a recipe that "
            f"keeps nothing, and unpickling can run code. {UNSAFE_PICKLE_EXTRA_STATE_ENV}=1 allows it.")


def should_load_extra_state_pickle(data, context):
    """Whether a payload is to be unpickled: False where it holds nothing, True where it may hold something and the
    environment allows it; RuntimeError otherwise. Nothing is executed."""
    if _holds_nothing(data):
        return False
    if unsafe_pickle_extra_state_enabled():
        return True
    raise RuntimeError(extra_state_pickle_advisory(context))


def _holds_nothing(data):
    strings, globals_, policies = [], False, set()
    try:
        for opcode, argument, _position in pickletools.genops(data):
            if isinstance(argument, str) and "GLOBAL" not in opcode.name:
                strings.append(argument)
            elif opcode.name in ("GLOBAL", "STACK_GLOBAL"):
                globals_ = True
                name = tuple(argument.split()) if opcode.name == "GLOBAL" else tuple(strings[-2:])
                if name in _RECIPE_POLICIES:
                    policies.add(_RECIPE_POLICIES[name])
    except Exception:  # no pickle: whoever wants it has to say so
        return not data
    if _HISTORIES & set(strings):
        return False
    if not globals_:
        return True
    known = policies and CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING not in policies
    return "recipe" in strings and bool(known)
