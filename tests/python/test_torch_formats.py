# SPDX-License-Identifier: Apache-2.0
"""What is special about Float8, MXFP8, blockwise Float8 and groups."""
import copy
import io
import math

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch; TORCH=1 installs it")

from nib.torch import (DType, Float8BlockQuantizer, Float8BlockwiseQTensor, Float8CurrentScalingQuantizer,  # noqa: E402
                       Float8Quantizer, Float8Tensor, GroupedTensor, GroupedTensorStorage, MXFP8Quantizer, MXFP8Tensor,
                       NVFP4Quantizer, NVFP4Tensor, clear_columnwise_cache, group_dequantize, group_quantize,
                       is_grouped_nvfp4tensor, modify_grouped_nvfp4_rowwise_storage, replace_raw_data, split_quantize,
                       tex)

aten = torch.ops.aten


@pytest.fixture
def x():
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(3)).bfloat16()


def is_plain(t):
    return type(t) is torch.Tensor


def fields(t):
    return [getattr(t, f.name) for f in t.FIELDS]


def same(a, b):
    return all((p is None) == (q is None) and (p is None or torch.equal(p, q)) for p, q in zip(fields(a), fields(b)))


# ---- Float8 ----------------------------------------------------------------------------------------------


def test_float8_against_torch(x):
    """torch's own casts, by the rule scale = 448 / amax."""
    t = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(x)
    scale = torch.tensor(448.0) / x.float().abs().max()
    codes = (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(t._data, codes.view(torch.uint8)) and torch.equal(t._transpose, t._data.t())
    assert torch.equal(t._scale_inv, (1 / scale).view(1))
    assert torch.equal(t.dequantize(), (codes.float() * (1 / scale)).bfloat16())


def test_delayed_scaling(x):
    scale, amax = torch.full((1,), 16.0), torch.full((1,), 1.0)
    q = Float8Quantizer(scale, amax, DType.kFloat8E5M2)
    t = q(x)
    assert t._scale_inv.item() == 1 / 16 and amax.item() == x.abs().max().item()
    q(x / 100)
    assert amax.item() == x.abs().max().item()  # raised, never lowered
    q.calibrate(x / 2)
    assert amax.item() == (x / 2).abs().max().item()  # but for a calibration, which starts anew
    made = q.create_tensor_from_data(t._data, torch.bfloat16)
    assert torch.equal(made.dequantize(), t.dequantize()) and made._transpose_invalid
    assert not isinstance(q.create_tensor_from_data(t._data, internal=True), torch.Tensor)
    with pytest.raises(ValueError):
        q.create_tensor_from_data(x)
    assert q.supports_only_rowwise_all_gather() and not q.is_requantization_safe()
    q.scale = torch.ones(2)
    with pytest.raises(ValueError, match="scale"):
        q(x)


def test_current_scaling_ignores_what_it_says(x):
    with pytest.warns(DeprecationWarning):
        q = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, "cpu", scale=torch.ones(1))
    assert q(x).dequantize().shape == x.shape
    pow2 = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, force_pow_2_scales=True)(x)._scale_inv.item()
    assert math.frexp(pow2)[0] == 0.5
    small = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, amax_epsilon=448.0)(x)
    assert small._scale_inv.item() == 1.0
    assert Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(torch.tensor(3.0)).shape == ()


def test_float8_transposes(x):
    t = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(x).detach()
    t._reset_caches()
    assert t._transpose_invalid and t.get_usages() == {"rowwise": True, "columnwise": False}
    t._data.zero_()
    t._create_transpose()
    assert not t._transpose_invalid and not t._transpose.any()
    t.remove_caches()
    assert t._transpose is None
    t.update_usage(columnwise_usage=True)
    t.update_usage(rowwise_usage=False)
    t._reset_caches()
    assert not t._transpose_invalid  # all there is
    with pytest.raises(RuntimeError):
        t.update_usage(rowwise_usage=True)
    assert t.dequantize().shape == x.shape


def test_float8_operations(x):
    t = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(x).detach()
    values = t.dequantize()
    for call in (lambda a: a[3:9], lambda a: a[3], lambda a: a.chunk(4)[1], lambda a: a[:, 5:7], lambda a: a.view(-1),
                 lambda a: a.as_strided((8, 8), (128, 1)), torch.clone, lambda a: a.view(2, 32, 128)):
        part = call(t)
        assert type(part) is Float8Tensor and torch.equal(part.dequantize(), call(values))
    zeros = t.new_zeros((3, 5))
    assert type(zeros) is Float8Tensor and not zeros.dequantize().any()
    assert zeros._scale_inv.data_ptr() != t._scale_inv.data_ptr()
    assert torch.equal((-t), -values) and torch.equal(t.abs(), values.abs())
    t += 1
    assert type(t) is Float8Tensor


# ---- MXFP8 -----------------------------------------------------------------------------------------------


def test_mxfp8_operations(x):
    t = MXFP8Quantizer()(x).detach()
    values = t.dequantize()
    chunks = t.chunk(2)
    assert all(type(p) is MXFP8Tensor for p in chunks)
    assert all(same(p, MXFP8Quantizer()(part)) for p, part in zip(chunks, x.chunk(2)))
    assert is_plain(t.chunk(2, dim=1)[0]) and is_plain(t.split(5)[0])
    assert type(t[:]) is type(t[0:64]) is MXFP8Tensor and is_plain(t[0:32])
    assert type(t.as_strided((64, 128), (128, 1))) is MXFP8Tensor and is_plain(t.as_strided((2, 2), (128, 1)))
    assert type(torch.clone(t)) is MXFP8Tensor
    zeros = t.new_zeros((32, 64))
    assert type(zeros) is MXFP8Tensor and zeros._rowwise_scale_inv.shape == (128, 4)  # padded, unlike elsewhere
    assert is_plain(t.new_zeros((31, 64)))
    assert aten.view.default(t, [2, 32, 128]).shape == (2, 32, 128)
    for shape in ([-1], [128, 64]):
        with pytest.raises(ValueError):
            aten.view.default(t, shape)
    with pytest.warns(UserWarning):
        assert torch.equal(t.view(-1), values.view(-1))
    with pytest.raises(NotImplementedError):
        replace_raw_data(t, t._rowwise_data.clone())
    deep = MXFP8Quantizer()(x.view(4, 16, 128)).detach()
    assert [p.shape for p in deep.split(2)] == [(2, 16, 128)] * 2 and type(deep.split(2)[1]) is MXFP8Tensor
    assert torch.equal(deep.split(2)[1].dequantize(), values.view(4, 16, 128)[2:])
    assert is_plain(deep.split(1)[0])  # 16 rows are not whole blocks


def test_blockwise_operations(x):
    t = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)(x).detach()
    assert type(t[:]) is type(t[0:64]) is Float8BlockwiseQTensor and is_plain(t[0:32]) and is_plain(t.chunk(2)[0])
    assert type(t.as_strided((64, 128), (128, 1))) is Float8BlockwiseQTensor
    assert is_plain(t.as_strided((2, 2), (128, 1))) and is_plain(torch.clone(t)) and is_plain(t.new_zeros((2, 2)))
    assert aten.view.default(t, [64, 128])._rowwise_data is t._rowwise_data
    with pytest.raises(NotImplementedError):
        aten.view.default(t, [2, 32, 128])
    with pytest.raises(TypeError):
        Float8BlockQuantizer(DType.kFloat8E4M3)
    with pytest.raises(ValueError):
        Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=3)
    for q in (MXFP8Quantizer(), Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)):
        assert q.is_requantization_safe()


@pytest.mark.parametrize("quantizer", [NVFP4Quantizer(), Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
                                       Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)])
def test_raw_data(x, quantizer):
    t = quantizer(x).detach()
    values, old = t.dequantize(), t.get_data_tensors()[0]
    new = torch.zeros_like(old)
    replace_raw_data(t, new)
    assert t.get_data_tensors()[0] is new and torch.equal(t.dequantize(), values)
    with pytest.raises(ValueError):
        replace_raw_data(t, new.float())
    with pytest.raises(ValueError):
        replace_raw_data(x, new)
    clear_columnwise_cache(t)
    assert t.get_usages() == {"rowwise": True, "columnwise": False} and torch.equal(t.dequantize(), values)
    clear_columnwise_cache(x)


# ---- Groups ----------------------------------------------------------------------------------------------

QUANTIZERS = [NVFP4Quantizer(), NVFP4Quantizer(with_rht=True), NVFP4Quantizer(block_dims=(16, 16)), MXFP8Quantizer(),
              NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False),
              Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
              Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("counts", [[16, 16, 32], [0, 64, 0], [32, 32], [64]])
def test_groups(x, quantizer, counts):
    parts = x.split(counts)
    expected = [quantizer(p) for p in parts]
    group = group_quantize(x, quantizer, len(counts), torch.tensor(counts))
    members = group.split_into_quantized_tensors()
    assert all(same(a, b) for a, b in zip(members, expected))
    base = group.rowwise_data.data_ptr()
    data = [m.get_data_tensors()[0] for m in members]
    assert all(d.data_ptr() == base + group.offsets[i] * d.numel() // max(1, parts[i].numel())
               for i, d in enumerate(data) if d.numel())  # views, without gaps
    for t, e in zip(split_quantize(x, counts, [quantizer] * len(counts)), expected):
        assert same(t, e)
    different = [quantizer.copy() for _ in counts]
    for q in different[1:]:
        q.set_usage(rowwise=True, columnwise=False)
    for t, q, p in zip(split_quantize(x, counts, different), different, parts):
        assert same(t, q(p))
    values = group_dequantize(group)
    assert all(torch.equal(a, b.dequantize()) for a, b in zip(values.split_into_quantized_tensors(), expected))


def test_group_facts(x):
    even = group_quantize(x, NVFP4Quantizer(), 4)
    uneven = group_quantize(x, NVFP4Quantizer(), 2, torch.tensor([16, 48]))
    assert even.shape == (4, 16, 128) and even.logical_shape == (64, 128) and uneven.shape == (64, 128)
    assert even.all_same_shape() and even.get_common_first_dim() == 16 and even.get_common_last_dim() == 128
    assert not uneven.all_same_first_dim() and uneven.all_same_last_dim() and not uneven.varying_both_dims()
    with pytest.raises(RuntimeError):
        uneven.get_common_first_dim()
    assert uneven.first_dims.tolist() == [16, 48] and uneven.tensor_offsets.tolist() == [0, 2048, 8192]
    assert GroupedTensor.make_tensor_offsets(torch.tensor([16, 48]), 128).tolist() == [0, 2048, 8192]
    assert even.scale_inv_offsets == [0, 1024, 2048, 3072, 4096] and even.has_data() and even.has_columnwise_data()
    both = GroupedTensor.make_grouped_tensor_with_shapes(2, [(16, 32), (32, 16)], NVFP4Quantizer())
    assert both.varying_both_dims() and both.logical_shape == (1, 1024)
    wide = GroupedTensor.make_grouped_tensor_with_shapes(2, [(16, 32), (16, 64)], NVFP4Quantizer())
    assert wide.logical_shape == (16, 96)
    with pytest.raises(RuntimeError):
        wide.get_common_last_dim()
    with pytest.raises(ValueError):
        GroupedTensor.make_grouped_tensor_with_shapes(2, [(16, 32)])
    same_thing = GroupedTensor.make_grouped_tensor(4, None, None, 64, 128, NVFP4Quantizer())
    assert same_thing.tensor_shapes == even.tensor_shapes
    by_rows = GroupedTensor.make_grouped_tensor(2, torch.tensor([16, 48]), None, 64, 128, NVFP4Quantizer())
    assert by_rows.tensor_shapes == [(16, 128), (48, 128)]
    plain = GroupedTensor.make_grouped_tensor_from_rowwise_data(4, (16, 128), x)
    assert torch.equal(torch.cat(plain.split_into_quantized_tensors()), x) and not is_grouped_nvfp4tensor(plain)
    with pytest.raises(ValueError):
        GroupedTensor.make_grouped_tensor_from_rowwise_data(3, (16, 128), x)
    for wrong in (lambda: group_quantize(x, NVFP4Quantizer(), 3), lambda: even.quantize([x]),
                  lambda: group_quantize(x, NVFP4Quantizer(), 2, torch.tensor([16, 64])),
                  lambda: group_quantize(x, NVFP4Quantizer(), 3, torch.tensor([16, 16])),
                  lambda: split_quantize(x, [16], [NVFP4Quantizer()]), lambda: split_quantize(x, [64], [])):
        with pytest.raises(ValueError):
            wrong()
    assert split_quantize(x[:0], [], []) == [] and "NVFP4Quantizer" in repr(even)
    assert isinstance(even, GroupedTensorStorage) and type(even.copy()) is GroupedTensor



def test_groups_in_memory(x):
    """Members lie one after the other: by rows, by columns, by both; what is behind them is not looked at."""
    q = MXFP8Quantizer()
    part = group_quantize(x, q, 2, torch.tensor([16, 16]))
    assert part.logical_shape == (64, 128) and part.first_dims.tolist() == [16, 16] and part.offsets[-1] == 4096
    assert torch.equal(part.split_into_quantized_tensors()[1].dequantize(), q(x[16:32]).dequantize())
    flat = x.reshape(-1)
    wide = group_quantize(x, q, 2, last_dims=torch.tensor([32, 96]))
    assert wide.tensor_shapes == [(64, 32), (64, 96)] and wide.last_dims.tolist() == [32, 96]
    assert wide.first_dims is None
    for member, begin, shape in zip(wide.split_into_quantized_tensors(), (0, 2048), wide.tensor_shapes):
        want = q(flat[begin:begin + shape[0] * shape[1]].view(shape))
        assert torch.equal(member._rowwise_data, want._rowwise_data)
    both = group_quantize(flat.view(1, -1), q, 2, torch.tensor([32, 32]), torch.tensor([64, 96]))
    assert both.tensor_shapes == [(32, 64), (32, 96)] and both.tensor_offsets.tolist() == [0, 2048, 5120]
    offsets = torch.tensor([0, 2048, 4096])
    assert group_quantize(x, q, 2, torch.tensor([16, 16]), tensor_offsets=offsets).tensor_offsets is offsets
    group, sums = tex.bgrad_group_quantize(x, q, 2, torch.tensor([16, 48]))
    assert torch.allclose(sums, torch.stack([x[:16].float().sum(0), x[16:].float().sum(0)]).to(x.dtype))
    values = group_dequantize(group, DType.kBFloat16)
    assert values.fake_dtype == torch.bfloat16 and values.first_dims is group.first_dims
    sizes, (ends, starts) = tex.splits_to_offsets_multi(
        torch.tensor([3, 0, 5], dtype=torch.int32), strides=[1, 7], include_leading_zero=[False, True],
        dtypes=[torch.int32, torch.int64])
    assert sizes.dtype == torch.int64 and ends.tolist() == [3, 3, 8] and starts.tolist() == [0, 21, 21, 56]
    assert ends.dtype == torch.int32


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
def test_float8_groups(x, usages):
    """amax, scale and scale_inv of each member; one scale_inv for both usages."""
    q = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, rowwise=usages[0], columnwise=usages[1])
    counts = [16, 0, 48]
    group = group_quantize(x, q, 3, torch.tensor(counts))
    members = x.split(counts)
    assert group.amax.tolist() == [0.0 if not m.numel() else m.abs().max().item() for m in members]
    scale_inv = group.scale_inv if usages[0] else group.columnwise_scale_inv
    assert scale_inv.shape == (3,) and torch.allclose(scale_inv, 1 / group.scale) and scale_inv[1] == 1
    assert (group.scale_inv is None) is not usages[0]
    if all(usages):
        assert group.columnwise_scale_inv is group.scale_inv
    for member, plain in zip(group.split_into_quantized_tensors(), members):
        if plain.numel():
            assert torch.equal(member.dequantize(), q(plain).dequantize())
    before = group.amax.clone()
    group_quantize(2 * x, q, 3, torch.tensor(counts), noop_flag=torch.ones(1), output=group)
    assert torch.equal(group.amax, before)
    group_quantize(2 * x, q, 3, torch.tensor(counts), output=group)
    assert torch.equal(group.amax, 2 * before)


@pytest.mark.parametrize("quantizer", [
    MXFP8Quantizer(), MXFP8Quantizer(rowwise=False), Float8CurrentScalingQuantizer(DType.kFloat8E4M3),
    Float8CurrentScalingQuantizer(DType.kFloat8E4M3, rowwise=False)])
def test_what_fsdp_gathers(quantizer):
    """Buffers of shards, put together along the first dim, are those of the whole."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    x[0, 0] = x[32, 0] = 5.0  # shards of one amax
    whole, shards = quantizer(x), [quantizer(half) for half in x.split(32)]
    buffers, metas = zip(*(shard.fsdp_extract_buffers() for shard in shards))
    out = shards[0]._quantizer.make_empty((64, 64))
    if hasattr(out, "_scale_inv"):
        out._scale_inv = shards[0]._scale_inv
    out.fsdp_assign_gathered([torch.cat(parts) for parts in zip(*buffers)], metas[0])
    for name in metas[0]["field_names"]:
        assert torch.equal(getattr(out, name), getattr(whole, name)), name
    assert torch.equal(out.dequantize(), whole.dequantize())
    with pytest.raises(RuntimeError):
        out.fsdp_assign_gathered([], metas[0])


def test_group_in_place_and_saving(x):
    group = group_quantize(x, NVFP4Quantizer(), 4)
    before = group.rowwise_data.clone()
    group_quantize(x * 2, NVFP4Quantizer(), 4, noop_flag=torch.ones(1), output=group)
    assert torch.equal(group.rowwise_data, before)
    group_quantize(x.flip(0), NVFP4Quantizer(), 4, output=group)
    assert same(group.split_into_quantized_tensors()[0], NVFP4Quantizer()(x.flip(0)[:16]))
    saved, same_group = group.prepare_for_saving()
    assert len(saved) == 10 and same_group is group and not group.has_data()
    assert group.restore_from_saved([*saved, 1]) == [1] and group.has_data()
    new = torch.zeros_like(group.rowwise_data)
    values = group.dequantize()
    assert is_grouped_nvfp4tensor(group)
    modify_grouped_nvfp4_rowwise_storage(group, new)
    assert group.rowwise_data is new and torch.equal(group.dequantize(), values)
    assert group._members()[1]._rowwise_data.data_ptr() == new.data_ptr() + new.numel() // 4
    with pytest.raises(ValueError):
        modify_grouped_nvfp4_rowwise_storage(group, new[:-1])
    with pytest.raises(AssertionError):
        modify_grouped_nvfp4_rowwise_storage(group, new.float())
    with pytest.raises(ValueError):
        modify_grouped_nvfp4_rowwise_storage(x, new)
    group.clear()
    assert group.num_tensors == 0 and not group.has_data() and group.logical_shape == (0, 0)


def test_group_operations(x):
    group = group_quantize(x, NVFP4Quantizer(), 4)
    assert type(group.detach()) is type(aten.alias.default(group)) is GroupedTensor
    assert group.detach().rowwise_data is group.rowwise_data
    assert type(aten.expand.default(group, [4, 16, 128])) is type(group.expand_as(group)) is GroupedTensor
    assert group.view(-1).data_ptr() == group.rowwise_data.data_ptr()
    for call in (lambda: group.view(64, 128), lambda: group.t() if group.dim() == 2 else group.transpose(0, 1),
                 lambda: group[0], lambda: group[0:2], lambda: group.unsqueeze(0), lambda: torch.cat([group, group]),
                 lambda: group.split(2), lambda: group.permute(1, 0, 2), lambda: group.expand(2, 4, 16, 128)):
        with pytest.raises(RuntimeError):
            call()
    values = group.dequantize()
    assert torch.equal(group + 1, values + 1) and torch.equal(group.sum(), values.sum())
    group.mul_(2)
    assert torch.equal(group.dequantize(), 2 * values)
    parameter = torch.nn.Parameter(group)
    assert isinstance(parameter, GroupedTensor) and parameter.requires_grad
    with torch.no_grad():
        parameter.zero_()
    assert not parameter.dequantize().any()
    with pytest.raises(RuntimeError, match="one shape"):
        group_quantize(x, NVFP4Quantizer(), 2, torch.tensor([16, 48])) + 1


def test_group_copies(x):
    group = group_quantize(x, NVFP4Quantizer(), 2, torch.tensor([16, 48]))
    file = io.BytesIO()
    torch.save({"experts": group}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["experts"]
    parameter = torch.nn.Parameter(group)
    for other in (loaded, group.clone(), copy.deepcopy(group), copy.deepcopy(parameter)):
        assert type(other) is GroupedTensor and other.tensor_shapes == group.tensor_shapes
        assert all(same(a, b) for a, b in zip(other._members(), group._members()))
        assert other.rowwise_data.data_ptr() != group.rowwise_data.data_ptr()
    twin = copy.deepcopy(parameter)
    assert twin.requires_grad and isinstance(twin, torch.nn.Parameter)
    module = torch.nn.Module()
    module.experts = parameter
    state = copy.deepcopy(module.state_dict())
    assert type(state["experts"]) is GroupedTensor
    with torch.no_grad():
        for member in parameter._members():
            member.zero_()
    module.load_state_dict(state)
    assert all(same(a, b) for a, b in zip(parameter._members(), loaded._members()))


def test_members_are_tensors_of_their_format(x):
    member = group_quantize(x, NVFP4Quantizer(), 4)._members()[2]
    assert type(member) is NVFP4Tensor and member.dtype == torch.bfloat16
