# SPDX-License-Identifier: Apache-2.0
"""A quantizer that leaves values as they are, for recipes that keep some tensors in high precision."""
import torch

from .quantized_tensor import QuantizedTensor, QuantizedTensorStorage, Quantizer, aten


class IdentityQuantizer(Quantizer):
    """Results hold the tensor itself, cast to `dtype` where that is given. One buffer serves both usages."""

    def __init__(self, *, dtype=None, rowwise=True, columnwise=True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def copy(self):
        other = IdentityQuantizer(dtype=self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        other.internal, other.optimize_for_gemm = self.internal, self.optimize_for_gemm
        return other

    def _held(self, tensor):
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.dequantize()
        held = tensor.detach()
        return held if self.dtype is None else held.to(self.dtype)

    def _wrap(self, data, requires_grad=False):
        if self.internal:
            return IdentityTensorStorage(hp_data=data, fake_dtype=data.dtype, quantizer=self)
        return IdentityTensor(data.shape, data.dtype, hp_data=data, quantizer=self, device=data.device,
                              requires_grad=requires_grad)

    def quantize_impl(self, tensor):
        return self._wrap(self._held(tensor))

    def make_empty(self, shape, *, dtype=torch.float32, device=None, requires_grad=False, pin_memory=False):
        dtype = dtype if self.dtype is None else self.dtype
        return self._wrap(torch.zeros(tuple(shape), dtype=dtype, device=device, pin_memory=pin_memory), requires_grad)

    def update_quantized(self, src, dst, *, noop_flag=None):
        if not isinstance(dst, IdentityTensorStorage):
            raise ValueError(f"IdentityQuantizer can only update IdentityTensorStorage, not {type(dst).__name__}")
        if noop_flag is not None and float(noop_flag) != 0:
            return dst
        data, held = self._held(src), dst._hp_data
        if held is not None and (held.shape, held.dtype, held.device) == (data.shape, data.dtype, data.device):
            held.copy_(data)
        else:
            dst._hp_data = data
        dst._dtype = data.dtype
        return dst

    def is_requantization_safe(self):
        return True

    def _get_compatible_recipe(self):
        from .recipe import CustomRecipe
        return CustomRecipe


class IdentityTensorStorage(QuantizedTensorStorage):
    """_hp_data: the values, for both usages."""

    def __new__(cls, *args, hp_data, fake_dtype=None, quantizer=None, **kwargs):
        if issubclass(cls, torch.Tensor):
            self = QuantizedTensor.__new__(cls, *args, fake_dtype=fake_dtype, **kwargs)
        else:
            self = object.__new__(cls)
            self._dtype = fake_dtype or (torch.float32 if hp_data is None else hp_data.dtype)
        self._hp_data = hp_data
        self._quantizer = None if quantizer is None else quantizer.copy()
        return self

    def __init__(self, *args, **kwargs):
        """__new__ has done it all."""

    def clear(self):
        if self._hp_data is not None:
            self._hp_data.data = torch.empty(0, dtype=self._hp_data.dtype, device=self._hp_data.device)

    def copy_from_storage(self, src):
        if not isinstance(src, IdentityTensorStorage):
            raise TypeError(f"copy_from_storage of {type(self).__name__} takes IdentityTensorStorage, "
                            f"not {type(src).__name__}")
        if self._hp_data is not None and src._hp_data is not None:
            self._hp_data.copy_(src._hp_data)

    def get_metadata(self):
        return {"hp_data": self._hp_data, "quantizer": self._quantizer, "fake_dtype": self._dtype}

    def prepare_for_saving(self):
        tensors, self._hp_data = [self._hp_data], None
        return tensors, self

    def restore_from_saved(self, tensors):
        self._hp_data = tensors[0]
        return tensors[1:]

    def get_data_tensors(self, rowwise_data=True, columnwise_data=True):
        if rowwise_data and columnwise_data:
            return self._hp_data, None
        if rowwise_data or columnwise_data:
            return self._hp_data
        raise ValueError("No data to get, both rowwise_data and columnwise_data are False")

    def _data_there(self):
        if self._hp_data is None:
            raise RuntimeError(f"{type(self).__name__} has no data")
        return self._hp_data

    def dequantize(self, *, dtype=None):
        return self._data_there().to(self._dtype if dtype is None else dtype)

    def update_usage(self, rowwise_usage=None, columnwise_usage=None):
        """Nothing: one buffer serves both usages."""

    def get_usages(self):
        return dict.fromkeys(("rowwise", "columnwise"), self._hp_data is not None)

    def size(self, *args, **kwargs):
        return self._data_there().size(*args, **kwargs)

    @property
    def device(self):
        return self._data_there().device

    def view(self, *shape):
        data = None if self._hp_data is None else self._hp_data.view(*shape)
        return IdentityTensorStorage(hp_data=data, fake_dtype=self._dtype, quantizer=self._quantizer)

    def fsdp_buffer_fields(self):
        return ("_hp_data",)

    def __repr__(self):
        return f"{type(self).__name__}(dtype={self._dtype}, data={self._hp_data})"


# Operations on the values that give a view of them, and stay identity tensors.
_VIEWS = {aten.view.default, aten.split.Tensor, aten.as_strided.default, aten.slice.Tensor}


class IdentityTensor(IdentityTensorStorage, QuantizedTensor):
    """The values as a torch.Tensor of the quantized kind."""

    shape = QuantizedTensor.shape
    size = torch.Tensor.size
    device = property(lambda self: torch.Tensor.device.__get__(self))

    def __repr__(self, *, tensor_contents=None):
        return IdentityTensorStorage.__repr__(self)

    def quantize_(self, tensor, *, noop_flag=None):
        return QuantizedTensorStorage.quantize_(self, tensor, noop_flag=noop_flag)

    def _over(self, data, requires_grad=None):
        return type(self)(data.shape, self.dtype, hp_data=data, quantizer=self._quantizer, device=data.device,
                          requires_grad=self.requires_grad if requires_grad is None else requires_grad,
                          stride=data.stride(), storage_offset=data.storage_offset())

    def view(self, *shape):
        return self._over(self._hp_data.view(*shape))

    def detach(self):
        return self._over(self._hp_data.detach(), requires_grad=False)

    def clone(self):
        return self._over(self._hp_data.detach().clone())

    def contiguous(self, memory_format=torch.contiguous_format):
        if self._hp_data is not None and self._hp_data.is_contiguous(memory_format=memory_format):
            return self
        return self._over(self._hp_data.contiguous(memory_format=memory_format))

    def __reduce_ex__(self, protocol):
        return _make_identity_tensor_in_reduce_ex, (self._hp_data, self._quantizer, self.dtype, self.shape)

    # -- FSDP2: the framework gathers --

    def fsdp_pre_all_gather(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy):
        return (self._hp_data,), (self._quantizer,)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        data, quantizer = all_gather_outputs[0], metadata[0]
        dtype = quantizer.dtype if quantizer is not None and quantizer.dtype is not None else param_dtype
        if data.dtype != dtype:
            raise RuntimeError(f"{data.dtype} was gathered for an IdentityTensor of {dtype}")
        if out is None:
            out = IdentityTensor(data.shape, dtype, hp_data=data, quantizer=quantizer, device=data.device)
        else:
            out._hp_data, out._dtype = data, dtype
        return out, all_gather_outputs

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        tensor = args[0] if args else None
        if isinstance(tensor, IdentityTensor):
            if func == aten.detach.default:
                return tensor.detach()
            if func == aten.clone.default:
                return tensor.clone()
            if func in _VIEWS:
                result = func(tensor._hp_data, *args[1:], **kwargs)
                return [tensor._over(part) for part in result] if isinstance(result, (list, tuple)) \
                    else tensor._over(result)
            if func == aten.copy_.default:
                source = args[1]._hp_data if isinstance(args[1], IdentityTensor) else args[1]
                if isinstance(source, QuantizedTensor):
                    source = source.dequantize()
                tensor._hp_data.copy_(source, *args[2:], **kwargs)
                return tensor
            if func == aten.new_zeros.default and tensor._quantizer is not None:
                return tensor._quantizer.make_empty(args[1], dtype=kwargs.get("dtype") or tensor.dtype,
                                                    device=kwargs.get("device") or tensor.device,
                                                    pin_memory=bool(kwargs.get("pin_memory")))
        return QuantizedTensor.__torch_dispatch__.__func__(cls, func, types, args, kwargs)


def _make_identity_tensor_in_reduce_ex(hp_data, quantizer, dtype, shape):
    return IdentityTensor(shape, dtype, hp_data=hp_data, quantizer=quantizer,
                          device=None if hp_data is None else hp_data.device)


torch.serialization.add_safe_globals([_make_identity_tensor_in_reduce_ex, IdentityTensor, IdentityTensorStorage,
                                      IdentityQuantizer])
